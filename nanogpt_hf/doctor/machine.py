"""Inspect the machine and time an all-reduce: dependencies, folders and disks, processes, devices.

Nothing here judges or prints.
"""

import hashlib
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator

from nanogpt_hf.runs.provenance import versions

# one value per process -> all of them by rank, on all processes
Gather = Callable[[Any], list[Any]]
_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
_SIZES_ON_GPUS = (1 << 28, 1 << 30)


@dataclass(frozen=True)
class Place:
    """A folder that a run writes to."""

    what: str
    path: str  # the nearest one that exists
    free: int  # bytes
    writable: bool


@dataclass(frozen=True)
class Process:
    """One process of the launch and its device."""

    rank: int
    host: str
    pid: int
    device: str
    gpu: str | None  # the GPU's UUID
    free: int  # bytes of the GPU's memory, or of the machine's
    memory: int
    threads: int
    versions: dict[str, str]
    places: list[Place]


def inspect_folder(what: str, folder: Path | str) -> Place:
    """Free bytes at the location of `folder`, which need not exist, and whether a file can be
    written there.
    """
    path = Path(folder).expanduser().absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    try:
        with tempfile.TemporaryFile(dir=path):
            writable = True
    except OSError:
        writable = False
    return Place(what, str(path), shutil.disk_usage(path).free, writable)


def this_process(accelerator: Accelerator, folders: dict[str, Path | str]) -> Process:
    """The process, and the disk of each folder (what it is -> its path)."""
    device, ram = accelerator.device, psutil.virtual_memory()
    name, gpu, free, memory = str(device), None, ram.available, ram.total
    if device.type == "cuda":
        name = f"{device} {torch.cuda.get_device_name(device)}"
        gpu = str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
        free, memory = torch.cuda.mem_get_info(device)
    return Process(
        rank=accelerator.process_index,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=name,
        gpu=gpu,
        free=free,
        memory=memory,
        threads=torch.get_num_threads(),
        versions=versions(),
        places=[inspect_folder(what, folder) for what, folder in folders.items()],
    )


def build_gather(world_size: int) -> Gather:
    """A function that gathers one value per process, always with gloo, which works when NCCL is
    the problem.
    """
    if world_size == 1:
        return lambda value: [value]
    group = dist.new_group(backend="gloo")

    def gather(value: Any) -> list[Any]:
        values = [None] * world_size
        dist.all_gather_object(values, value, group=group)
        return values

    return gather


def all_reduce_times(
    device: torch.device, gather: Gather
) -> tuple[list[tuple[int, float, float]], bool]:
    """Bytes, seconds (median of 5, of the slowest process) and bus GB/s for several sizes, until an
    all-reduce takes a second; and whether all processes get the same sums.

    The bus bandwidth is that of nccl-tests (doc/PERFORMANCE.md): size / time × 2(n - 1) / n, the
    traffic of each process's link, to compare with the hardware for any number of processes.
    """
    rows, equal, processes = [], True, dist.get_world_size()
    for size in (*_SIZES, *(_SIZES_ON_GPUS if device.type == "cuda" else ())):
        random = torch.Generator(device).manual_seed(dist.get_rank())
        tensor = torch.randn(size // 4, device=device, generator=random)
        dist.all_reduce(tensor)  # opens connections
        sums = hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()
        equal &= len(set(gather(sums))) == 1
        slowest = max(gather(statistics.median(_seconds(tensor) for _ in range(5))))
        rows.append((size, slowest, size / slowest * 2 * (processes - 1) / processes / 1e9))
        if slowest > 1:
            break
    return rows, equal


def _seconds(tensor: torch.Tensor) -> float:
    """How long an all-reduce of `tensor` takes; the device is idle before it."""
    started = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.device.type != "cpu":
        torch.accelerator.synchronize(tensor.device)
    return time.perf_counter() - started
