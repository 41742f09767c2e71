"""Files and folders that are replaced in one rename, and outputs that the user names: a file, a
link, a device, or `-`, stdout.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanogpt_hf.errors import UserError
from nanogpt_hf.place import flush
from nanogpt_hf.runs.redact import redact_tree, redact_urls

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
        with contextlib.suppress(OSError):
            partial.unlink()


def output_file(text: str) -> Path:
    """An argparse type: the path of an output. Rejects at once what cannot be written."""
    path = Path(os.path.realpath(os.path.expanduser(text)))
    if text in ("-", "/dev/stdout"):
        return STDOUT
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is a folder; name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {Path(text).parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written: permission denied")
    return Path(text)


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
    with output_target(path) as target, written_whole(target) as partial:
        partial.write_text(f"{text}\n", encoding="utf-8")


@contextmanager
def stdout_for_outputs(*outputs: Any) -> Iterator[None]:
    """Context that prints to stderr if one of `outputs` is stdout, for that output alone."""
    with contextlib.redirect_stdout(sys.stderr) if STDOUT in outputs else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def replaced_folder(folder: Path, *, filled: bool = False) -> Iterator[Path]:
    """Atomic write: yield an empty hidden folder that replaces `folder` if the block ends without
    an error.

    With `filled` the hidden folder is there already, and may have files.
    The old folder is renamed first and removed last. After a kill between the two renames,
    `restore_folder` brings it back. After an error nothing has changed.
    """
    partial, old = partial_of(folder), old_of(folder)
    try:
        if not filled:
            restore_folder(folder)
            partial.mkdir(parents=True)
        yield partial
        for path in (*partial.rglob("*"), partial):
            flush(path)
        if os.path.lexists(folder):
            remove(old)
            folder.rename(old)
        partial.rename(folder)
        flush(folder.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # the error being raised has the reason
            restore_folder(folder)
        raise
    with contextlib.suppress(OSError):  # the next restore removes it
        remove(old)


def restore_folder(folder: Path) -> None:
    """Undo an unfinished replacement: bring back the renamed folder and remove leftovers."""
    partial, old = partial_of(folder), old_of(folder)
    if os.path.lexists(old) and not os.path.lexists(folder):
        old.rename(folder)
    remove(partial)
    remove(old)


def remove_folder(folder: Path) -> None:
    """Remove a folder atomically: it is renamed first, so that it is never seen incomplete.

    Removes a link only.
    """
    partial = partial_of(folder)
    remove(partial)
    folder.rename(partial)
    remove(partial)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content, if it exists."""
    if os.path.isdir(path) and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def partial_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def old_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
