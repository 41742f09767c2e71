"""A time limit for code that is not trusted to end: a model's chat template, a reward function."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator

from nanogpt_hf.errors import EXIT_USER_ERROR

# Errors that are raised in code that catches every exception, before this process ends.
_REMINDERS = 3


class TimeUpError(BaseException):
    """Not an Exception, so that neither the limited code nor a library can catch it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUpError in the block after `seconds`; a block that keeps catching it ends the
    process.

    In the main thread, it ends calls of the system, too. In another thread, such a call, or one of
    C code, ends only when it returns. On Windows there is no limit.
    """
    # Only the main thread receives signals.
    if not hasattr(signal, "setitimer"):
        yield
    elif threading.current_thread() is threading.main_thread():
        with _alarms(seconds):
            yield
    else:
        with _thread_alarms(seconds):
            yield


def _end_process(seconds: float) -> None:
    line = f"code with a time limit of {seconds:g} seconds catches every exception; correct it\n"
    os.write(2, line.encode())
    os._exit(EXIT_USER_ERROR)


@contextlib.contextmanager
def _alarms(seconds: float) -> Iterator[None]:
    """Limit the main thread by a signal."""
    alarms = 0

    def give_up(*_: object) -> None:
        nonlocal alarms
        alarms += 1
        if alarms > _REMINDERS:
            _end_process(seconds)
        raise TimeUpError

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        # Further alarms are a second further apart, for the cleanup after the first.
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds + 1)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _thread_alarms(seconds: float) -> Iterator[None]:
    """Limit this thread, which is not the main one, by a second one that raises the error in it."""
    limited = ctypes.c_ulong(threading.get_ident())
    over = threading.Event()
    # Held while the error is raised, so that it cannot come after the end of the block.
    lock = threading.Lock()
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def remind() -> None:
        delay = seconds
        for _ in range(_REMINDERS):
            if over.wait(delay):
                return
            with lock:
                if not over.is_set():
                    raise_in(limited, ctypes.py_object(TimeUpError))
            delay = seconds + 1
        if not over.wait(delay):
            _end_process(seconds)

    threading.Thread(target=remind, name="time limit", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            over.set()
            # Clear an error that was set and has not been raised.
            raise_in(limited, None)
