"""Send messages between background threads of the processes, through the launcher's key-value store.

A collective would wait for the training.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed.distributed_c10d import Store

from nanogpt_hf.distributed.rendezvous import connect_store, wait_for_readers
from nanogpt_hf.errors import LostProcess

_POLL = 0.05  # seconds between two polls for a message


class Channel:
    """Messages under keys, each used once; one thread of each process may use it at a time.

    With one process `connect` is not called, and messages have no reader. Each method that waits raises LostProcess
    after `abandoned` was set.
    """

    def __init__(self) -> None:
        self.waiting_since: float | None = None  # since when the thread has waited for another process
        self.abandoned = False  # the thread should wait no longer
        self._store: Store | None = None

    def connect(self, name: str) -> None:
        if self._store is None:
            self._store = connect_store(name)

    @contextlib.contextmanager
    def _asking_others(self) -> Iterator[Store]:
        """Context for the use of the store, which blocks if its connection is lost."""
        assert self._store is not None, "one process waits for no other"
        self.waiting_since = time.monotonic()
        try:
            yield self._store
        finally:
            self.waiting_since = None

    def post(self, key: str, message: dict[str, Any]) -> None:
        if self._store is not None:
            with self._asking_others() as store:
                store.set(key, json.dumps(message))

    def wait_for(self, *keys: str, last_reader: bool = False) -> dict[str, Any]:
        """The message of the first of `keys` that a process has posted; the last reader deletes it."""
        with self._asking_others() as store:
            while not (posted := [key for key in keys if store.check([key])]):
                self._sleep(_POLL)
            message = json.loads(store.get(posted[0]))
            if last_reader:
                store.delete_key(posted[0])
        return message

    def finish(self, key: str, world_size: int) -> None:
        """Wait until all processes have called this, but only briefly."""
        if self._store is not None:
            with self._asking_others() as store:
                wait_for_readers(store, key, world_size)

    def _sleep(self, seconds: float) -> None:
        if self.abandoned:
            raise LostProcess("lost another process")
        time.sleep(seconds)
