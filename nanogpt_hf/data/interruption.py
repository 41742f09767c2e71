"""Raise an exception at signals that end the process, so that partial files can be removed first."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
_caught: list[int] = []  # those that have our handler now
_local = threading.local()


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
    raise Interrupted(signal.Signals(number).name)


# Forked processes must end at these signals: a pool ends its processes by SIGTERM, and would wait for ever for one in
# which Python's handler ran just before it waited for work. So the handlers are removed directly after the fork, and
# signals are blocked until then.


def _before_fork() -> None:
    _local.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _caught)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _local.mask)


def _after_fork_in_child() -> None:
    if _caught:  # Ctrl-C reaches this process too: the pool ends it, without a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _caught:
        signal.signal(number, signal.SIG_DFL)
    _caught.clear()
    signal.pthread_sigmask(signal.SIG_SETMASK, _local.mask)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
