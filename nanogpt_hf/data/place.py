"""Write a folder completely or not at all: in a hidden folder first, which is then renamed.

Nothing can be renamed over a mount point, and its parent may not be writable. So an empty folder that exists already
is filled by a few renames at the end.
"""

import os
from pathlib import Path

_PARTIAL, _LOCK = ".partial", ".lock"
_NO_CONTENT = {_PARTIAL, _LOCK, "lost+found"}  # the last is what ext4 makes


def is_vacant(folder: Path) -> bool:
    """Whether `folder` does not exist, or is empty."""
    if not os.path.lexists(folder):
        return True
    return folder.is_dir() and all(path.name in _NO_CONTENT for path in folder.iterdir())


def partial_of(folder: Path) -> Path:
    """The hidden folder to write before `put_in_place`."""
    return folder / _PARTIAL if folder.is_dir() else folder.with_name(f".{folder.name}{_PARTIAL}")


def lock_of(folder: Path) -> Path:
    """The lock file for writing `folder`."""
    return folder / _LOCK if folder.is_dir() else folder.with_name(f".{folder.name}{_LOCK}")


def put_in_place(partial: Path, folder: Path, last: str | None = None) -> None:
    """Move the folder of `partial_of` to its place. In an existing folder the file `last` is moved at the end."""
    if partial.parent != folder:
        partial.rename(folder)
        return
    for path in sorted(partial.iterdir(), key=lambda path: path.name == last):
        path.rename(folder / path.name)
    partial.rmdir()
