"""Replace and remove folders so that SIGKILL or a power cut at any moment leaves the old one or the new one, whole."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty hidden folder beside `folder` that takes its place when the block ends without an error.

    What is there is renamed aside first and removed last. A kill between the two renames leaves it under the name that
    `restore_folder` knows. After an error everything is as it was before.
    """
    restore_folder(folder)
    partial, old = partial_of(folder), old_of(folder)
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in (*partial.rglob("*"), partial):
            flush(path)
        if os.path.lexists(folder):
            folder.rename(old)
        partial.rename(folder)
        flush(folder.parent)
    except BaseException:
        with contextlib.suppress(OSError):  # the error that is being raised says why
            restore_folder(folder)
        raise
    with contextlib.suppress(OSError):  # the next restore removes it
        remove(old)


def restore_folder(folder: Path) -> None:
    """Undo an unfinished replacement: bring back the folder that was renamed aside, and remove what is left over."""
    partial, old = partial_of(folder), old_of(folder)
    if os.path.lexists(old) and not os.path.lexists(folder):
        old.rename(folder)
    remove(partial)
    remove(old)


def remove_folder(folder: Path) -> None:
    """Remove a folder that others take for whole as long as they see it. Of a link only the link is removed."""
    partial = partial_of(folder)
    remove(partial)
    folder.rename(partial)
    remove(partial)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all that is in it, if it is there."""
    if os.path.isdir(path) and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def partial_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def old_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")
