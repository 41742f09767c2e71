"""Outputs that the user names: a file, a link, a device, or `-`, stdout; files that are replaced in
one rename.
"""

import argparse
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nanogpt_hf.errors import UserError
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
        with suppress(OSError):
            partial.unlink()


def output_file(text: str) -> Path:
    """An argparse type: the path of an output. Rejects at once what cannot be written."""
    path = Path(os.path.realpath(os.path.expanduser(text)))
    if text in ("-", "/dev/stdout"):
        return STDOUT
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is a folder, or in none; name a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written: permission denied")
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
    with output_target(path) as target, written_whole(target) as partial:
        partial.write_text(f"{text}\n", encoding="utf-8")
