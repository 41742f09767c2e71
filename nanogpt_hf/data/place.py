"""Where a folder is written before it is whole: beside its place, or inside the empty one that is there already.

A mounted volume can only be written inside: nothing can be renamed over a mount point, and the folder above it may
belong to somebody else. A folder that was not there is whole or absent; one that was is filled by a few renames at the
end.
"""

import os
from pathlib import Path

_PARTIAL, _LOCK = ".partial", ".lock"
_NO_CONTENT = {_PARTIAL, _LOCK, "lost+found"}  # the last is what ext4 makes


def is_vacant(folder: Path) -> bool:
    """Whether nothing lies in the place of `folder`, or an empty folder."""
    if not os.path.lexists(folder):
        return True
    return folder.is_dir() and all(path.name in _NO_CONTENT for path in folder.iterdir())


def partial_of(folder: Path) -> Path:
    """The hidden folder to write before `put_in_place`."""
    return folder / _PARTIAL if folder.is_dir() else folder.with_name(f".{folder.name}{_PARTIAL}")


def lock_of(folder: Path) -> Path:
    """The file that says who may write there."""
    return folder / _LOCK if folder.is_dir() else folder.with_name(f".{folder.name}{_LOCK}")


def put_in_place(partial: Path, folder: Path, last: str | None = None) -> None:
    """Move what `partial_of` gave to its place; inside a folder the file `last`, which says that all is there, last."""
    if partial.parent != folder:
        partial.rename(folder)
        return
    for path in sorted(partial.iterdir(), key=lambda path: path.name == last):
        path.rename(folder / path.name)
    partial.rmdir()
