"""Prepare a run on all processes, check that they agree on it, and end all of them if one is lost."""

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

from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import LostProcess, UserError, explain
from nanogpt_hf.runs.folder import RunFolder

# How long processes wait for one that gives no sign, in a collective or before one. All of them wait while the main one
# writes a checkpoint: 15 minutes let the largest recipe's 19 GB go to a disk of 21 MB a second. (Not 10: accelerate
# takes that for "the default", and gloo's is 30.)
PEER_TIMEOUT = timedelta(minutes=15)
_SIGN_OF_LIFE = 5.0  # seconds between two
_LOOK = 0.2  # seconds between two looks at who is ready
_kept = []  # without a launcher process 0 serves the store while this object lives, to the process group as well


T = TypeVar("T")


def prepare_on_all_ranks(prepare: Callable[[], tuple[T, dict[str, Any]]]) -> tuple[T, dict[str, Any]]:
    """Call `prepare` on every process; return its result here, and the facts of process 0.

    `prepare` returns a result, which stays in its process, and facts (values of JSON) that must be equal on all
    processes; process 0 may have more of them. It may take hours, and longer on one machine than on another: tokenizing
    does. So the processes do not wait in a collective, which would time out, but in the launcher's key-value store, to
    which each sends signs of life. Raises UserError on all processes if `prepare` raises an error that `explain` knows
    on one of them, or if their facts differ; and LostProcess if one sends no more signs of life.
    """
    mesh = Mesh.from_environment()
    world_size, rank = mesh.world_size, mesh.rank
    if world_size == 1:
        return prepare()
    with one_line_for_a_lost_process():
        store, _, _ = next(iter(torch.distributed.rendezvous("env://", timeout=PEER_TIMEOUT)))
    _kept.append(store)
    store = torch.distributed.PrefixStore("nanogpt_hf", store)
    done = threading.Event()

    def live() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone: the main thread will find out
            while not done.is_set():
                store.add(f"alive/{rank}", 1)
                done.wait(_SIGN_OF_LIFE)

    threading.Thread(target=live, daemon=True).start()
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
            given = [r for r in range(world_size) if store.check([f"answer/{r}"])]
            answers = {r: json.loads(store.get(f"answer/{r}")) for r in given}
            _leave_together(store, world_size)
    finally:
        done.set()
    for r, answer in answers.items():
        if "error" in answer:
            raise UserError(answer["error"] if r == 0 else f"process {r} on {answer['host']}: {answer['error']}")
    _check_agreement(answers)
    return cast(T, result), answers[0]["facts"]


def _wait_for_answers(store: torch.distributed.Store, world_size: int) -> None:
    """Until all have answered, or one with an error. Raises LostProcess where one of the others gives no more sign."""
    signs, seen = [0] * world_size, [time.monotonic()] * world_size
    looked = time.monotonic()
    while not store.check([f"answer/{r}" for r in range(world_size)]) and not store.add("errors", 0):
        time.sleep(_LOOK)
        if time.monotonic() - looked < _SIGN_OF_LIFE:
            continue
        looked = time.monotonic()
        for r in range(world_size):
            sign = store.add(f"alive/{r}", 0)
            if sign != signs[r]:
                signs[r], seen[r] = sign, looked
            elif looked - seen[r] > PEER_TIMEOUT.total_seconds() and not store.check([f"answer/{r}"]):
                raise LostProcess(f"lost another process: process {r} has given no sign of life for {PEER_TIMEOUT}")


def _leave_together(store: torch.distributed.Store, world_size: int) -> None:
    """Until all have read the answers, for the store ends with the first process or its launcher.

    A process that is still getting ready after another's error is not waited for.
    """
    end = time.monotonic() + 2 * _SIGN_OF_LIFE
    with contextlib.suppress(RuntimeError):  # the first one has left
        store.add("read", 1)
        while store.add("read", 0) < world_size and time.monotonic() < end:
            time.sleep(_LOOK / 4)


def _check_agreement(answers: dict[int, dict[str, Any]]) -> None:
    """Raises UserError where a process is about to do something else than process 0."""
    first = answers[0]
    for rank, other in answers.items():
        differences = [
            f"{key} {value!r} instead of {first['facts'][key]!r}"
            for key, value in other["facts"].items()
            if value != first["facts"][key]
        ]
        if differences:
            raise UserError(
                f"process {rank} on {other['host']} has {', '.join(differences)} of process 0 on {first['host']}; "
                "give every machine the same recipe and the same data"
            )


@contextlib.contextmanager
def one_line_for_a_lost_process(run: RunFolder | None = None) -> Iterator[None]:
    """Turn what torch raises where another process died or does not answer into LostProcess, which is one line."""
    try:
        yield
    except RuntimeError as error:
        gone = isinstance(error, torch.distributed.DistNetworkError | torch.distributed.DistStoreError)
        # gloo raises plain RuntimeErrors that name its source file; NCCL has many errors, and one for this
        if not gone and "/gloo/transport/" not in str(error) and "ncclRemoteError" not in str(error):
            raise
        what = re.sub(r"\[\S+/gloo/\S+\] ", "", str(error).strip().partition("\n")[0])
        if "connectFullMesh" in what:
            what += "; is GLOO_SOCKET_IFNAME the network interface between the machines?"
        kept = run and run.newest_checkpoint()
        then = f"; --resume goes on from {kept}" if kept else ""
        raise LostProcess(f"lost another process: {what}{then}") from error


@functools.cache
def _launch_store() -> torch.distributed.Store:
    store, _, _ = next(iter(torch.distributed.rendezvous("env://", timeout=PEER_TIMEOUT)))
    return torch.distributed.PrefixStore("nanogpt_hf/shared", store)


def share_from_main(key: str, value: Any) -> Any:
    """Return what process 0 gave as `value`, as JSON keeps it, on every process; needs no process group.

    Each key is used once. Raises LostProcess if process 0 gives no value.
    """
    with one_line_for_a_lost_process():
        if Mesh.from_environment().is_main:
            _launch_store().set(key, json.dumps(value))
        return json.loads(_launch_store().get(key))
