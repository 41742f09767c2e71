"""Kill a process before, or in the middle of, the nth of its changes to the files of a folder, or
make the nth operation that changes them fail.

For kills, Python's audit events report the changes: every rename, removal, new folder, and opening
of a file for writing. Opening counts twice, before and after, since a kill may leave the file
empty. Failures are those of the C library (faults.c), which all libraries of a process use.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

_EVENTS = {
    f"os.{name}" for name in ("rename", "remove", "rmdir", "mkdir", "link", "symlink", "truncate")
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def kill_at(root: Path, point: int) -> None:
    """Kill this process at its `point`th change below `root`; 1 is the first."""
    root = os.path.realpath(root)
    changes = 0
    opening = False

    def count() -> None:
        nonlocal changes
        changes += 1
        if changes == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def is_inside(path: object) -> bool:
        if isinstance(path, int):
            return False
        path = os.fsdecode(path)
        # shutil.rmtree names its entries without the folder
        return not os.path.isabs(path) or os.path.realpath(os.path.dirname(path)).startswith(root)

    def watch(event: str, arguments: tuple) -> None:
        nonlocal opening
        if opening:
            return
        if event in _EVENTS and is_inside(arguments[0]):
            count()
        elif (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & _WRITES
            and is_inside(arguments[0])
        ):
            count()
            if changes + 1 == point:
                opening = True
                try:
                    os.close(os.open(arguments[0], arguments[2], 0o644))
                except OSError:  # the caller's open will fail as well
                    return
                finally:
                    opening = False
            count()

    sys.addaudithook(watch)


def killed(root: Path, point: int, action: Callable[[], object]) -> bool:
    """Do `action` in a child that is killed at its `point`th change below `root`; False if it
    ended before.
    """
    child = os.fork()
    if child == 0:
        try:
            kill_at(root, point)
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the child ended with {status}"
    return status != 0


def build_faults(folder: Path) -> dict[str, str]:
    """Compile faults.c; return the environment variable that loads it, none without a compiler."""
    library = folder / "faults.so"
    if sys.platform != "linux" or not (compiler := shutil.which("cc")):
        return {}
    source = Path(__file__).with_name("faults.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


def fail_at(root: Path, point: int, error: int, report: int) -> Callable[[], int]:
    """Make this process's `point`th operation on files below `root` fail with `error`; its name is
    written to the file descriptor `report`. Returns a function that counts the operations.
    """
    library = ctypes.CDLL(None)
    library.fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    library.fault_arm(os.path.realpath(root).encode(), point, error, report)
    return library.fault_count
