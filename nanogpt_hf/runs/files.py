"""Atomic file writes, and outputs that the user names: a file, a link, a device, or stdout."""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.redact import redact_tree, redact_urls

STDOUT = Path("-")  # as an output; everything else is then printed to stderr
_NAMES_OF_STDOUT = ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Atomic write: yield a temporary file in the same folder that replaces `path` if the block ends without an error.

    Raises UserError if it cannot be written, or if `path` is a link, a device, a folder or anything else but a regular
    file, which a rename would replace. The temporary file has a random name and is created exclusively, so that no
    file or link of another user is opened.
    """
    partial = path.with_name(f".{secrets.token_hex(6)}.partial{path.suffix}")
    try:
        _check_regular(path)
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666))
        yield partial
        _check_regular(path)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _check_regular(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            kind = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link"}.get(stat.S_IFMT(mode), "not a regular file")
            raise UserError(f"{path}: cannot be written: it is {kind}")


def output_file(text: str) -> Path:
    """An argparse type: the path of an output, `-` for stdout. Rejects at once what cannot be written."""
    if text in _NAMES_OF_STDOUT:
        return STDOUT
    target = Path(os.path.realpath(os.path.expanduser(text)))
    if os.path.isdir(target):
        raise argparse.ArgumentTypeError(f"{text}: is a folder; name a file")
    if not os.path.isdir(target.parent):
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {Path(text).parent}")
    if not os.access(target if _is_special(target) else target.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written: permission denied")
    return Path(text)


def _is_special(path: Path) -> bool:
    """Whether it is a device, pipe or socket, or a name in /dev or /proc, which may be an open file."""
    in_dev_or_proc = path.parts[1:2] in (("dev",), ("proc",)) and path.parts[:3] != ("/", "dev", "shm")
    return in_dev_or_proc or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


@contextmanager
def output_target(path: Path) -> Iterator[Path]:
    """Yield the path to write (by `written_whole`) for the output `path`, which the user named.

    A link is followed: its target is replaced. Output for stdout, a device or a pipe is written to a private folder
    and copied if the block ends without an error.
    """
    if path != STDOUT and not _is_special(path):
        yield Path(os.path.realpath(path))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"output{path.suffix}"
        yield file
        if not file.exists():
            return
        try:
            # A device or pipe has no end to append to; a regular file behind /dev/fd/3 keeps what was written before.
            out = os.fdopen(os.dup(1), "wb") if path == STDOUT else path.open("ab")
            with out, file.open("rb") as written:
                shutil.copyfileobj(written, out)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def write_json(path: Path, tree: Any) -> None:
    """Write `tree` as JSON, URLs redacted, to the output `path`, which the user named.

    Raises UserError if it cannot be written.
    """
    with output_target(path) as target, written_whole(target) as partial:
        partial.write_text(json.dumps(redact_tree(tree, redact_urls), indent=2) + "\n", encoding="utf-8")


@contextmanager
def stdout_for_outputs(*outputs: Any) -> Iterator[None]:
    """Context that prints to stderr if one of `outputs` is stdout, so that stdout has that output only."""
    with contextlib.redirect_stdout(sys.stderr) if STDOUT in outputs else contextlib.nullcontext():
        yield
