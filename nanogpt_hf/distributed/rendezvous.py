"""Prepare a run on all processes, check that they agree on it, and end all of them if one is
lost.
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
HEARTBEAT = 5.0  # seconds between two
_POLL = 0.1  # seconds between two polls of the store, for each process
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
        store = _connect()
    _stores.append(store)
    store = PrefixStore(f"nanogpt_hf/{len(_stores)}", store)
    done = threading.Event()

    def send_heartbeats() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: the main thread reports it
            while not done.is_set():
                store.add(f"alive/{rank}", 1)
                done.wait(HEARTBEAT)

    threading.Thread(target=send_heartbeats, daemon=True).start()
    result, answer = None, cast(dict[str, Any], {"host": socket.gethostname()})
    try:
        try:
            result, answer["facts"] = prepare()
        except Exception as error:
            if (line := explain(error)) is None:
                raise
            answer["error"] = line
        with one_line_for_a_lost_process():
            store.set(f"answer/{rank}", json.dumps(answer))
            answers = _wait_for_answers(store, world_size)
    finally:
        done.set()
    for r, other in answers.items():
        if "error" in other:
            where = f"process {r} on {other['host']}: " if r else ""
            raise UserError(f"{where}{other['error']}")
    first = answers[0]["facts"]
    for r, other in answers.items():
        differences = [
            f"{key} {value!r} instead of {first[key]!r}"
            for key, value in other["facts"].items()
            if value != first[key]
        ]
        if differences:
            raise UserError(
                f"process {r} on {other['host']} has {', '.join(differences)} of process 0 on "
                f"{answers[0]['host']}; use the same recipe and the same data on every machine"
            )
    return cast(T, result), first


def _wait_for_answers(store: Store, world_size: int) -> dict[int, dict[str, Any]]:
    """The answers of all processes, or those up to one with an error, by rank.

    Raises LostProcess if one stops sending heartbeats.
    """
    answers: dict[int, dict[str, Any]] = {}
    beats = {rank: (0, time.monotonic()) for rank in range(world_size)}  # and when it changed
    while len(answers) < world_size and not any("error" in each for each in answers.values()):
        time.sleep(min(HEARTBEAT, _POLL * world_size))
        for rank in beats.keys() - answers.keys():
            count = store.add(f"alive/{rank}", 0)
            if store.check([f"answer/{rank}"]):
                answers[rank] = json.loads(store.get(f"answer/{rank}"))
            elif count != beats[rank][0]:
                beats[rank] = count, time.monotonic()
            elif time.monotonic() - beats[rank][1] > PEER_TIMEOUT.total_seconds():
                raise LostProcess(
                    f"lost another process: process {rank} has sent no heartbeat for {PEER_TIMEOUT}"
                )
    # The store ends with process 0 or its launcher. It waits only briefly for the others to read:
    # after an error they may be busy, or lost.
    end = time.monotonic() + 2 * HEARTBEAT
    with contextlib.suppress(RuntimeError):  # process 0 has ended
        readers = store.add("read", 1)
        while readers < world_size and time.monotonic() < end:
            time.sleep(_POLL)
            readers = store.add("read", 0)
    return answers


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
    """The launcher's store."""
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=PEER_TIMEOUT)))
    except ValueError as error:
        # a variable is missing: WORLD_SIZE alone may be that of a pod of a cluster
        raise UserError(
            f"WORLD_SIZE is set, but {one_line(error)}; use `{program()} launch`"
        ) from None
    return store
