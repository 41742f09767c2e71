"""Files that are replaced in one rename, outputs that a user names, what is redacted in them."""

import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nanogpt_hf.errors import UserError

# The name of stdout as an output. Everything else is then printed to stderr.
STDOUT = Path("-")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Atomic write: yield a temporary file in the same folder that replaces `path` if the block
    ends without an error. Raises UserError if it cannot be written.
    """
    # A random name: another user cannot have placed a link there
    partial = path.with_name(f".{secrets.token_hex(6)}.partial{path.suffix}")
    try:
        partial.open("x").close()
        yield partial
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            partial.unlink()


def write_whole(path: Path, text: str) -> None:
    """Write a text, in which paths may have any byte, by `written_whole`."""
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def output_target(path: Path) -> Iterator[Path]:
    """Yield the path to write (by `written_whole`) for the output `path`, which the user named.

    A link is followed. Output for stdout, a device or a pipe is copied there at the end.
    """
    if path != STDOUT and (path.is_file() or not path.exists()):
        yield Path(os.path.realpath(path))
        return
    with tempfile.TemporaryDirectory() as folder:
        # Libraries that write it seek, which stdout and pipes cannot.
        file = Path(folder) / f"output{path.suffix}"
        yield file
        if file.exists():
            try:
                with open(1, "wb", closefd=False) if path == STDOUT else path.open("ab") as out:
                    out.write(file.read_bytes())
            except OSError as error:
                # A write that fails does not know its file.
                error.filename = error.filename or ("stdout" if path == STDOUT else str(path))
                raise


def write_json(path: Path | None, tree: Any) -> None:
    """Write `tree` as JSON, URLs redacted, to the output `path` if the user named one."""
    if path is None:
        return
    with output_target(path) as target:
        write_whole(target, f"{redact_urls(json.dumps(tree, indent=2))}\n")


# A user with a password may have any character before its @; without one, none of a path.
_USER = re.compile(
    r"([a-z][a-z0-9+.-]*://)(?:[^\s/?#]*@|[^\s/?#:]*:(?!\d*[/?#])\S*@)", re.IGNORECASE
)
# Libraries also quote the path alone, with its parameters. The punctuation of the text around a
# URL is no part of it.
_PARAMETERS = re.compile(
    r"""(://[^\s?#]*[?#]|(?<!\S)/[^\s?#]*\?(?=\w+=))\S*?(?=[\])}>'"`,.:;\\]*(?:\s|$))"""
)


def redact_urls(text: str) -> str:
    """`text` without users, passwords and parameters in its URLs: for messages on this machine."""
    return _PARAMETERS.sub(r"\1...", _USER.sub(r"\1", text))


def redact(text: str) -> str:
    """`text` for other people: `redact_urls`, and the user's home folder as ~."""
    if home := os.path.expanduser("~").rstrip("/"):
        text = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?![\w.-])", "~", text)
    return redact_urls(text)
