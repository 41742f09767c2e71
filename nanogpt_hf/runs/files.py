"""Outputs: files that are replaced in one rename, or that the user names: a file, a link, a device,
or `-`, stdout; and what is redacted in them: users, passwords and parameters of URLs, tokens, the
path of the user's home.
"""

import json
import os
import re
import secrets
import shutil
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nanogpt_hf.errors import UserError

STDOUT = Path("-")  # as an output; everything else is then printed to stderr


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Atomic write: yield a temporary file in the same folder that replaces `path` if the block
    ends without an error. Raises UserError if it cannot be written.
    """
    # a random name: another user cannot have placed a link there
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
    """Write a text by `written_whole`."""
    with written_whole(path) as partial:
        # a path may hold any byte
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


def output_file(text: str) -> Path:
    """An argparse type: the path of an output. Rejects at once what cannot be written."""
    path = Path(os.path.realpath(os.path.expanduser(text)))
    if text in ("-", "/dev/stdout"):
        return STDOUT
    if path.is_dir() or not path.parent.is_dir():
        raise ArgumentTypeError(f"{text}: is a folder, or in none; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentTypeError(f"{text}: cannot be written: permission denied")
    return Path(os.path.expanduser(text))


@contextmanager
def output_target(path: Path) -> Iterator[Path]:
    """Yield the path to write (by `written_whole`) for the output `path`, which the user named.

    A link is followed: its target is replaced. Output for stdout, a device or a pipe is written to
    a private folder and copied if the block ends without an error.
    """
    target = Path(os.path.realpath(path))
    special = path == STDOUT or str(path).startswith(("/dev/fd/", "/dev/std"))
    if not special and (target.is_file() or not target.exists()):
        yield target
        return
    with tempfile.TemporaryDirectory() as folder:
        yield (file := Path(folder) / f"output{path.suffix}")
        if file.exists():
            out = os.fdopen(os.dup(1), "wb") if path == STDOUT else path.open("ab")
            with out, file.open("rb") as written:
                shutil.copyfileobj(written, out)


def write_json(path: Path, tree: Any) -> None:
    """Write `tree` as JSON, URLs redacted, to the output `path`, which the user named."""
    text = json.dumps(redact_tree(tree, redact_urls), indent=2)
    with output_target(path) as target:
        write_whole(target, f"{text}\n")


_SECRETS = re.compile(rb"hf_[A-Za-z0-9]{30,}|-----BEGIN [A-Z ]*PRIVATE KEY-----")
# A user with a password may have any character before its @; without one, none of a path.
_URL = re.compile(
    r"([a-z][a-z0-9+.-]*://)([^\s/?#]*@|[^\s/?#:]*:(?!\d*[/?#])\S*@)?([^\s?#]*)([?#]\S*)?",
    re.IGNORECASE,
)
_AFTER_URL = re.compile(r"""[\])}>'"`,.:;]*$""")  # punctuation of the text around the URL


def redact_urls(text: str) -> str:
    """`text` without users, passwords and parameters in its URLs: for messages on this machine.

    A secret in the path is not recognized.
    """

    def hide(url: re.Match[str]) -> str:
        scheme, _, path, parameters = url.groups("")
        end = _AFTER_URL.search(parameters)
        return f"{scheme}{path}{parameters[:1]}{'...' if parameters else ''}{end[0] if end else ''}"

    return _URL.sub(hide, text) if "://" in text else text


def redact_message(text: str) -> str:
    """An error or log line with `redact_urls`, also where a library quotes a secret again."""
    shown = redact_urls(text)
    for _, user, _, parameters in _URL.findall(text):
        for word in re.split(r"[:@=&;?#'\"]", user + parameters):
            if len(word) > 3:
                shown = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "...", shown)
    return shown


def redact(text: str) -> str:
    """`text` for other people: `redact_urls`, and the user's home folder as ~."""
    home = os.path.expanduser("~").rstrip("/")
    if home:
        text = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?![\w.-])", "~", text)
    return redact_urls(text)


def redact_tree(tree: Any, redact_text: Callable[[str], str] = redact) -> Any:
    """A JSON or YAML tree with every string in it redacted."""
    match tree:
        case str():
            return redact_text(tree)
        case dict():
            return {key: redact_tree(value, redact_text) for key, value in tree.items()}
        case list() | tuple():
            return [redact_tree(value, redact_text) for value in tree]
    return tree


def holds_token(content: bytes, token: str) -> bool:
    """Whether `content` has `token`, or anything like a token of the Hub or a private key."""
    return token.encode() in content or _SECRETS.search(content) is not None
