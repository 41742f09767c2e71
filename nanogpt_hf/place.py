"""Write, replace and remove a folder completely or not at all: in a hidden folder first, which is
then renamed.

Nothing can be renamed over a mount point, and its parent may not be writable. So `make_once` fills
an empty folder that exists already by a few renames at the end.
"""

import errno
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import filelock

from nanogpt_hf.errors import DataError, Stopped

Facts = TypeVar("Facts")
_PARTIAL = ".partial"
_LOCK = ".lock"
# Names that may be in an empty folder. ext4 makes the last one.
_NO_CONTENT = {_PARTIAL, _LOCK, "lost+found"}

_SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
# The signals that have our handler now.
_caught: list[int] = []


def is_vacant(folder: Path) -> bool:
    """Return whether `folder` does not exist, or is empty."""
    if not os.path.lexists(folder):
        return True
    return folder.is_dir() and all(path.name in _NO_CONTENT for path in folder.iterdir())


def dead_link(path: Path) -> str | None:
    """What is wrong with a path that is, or is in, a link to what does not exist, such as a volume
    that is not mounted; None for any other path.
    """
    for part in (path, *path.parents):
        try:
            os.stat(part)
        except (FileNotFoundError, NotADirectoryError):
            if os.path.islink(part):
                target = os.path.realpath(part)
                return f"{part}: is a link to {target}, which does not exist; mount or make it"
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) == errno.ELOOP and os.path.islink(part):
                return f"{part}: is a link to itself; remove it"
            # What uses the path says what is wrong with it.
            return None
        else:
            return None
    return None


def hidden(folder: Path, ending: str = _PARTIAL) -> Path:
    """Return the hidden folder or file next to `folder`, such as .best.partial."""
    return folder.with_name(f".{folder.name}{ending}")


def partial_of(folder: Path) -> Path:
    """Return the hidden folder that `filled_folder` fills."""
    return folder / _PARTIAL if folder.is_dir() else hidden(folder)


def old_of(folder: Path) -> Path:
    return hidden(folder, ".old")


def lock_of(folder: Path) -> Path:
    """Return the lock file for writing `folder`."""
    return folder / _LOCK if folder.is_dir() else hidden(folder, _LOCK)


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(partial: Path) -> None:
    """Give all files in `partial` the mode that a new file has there, and flush everything.

    safetensors and others write files that their owner alone can read, whatever the umask says.
    """
    # The umask cannot be read without a change, so a new file shows the mode.
    paths = [*partial.rglob("*")]
    probe = partial / _PARTIAL
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in paths:
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) != mode:
            path.chmod(mode)
    for path in (*paths, partial):
        flush(path)


@contextmanager
def filled_folder(folder: Path, last: str | None = None) -> Iterator[Path]:
    """Yield a hidden folder whose content is that of `folder`, which is vacant, if the block ends
    without an error.

    In an existing folder the file `last` is moved at the end. All is on the disk before it is
    moved, so that a power cut leaves nothing that looks complete.
    """
    partial = partial_of(folder)
    # A killed process may have left one.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _complete(partial)
        if partial.parent != folder:
            partial.rename(folder)
        else:
            # A mount point cannot be replaced. Its files are moved one by one, the last one at the
            # end, so that a reader who finds it finds them all.
            for path in sorted(partial.iterdir(), key=lambda path: path.name == last):
                path.rename(folder / path.name)
            partial.rmdir()
        flush(partial.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class Interrupted(BaseException):
    """A signal to end the process. Not an Exception, so that no library catches it."""


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise Interrupted at a signal that would end this process.

    Does nothing outside the main thread, and within another such context.
    """
    if threading.current_thread() is not threading.main_thread() or _caught:
        yield
        return
    _caught[:] = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    try:
        for number in _caught:
            signal.signal(number, _raise)
        yield
    finally:
        for number in _caught:
            signal.signal(number, signal.SIG_DFL)
        _caught.clear()


def _raise(number: int, frame: object) -> None:
    # Another signal must not interrupt the clean-up that follows.
    for other in _caught:
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(signal.Signals(number).name)


def make_once(
    folder: Path,
    *,
    find: Callable[[], Facts | None],
    check: Callable[[], None],
    write: Callable[[Path], Facts],
    last: str,
) -> tuple[Facts, bool]:
    """Write `folder` unless `find` finds it complete; return its facts and whether it was written
    now.

    `check` is called before any folder is made, `write` with the folder to fill; the file `last`
    makes it complete. If another process writes it, wait. An interruption leaves nothing, SIGKILL
    nothing that looks complete. Raises DataError if the folder cannot be written or holds
    something else, and Stopped at a signal.
    """
    other = f"{folder}: exists and holds no {last}; choose another --data.dir"
    try:
        # In this order: a folder that another process has just finished is full, but its last file
        # is there by then.
        occupied = not is_vacant(folder) and not partial_of(folder).exists()
        if (facts := find()) is not None:
            return facts, False
        if occupied:
            raise DataError(other)
        check()
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_of(folder)
        # If no file can be made, as in /proc, filelock would retry for ever.
        lock.touch()
        with raise_on_signals(), filelock.FileLock(lock):
            # Another process may have been faster, and released the lock.
            if (facts := find()) is not None:
                return facts, False
            if not is_vacant(folder):
                raise DataError(other)
            with filled_folder(folder, last) as partial:
                facts = write(partial)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"{folder}: cannot be written: {reason}; choose another --data.dir"
        ) from error
    except Interrupted as signal:
        raise Stopped(
            f"{folder}: stopped by {signal} while it was being prepared; nothing was kept"
        ) from None
    return facts, True


@contextmanager
def replaced_folder(folder: Path, *, filled: bool = False) -> Iterator[Path]:
    """Atomic write: yield an empty hidden folder that replaces `folder` if the block ends without
    an error.

    With `filled` the hidden folder is there already, and may have files.
    The old folder is renamed first and removed last. After a kill between the two renames,
    `restore_folder` brings it back. After an error nothing has changed.
    """
    partial = hidden(folder)
    old = old_of(folder)
    try:
        if not filled:
            restore_folder(folder)
            # Not its parents: if a run's folder was removed while it trains, a new one would lack
            # what was in it.
            partial.mkdir()
        yield partial
        _complete(partial)
        # Two renames, since a folder cannot replace one that is not empty.
        if os.path.lexists(folder):
            remove(old)
            folder.rename(old)
        partial.rename(folder)
        flush(folder.parent)
    except BaseException:
        # The error that is being raised has the reason.
        with suppress(OSError):
            restore_folder(folder)
        raise
    # If it cannot be removed, the next restore removes it.
    with suppress(OSError):
        remove(old)


def restore_folder(folder: Path) -> None:
    """Undo an unfinished replacement: bring back the renamed folder and remove leftovers."""
    partial = hidden(folder)
    old = old_of(folder)
    # A kill came between the two renames.
    if os.path.lexists(old) and not os.path.lexists(folder):
        old.rename(folder)
    remove(partial)
    remove(old)


def remove_folder(folder: Path) -> None:
    """Remove a folder atomically: it is renamed first, so that it is never seen incomplete.

    Removes a link only.
    """
    partial = hidden(folder)
    remove(partial)
    folder.rename(partial)
    remove(partial)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content, if it exists."""
    if os.path.isdir(path) and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
