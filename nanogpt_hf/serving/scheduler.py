"""One thread that generates for many requests: active sequences take turns, a token each."""

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

ACTIVE = 8  # sequences that take turns, each with a key-value cache; the others wait in their order


class ShuttingDown(Exception):  # noqa: N818  (the server was asked to end)
    """The server ended before the sequence did."""


class Job:
    """A sequence: the steps of `generate_tokens`, and the queue in the event loop that receives its
    tokens.

    The queue gets (index, token), at the end (index, None), or (index, exception).
    """

    def __init__(
        self,
        index: int,
        steps: Iterator[list[int | None]],
        receiver: "asyncio.Queue[tuple[int, object]]",
    ):
        self.canceled = False
        self._index, self._steps, self._receiver = index, steps, receiver
        self._loop = asyncio.get_running_loop()

    def step(self) -> bool:
        """Generate one token and deliver it; returns whether there may be more."""
        if self.canceled:
            self._steps = iter(())  # frees the key-value cache
            return False
        item: object
        try:
            (item,) = next(self._steps, (None,))
        except Exception as error:  # this sequence fails; the others continue
            item = error
        self.deliver(item)
        return isinstance(item, int)

    def deliver(self, item: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._receiver.put_nowait, (self._index, item))


class Scheduler(threading.Thread):
    """Generates the tokens of submitted jobs, one token of each active job in turn.

    A sequence is computed alone, not in a batch with others: so its tokens are bit for bit those
    of `sample`.
    """

    def __init__(self, precision: Callable[[], AbstractContextManager]):
        super().__init__(name="generation", daemon=True)
        self._precision = precision  # autocast is a setting of a thread
        # None only wakes the thread
        self._submitted: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closing = False

    def submit(self, job: Job) -> None:
        self._submitted.put(job)

    def close(self) -> None:
        """End the thread; jobs that have not ended get ShuttingDown.

        May be called by a signal handler.
        """
        self._closing = True
        self._submitted.put(None)

    def run(self) -> None:
        active: deque[Job] = deque()
        with self._precision():
            while not self._closing:
                with contextlib.suppress(queue.Empty):
                    while len(active) < ACTIVE:
                        job = self._submitted.get(block=not active)
                        if job is None:
                            break
                        active.append(job)
                if active:
                    job = active.popleft()
                    if job.step():
                        active.append(job)
        while not self._submitted.empty():
            if job := self._submitted.get():
                active.append(job)
        for job in active:
            job.deliver(ShuttingDown("the server is shutting down"))
