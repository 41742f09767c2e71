"""A time limit for code that is not trusted to end: a model's chat template, a reward function."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class TimeUpError(BaseException):
    """Not an Exception, so that neither the limited code nor a library can catch it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUpError in the block after `seconds`. Python allows it in the main thread and on Unix only."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def give_up(*_: object) -> None:
        raise TimeUpError

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
