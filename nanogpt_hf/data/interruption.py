"""Signals that end a process, as an exception: so that what is half written can be removed first."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
_caught: list[int] = []  # those that have our handler now
_local = threading.local()


class Interrupted(BaseException):
    """A signal to end. Not an Exception: no library may take it for an error of its own and go on."""


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise Interrupted for a signal that would end this process at once. In other threads it does nothing."""
    if threading.current_thread() is not threading.main_thread():
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
    raise Interrupted(signal.Signals(number).name)


# Processes that are forked meanwhile must end at these signals: a pool ends its processes by SIGTERM, and would wait
# for ever for one in which Python noted the signal just before it began to wait for work. So they lose the handler
# right after the fork, and a signal that comes earlier is blocked until then.


def _before_fork() -> None:
    _local.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _caught)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _local.mask)


def _after_fork_in_child() -> None:
    for number in _caught:
        signal.signal(number, signal.SIG_DFL)
    _caught.clear()
    signal.pthread_sigmask(signal.SIG_SETMASK, _local.mask)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
