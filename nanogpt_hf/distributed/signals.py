"""Stop a run after the current step: on a signal, or when its time is up."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator


class StopRequest:
    """Request to end the run after the current step, by a signal or because train.max_time is
    up.
    """

    def __init__(self, max_seconds: float | None = None):
        # Why the run should end, in words; None as long as it should not.
        self.reason: str | None = None
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds

    def on_any_process(self, accelerator: Accelerator) -> bool:
        """True on all processes once one of them should end.

        A collective: with several processes, all must call it.
        """
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.reason = self.reason or "train.max_time is up"
        if accelerator.num_processes == 1:
            return self.reason is not None
        # A signal may reach one process only. If that one stopped alone, the others would wait for
        # it in the next collective.
        if self.reason is not None:
            accelerator.set_trigger()
        return accelerator.check_trigger()


@contextmanager
def stop_on_signals(
    max_seconds: float | None = None,
    message: str = "\nstopping after this step; a second Ctrl-C stops at once\n",
) -> Iterator[StopRequest]:
    """Context that turns SIGTERM, SIGINT, SIGUSR1, SIGHUP and a time limit into a stop request; at
    the first signal `message` is written to stderr.

    A second SIGINT interrupts at once; of other signals any number may come. A SIGHUP that is
    ignored, as under nohup, stays ignored.
    """
    request = StopRequest(max_seconds)
    # The program's own, unless Ctrl-C was ignored.
    interrupting = signal.getsignal(signal.SIGINT)
    if not callable(interrupting):
        interrupting = signal.default_int_handler

    def handle(number, frame):
        if number == signal.SIGINT:
            # the next Ctrl-C raises KeyboardInterrupt
            signal.signal(signal.SIGINT, interrupting)
        elif request.reason is not None:
            # A cluster may send several.
            return
        request.reason = request.reason or f"received {signal.Signals(number).name}"
        # Not by print(): the signal may have interrupted one, which must not be entered twice.
        with contextlib.suppress(OSError):
            os.write(2, message.encode())

    if threading.current_thread() is not threading.main_thread():
        # Python allows handlers in the main thread only.
        yield request
        return
    # SLURM's warning before the end of a job is SIGUSR1, as our script asks it for.
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        # The terminal is closed.
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
