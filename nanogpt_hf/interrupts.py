"""End the program at Ctrl-C with one line and status 130, at every moment.

Imports little: it is in force before anything else is imported.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import NoReturn

EXIT_INTERRUPTED = 130  # a shell's exit status of a program that SIGINT ended
# Set for the processes of a command that prints by itself that it was interrupted.
SAID_BY_PARENT = "NANOGPT_HF_CTRL_C_SAID_BY_PARENT"
_SECONDS_TO_RETURN = 0.05  # from what Python has called by itself


def handle_ctrl_c() -> None:
    """From now on, Ctrl-C ends the process while Python imports something, and raises
    KeyboardInterrupt otherwise.
    """
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _interrupt_again
    # For a process that was started where `ctrl_c_waits`.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Context in which this program is started as another process: there Ctrl-C waits for
    `handle_ctrl_c`, since Python would print a traceback of its own start.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def handle_ctrl_c_at_the_end() -> None:
    """From now on, Ctrl-C ends the process: Python would print an error that comes so late."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, lambda number, frame: end_interrupted())


def end_interrupted() -> NoReturn:
    """End this process at once, with its line."""
    show_interrupted()
    os._exit(EXIT_INTERRUPTED)


@cache
def show_interrupted() -> None:
    """Print that the program was interrupted, once per machine, however often Ctrl-C is pressed."""
    if os.environ.get("LOCAL_RANK", "0") != "0" or SAID_BY_PARENT in os.environ:
        return
    # A terminal shows ^C in this line. Not by print(): the signal may have interrupted one, which
    # must not be entered twice.
    with contextlib.suppress(OSError):
        os.write(2, b"\ninterrupted\n" if os.isatty(2) else b"interrupted\n")


def _interrupt(number: int, frame: FrameType | None) -> None:
    # Of an exception in an import, libraries make an ImportError or a RecursionError, which names
    # a wrong cause, and Python drops one in a callback of its own.
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            end_interrupted()
        frame = frame.f_back
    raise KeyboardInterrupt


def _interrupt_again(dropped: "sys.UnraisableHookArgs") -> None:
    """Python has dropped an exception, of a `__del__` or a callback: send Ctrl-C once more."""
    if not isinstance(dropped.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(dropped)
        return
    # In this thread it would be raised here, where Python drops it, too.
    threading.Timer(_SECONDS_TO_RETURN, os.kill, (os.getpid(), signal.SIGINT)).start()
