"""Replace and remove folders atomically: after a kill or a power cut the old or the new folder
is there, complete.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from nanogpt_hf.place import flush


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
