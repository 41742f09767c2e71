"""Kill a process before, or in the middle of, the nth of its changes to the files of a folder.

The changes are found by Python's audit events, not listed: every rename, removal, new folder, and opening of a file to
write. A file that is opened to be written counts twice, since a kill may come when it is empty.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

_EVENTS = {f"os.{name}" for name in ("rename", "remove", "rmdir", "mkdir", "link", "symlink", "truncate")}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def die_at(root: Path, point: int) -> None:
    """Let this process be killed at the `point`th change to what is in `root`; 1 is the first."""
    root, seen, opening = os.path.realpath(root), 0, False

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def is_inside(path: object) -> bool:
        if isinstance(path, int):
            return False
        path = os.fsdecode(path)
        # what shutil.rmtree removes it names without the folder
        return not os.path.isabs(path) or os.path.realpath(os.path.dirname(path)).startswith(root)

    def look(event: str, arguments: tuple) -> None:
        nonlocal opening
        if opening:
            return
        if event in _EVENTS and is_inside(arguments[0]):
            count()
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES and is_inside(arguments[0]):
            count()
            if seen + 1 == point:
                opening = True
                try:
                    os.close(os.open(arguments[0], arguments[2], 0o644))
                except OSError:  # nor could it be opened by who asked
                    return
                finally:
                    opening = False
            count()

    sys.addaudithook(look)


def killed(root: Path, point: int, action: Callable[[], object]) -> bool:
    """Do `action` in a child that is killed at the `point`th change in `root`; False if it ended before."""
    child = os.fork()
    if child == 0:
        try:
            die_at(root, point)
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the child ended with {status}"
    return status != 0
