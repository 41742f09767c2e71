"""A time limit for code that is not trusted to end: a model's chat template, a reward function."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator

from nanogpt_hf.errors import EXIT_USER_ERROR

_REMINDERS = 3  # to code that catches every exception, before this process ends


class TimeUpError(BaseException):
    """Not an Exception, so that neither the limited code nor a library can catch it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUpError in the block after `seconds`; a block that keeps catching it ends the
    process.

    Unlike that of the main thread, the limit of another does not end a call of the system or of C
    before it returns. On Windows there is none.
    """
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
    """The limit of the main thread, by a signal."""
    alarms = 0

    def give_up(*_: object) -> None:
        nonlocal alarms
        alarms += 1
        if alarms > _REMINDERS:
            _end_process(seconds)
        raise TimeUpError

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds + 1)  # after the cleanup of the first
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _thread_alarms(seconds: float) -> Iterator[None]:
    """The limit of another thread, by a second one that raises the error in it."""
    limited, lock, over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), threading.Event()
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
            raise_in(limited, None)  # one that was not raised yet
