"""A time limit for code that is not trusted to end: a model's chat template, a reward function."""

import contextlib
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

    Python allows it in the main thread and on Unix only.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(
        signal, "setitimer"
    ):
        yield
        return

    alarms = 0

    def give_up(*_: object) -> None:
        nonlocal alarms
        alarms += 1
        if alarms > _REMINDERS:
            line = (
                f"code with a time limit of {seconds:g} seconds catches every exception; "
                "correct it\n"
            )
            os.write(2, line.encode())
            os._exit(EXIT_USER_ERROR)
        raise TimeUpError

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds + 1)  # after the cleanup of the first
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
