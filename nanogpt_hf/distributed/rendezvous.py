"""Prepare a run on all processes, check that they agree on it, and end all of them if one is
lost.

Preparation may take hours, and longer on one machine than on another: tokenizing does. So the
processes do not meet in a collective, which would time out, but in the launcher's key-value store,
which torch's process group is started with later (`ProcessStore`).
"""

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import LostProcess, UserError, explain, one_line
from nanogpt_hf.program import program
from nanogpt_hf.runs.folder import RunFolder

# Time limit of a collective, and for a process without a heartbeat. All processes wait while the
# main one writes a model: 15 minutes are enough for the largest recipe's 6 GB on a disk of 7 MB/s.
# (Not 10: accelerate would replace that by the default, and gloo's is 30.)
PEER_TIMEOUT = timedelta(minutes=15)
# Seconds between two heartbeats of a process.
HEARTBEAT = 5.0
# Seconds between two polls of the store, for each process.
_POLL = 0.1
# Without a launcher, process 0 serves the store while this object lives, also to the process group
# that starts later. So it is kept until the program ends.
_stores: list[Store] = []

T = TypeVar("T")


class ProcessStore:
    """A key-value store that all processes of a launch see. Each sends heartbeats to it.

    A context: inside it this process counts as alive.
    """

    def __init__(self, rank: int, world_size: int):
        self.rank = rank
        self.world_size = world_size
        with one_line_for_a_lost_process():
            store = _connect()
        _stores.append(store)
        # A program may prepare several runs. Each has keys of its own.
        self._store = PrefixStore(f"nanogpt_hf/{len(_stores)}", store)
        self._done = threading.Event()

    def __enter__(self) -> "ProcessStore":
        # A thread, since the main thread prepares, and may be in one C function for minutes.
        threading.Thread(target=self._send_heartbeats, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _send_heartbeats(self) -> None:
        # A RuntimeError means that the store is gone: the main thread reports it.
        with contextlib.suppress(RuntimeError):
            while not self._done.is_set():
                self._store.add(f"alive/{self.rank}", 1)
                self._done.wait(HEARTBEAT)

    def exchange(self, answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Give all processes this one's answer (values of JSON), and return all answers by rank.

        It ends early at an answer that has an `error`: then the others' may be missing. Raises
        LostProcess if a process stops sending heartbeats.
        """
        with one_line_for_a_lost_process():
            self._store.set(f"answer/{self.rank}", json.dumps(answer))
            answers = self._wait_for_answers()
            self._wait_for_readers()
        return answers

    def _wait_for_answers(self) -> dict[int, dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        # The count of each process's heartbeats, and when it last changed by our clock: clocks of
        # two machines need not agree.
        beats = {rank: (0, time.monotonic()) for rank in range(self.world_size)}
        while len(answers) < self.world_size:
            if any("error" in each for each in answers.values()):
                break
            time.sleep(min(HEARTBEAT, _POLL * self.world_size))
            for rank in beats.keys() - answers.keys():
                # Adding 0 reads the counter.
                count = self._store.add(f"alive/{rank}", 0)
                if self._store.check([f"answer/{rank}"]):
                    answers[rank] = json.loads(self._store.get(f"answer/{rank}"))
                elif count != beats[rank][0]:
                    beats[rank] = count, time.monotonic()
                elif time.monotonic() - beats[rank][1] > PEER_TIMEOUT.total_seconds():
                    raise LostProcess(
                        f"lost another process: process {rank} has sent no heartbeat for "
                        f"{PEER_TIMEOUT}"
                    )
        return answers

    def _wait_for_readers(self) -> None:
        """Wait until all processes have read the answers, but only briefly.

        The store ends with process 0 or its launcher, and the others would see a lost process
        instead of an error. After an error they may be busy, or lost.
        """
        end = time.monotonic() + 2 * HEARTBEAT
        # A RuntimeError means that process 0 has ended.
        with contextlib.suppress(RuntimeError):
            readers = self._store.add("read", 1)
            while readers < self.world_size and time.monotonic() < end:
                time.sleep(_POLL)
                readers = self._store.add("read", 0)


def prepare_on_all_ranks(
    mesh: Mesh,
    prepare: Callable[[], tuple[T, dict[str, Any]]],
) -> tuple[T, dict[str, Any]]:
    """Call `prepare` on every process; return its result here, and the facts of process 0.

    `prepare` returns a result, which stays in its process, and facts (values of JSON) that must
    be equal on all processes; process 0 may have more of them. Raises UserError on all processes
    if `prepare` raises an error that `explain` knows on one of them, or if their facts differ; and
    LostProcess if one sends no more heartbeats.
    """
    if mesh.world_size == 1:
        return prepare()
    result = None
    answer: dict[str, Any] = {"host": socket.gethostname()}
    with ProcessStore(mesh.rank, mesh.world_size) as store:
        try:
            result, answer["facts"] = prepare()
        except Exception as error:
            if (line := explain(error)) is None:
                # A bug: its traceback is worth more than an agreement.
                raise
            answer["error"] = line
        answers = store.exchange(answer)
    _check_agreement(answers)
    return cast(T, result), answers[0]["facts"]


def _check_agreement(answers: dict[int, dict[str, Any]]) -> None:
    """Raises UserError if a process has an error, or other facts than process 0."""
    for rank, answer in answers.items():
        if "error" in answer:
            where = f"process {rank} on {answer['host']}: " if rank else ""
            raise UserError(f"{where}{answer['error']}")
    first = answers[0]["facts"]
    for rank, answer in answers.items():
        differences = [
            f"{key} {value!r} instead of {first[key]!r}"
            for key, value in answer["facts"].items()
            if value != first[key]
        ]
        if differences:
            raise UserError(
                f"process {rank} on {answer['host']} has {', '.join(differences)} of process 0 on "
                f"{answers[0]['host']}; use the same recipe and the same data on every machine"
            )


@contextlib.contextmanager
def one_line_for_a_lost_process(run: RunFolder | None = None) -> Iterator[None]:
    """Context that turns torch's errors about a process that died or does not answer into
    LostProcess, one line.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors that name its source file; NCCL has one error name for
        # this
        kinds = torch.distributed.DistNetworkError | torch.distributed.DistStoreError
        names = ("/gloo/transport/", "ncclRemoteError")
        if not (isinstance(error, kinds) or any(name in str(error) for name in names)):
            raise
        # without gloo's source file, and the wish of good luck at its end
        reason = re.sub(
            r"\[\S+/gloo/\S+\] |[\s.:]*GLHF.*", "", str(error).strip().partition("\n")[0]
        )
        if "connectFullMesh" in reason:
            reason += "; is GLOO_SOCKET_IFNAME the network interface between the machines?"
        newest = run and run.newest_checkpoint()
        advice = f"; --resume continues from {newest}" if newest else ""
        raise LostProcess(f"lost another process: {reason}{advice}") from error


def _connect() -> Store:
    """Connect to the launcher's store."""
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=PEER_TIMEOUT)))
    except ValueError as error:
        # A variable is missing. A cluster may set WORLD_SIZE alone, for its pods.
        raise UserError(
            f"WORLD_SIZE is set, but {one_line(error)}; use `{program()} launch`"
        ) from None
    return store
