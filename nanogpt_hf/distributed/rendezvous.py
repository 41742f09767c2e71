"""Prepare a run on all processes, check that they agree on it, and end all of them if one is
lost.
"""

import contextlib
import functools
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
from nanogpt_hf.runs.folder import RunFolder

# Time limit of a collective, and for a process without a heartbeat. All processes wait while the
# main one writes a model: 15 minutes are enough for the largest recipe's 6 GB on a disk of 7 MB/s.
# (Not 10: accelerate would replace that by the default, and gloo's is 30.)
PEER_TIMEOUT = timedelta(minutes=15)
HEARTBEAT = 5.0  # seconds between two
_POLL = 0.2  # seconds between two polls of the store
# without a launcher, process 0 serves the store while this object lives, also to the process group
_stores = []


T = TypeVar("T")


def prepare_on_all_ranks(
    mesh: Mesh,
    prepare: Callable[[], tuple[T, dict[str, Any]]],
) -> tuple[T, dict[str, Any]]:
    """Call `prepare` on every process; return its result here, and the facts of process 0.

    `prepare` returns a result, which stays in its process, and facts (values of JSON) that must
    be equal on all processes; process 0 may have more of them. It may take hours, and longer on
    one machine than on another: tokenizing does. So the processes do not wait in a collective,
    which would time out, but in the launcher's key-value store, to which each sends heartbeats.
    Raises UserError on all processes if `prepare` raises an error that `explain` knows on one of
    them, or if their facts differ; and LostProcess if one sends no more heartbeats.
    """
    world_size, rank = mesh.world_size, mesh.rank
    if world_size == 1:
        return prepare()
    with one_line_for_a_lost_process():
        store, _ = _connect()
    _stores.append(store)
    store = PrefixStore(f"nanogpt_hf/{len(_stores)}", store)
    done = threading.Event()

    def send_heartbeats() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: the main thread reports it
            while not done.is_set():
                store.add(f"alive/{rank}", 1)
                done.wait(HEARTBEAT)

    threading.Thread(target=send_heartbeats, daemon=True).start()
    try:
        try:
            result, facts = prepare()
            answer = {"host": socket.gethostname(), "facts": facts}
        except Exception as error:
            line = explain(error)
            if line is None:
                raise
            result, answer = None, {"host": socket.gethostname(), "error": line}
        with one_line_for_a_lost_process():
            store.set(f"answer/{rank}", json.dumps(answer))
            if "error" in answer:
                store.add("errors", 1)
            _wait_for_answers(store, world_size)
            answered = [r for r in range(world_size) if store.check([f"answer/{r}"])]
            answers = {r: json.loads(store.get(f"answer/{r}")) for r in answered}
            wait_for_readers(store, "read", world_size)
    finally:
        done.set()
    for r, answer in answers.items():
        if "error" in answer:
            raise UserError(
                answer["error"]
                if r == 0
                else (f"process {r} on {answer['host']}: {answer['error']}")
            )
    _check_agreement(answers)
    return cast(T, result), answers[0]["facts"]


def _wait_for_answers(store: Store, world_size: int) -> None:
    """Wait until all have answered, or one with an error.

    Raises LostProcess if one stops sending heartbeats.
    """
    beats, last_beat = [0] * world_size, [time.monotonic()] * world_size
    checked = time.monotonic()
    while not store.check([f"answer/{r}" for r in range(world_size)]) and not store.add(
        "errors", 0
    ):
        time.sleep(_POLL)
        if time.monotonic() - checked < HEARTBEAT:
            continue
        checked = time.monotonic()
        for r in range(world_size):
            count = store.add(f"alive/{r}", 0)
            if count != beats[r]:
                beats[r], last_beat[r] = count, checked
            elif checked - last_beat[r] > PEER_TIMEOUT.total_seconds() and not store.check(
                [f"answer/{r}"]
            ):
                raise LostProcess(
                    f"lost another process: process {r} has sent no heartbeat for {PEER_TIMEOUT}"
                )


def wait_for_readers(store: Store, key: str, world_size: int) -> None:
    """Count this process as a reader, and wait until all are, since the store ends with process 0
    or its launcher.

    It waits only briefly: after an error others may be busy, or lost.
    """
    end = time.monotonic() + 2 * HEARTBEAT
    with contextlib.suppress(RuntimeError):  # process 0 has ended
        store.add(key, 1)
        while store.add(key, 0) < world_size and time.monotonic() < end:
            time.sleep(_POLL / 4)


def _check_agreement(answers: dict[int, dict[str, Any]]) -> None:
    """Raises UserError if the result of a process differs from that of process 0."""
    first = answers[0]
    for rank, other in answers.items():
        differences = [
            f"{key} {value!r} instead of {first['facts'][key]!r}"
            for key, value in other["facts"].items()
            if value != first["facts"][key]
        ]
        if differences:
            raise UserError(
                f"process {rank} on {other['host']} has {', '.join(differences)} of process 0 on "
                f"{first['host']}; use the same recipe and the same data on every machine"
            )


@contextlib.contextmanager
def one_line_for_a_lost_process(run: RunFolder | None = None) -> Iterator[None]:
    """Context that turns torch's errors about a process that died or does not answer into
    LostProcess, one line.
    """
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(
            error, torch.distributed.DistNetworkError | torch.distributed.DistStoreError
        )
        # gloo raises plain RuntimeErrors that name its source file; NCCL has one error name for
        # this
        if (
            not lost
            and "/gloo/transport/" not in str(error)
            and "ncclRemoteError" not in str(error)
        ):
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


@functools.cache
def _launch_store() -> tuple[Store, int]:
    store, rank = _connect()
    return PrefixStore("nanogpt_hf/shared", store), rank


def _connect() -> tuple[Store, int]:
    """The launcher's store, and the rank of this process."""
    try:
        store, rank, _ = next(iter(rendezvous("env://", timeout=PEER_TIMEOUT)))
    except ValueError as error:
        # a variable is missing: WORLD_SIZE alone may be that of a pod of a cluster
        raise UserError(
            f"WORLD_SIZE is set, but {one_line(error)}; use `python cli.py launch`"
        ) from None
    return store, rank


def share_from_main(key: str, value: Any) -> Any:
    """Return what process 0 gave as `value`, as JSON keeps it, on every process; needs no process
    group.

    Each key is used once. Raises LostProcess if process 0 gives no value.
    """
    with one_line_for_a_lost_process():
        store, rank = _launch_store()
        if rank == 0:
            store.set(key, json.dumps(value))
        return json.loads(store.get(key))
