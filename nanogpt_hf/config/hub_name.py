"""Decide whether a name is a local folder or a Hub id.

A path that does not exist is never looked up on the Hub.
"""

import functools
import logging
import os
import re

from nanogpt_hf.errors import UserError

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", re.ASCII)  # gpt2, user/name
_DEFAULT_FOLDERS = ("runs", "data", "recipes")


def folder_or_hub_id(name: str) -> str:
    """`name` with ~ expanded if that exists; otherwise `name` itself, a Hub id, with a log line
    that it is looked up.

    Raises UserError if `name` looks like a path (./x, /x, ~/x, a/b/c, runs/x) or begins with an
    existing folder: on the Hub, a stranger might own a repository of that name.
    """
    path = os.path.expanduser(name)
    if os.path.exists(path):
        return path
    owner, slash, _ = name.partition("/")
    if not _HUB_ID.fullmatch(name) or (
        slash and (owner in _DEFAULT_FOLDERS or os.path.isdir(owner))
    ):
        raise UserError(
            f"{name}: no such folder; a path is not looked up on the Hub, only user/name is"
        )
    _announce(name)
    return name


@functools.cache
def _announce(name: str) -> None:
    """Log once per name that it is looked up on the Hub."""
    logger.info(f"loading {name} from the Hub", extra={"to_stderr": True})
