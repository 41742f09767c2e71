"""Measurements of `doctor`, which every process has to call; nothing here prints."""

import hashlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nanogpt_hf.config.schema import Config, DataSection, ModelSection, TrainSection
from nanogpt_hf.doctor.machine import Link, Process, gpu_link, network_link

# one value per process -> all of them by rank, on all processes
Gather = Callable[[Any], list[Any]]
_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
_SIZES_ON_GPUS = (1 << 28, 1 << 30)


def small_config(world_size: int) -> Config:
    """The recipe if none is given: 0.8 M parameters, one micro-batch per process and step."""
    return Config(
        model=ModelSection(n_layer=4, n_head=4, n_embd=128, n_positions=128),
        data=DataSection(tokenizer="char", block_size=128, dir="data"),
        train=TrainSection(micro_batch_size=8, tokens_per_step=8 * 128 * world_size),
        name="doctor",
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


def _seconds(device: torch.device, work: Callable[[], Any]) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started


def all_reduce_times(
    device: torch.device, gather: Gather
) -> tuple[list[tuple[int, float, float]], bool]:
    """Bytes, seconds (median of 5, of the slowest process) and bus GB/s for several sizes, until an
    all-reduce takes a second; and whether all processes get the same sums.
    """
    rows, equal = [], True
    for size in (*_SIZES, *(_SIZES_ON_GPUS if device.type == "cuda" else ())):
        random = torch.Generator(device).manual_seed(dist.get_rank())
        tensor = torch.randn(size // 4, device=device, generator=random)
        dist.all_reduce(tensor)  # opens connections
        sums = hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()
        equal &= len(set(gather(sums))) == 1
        times = [_seconds(device, lambda tensor=tensor: dist.all_reduce(tensor)) for _ in range(5)]
        slowest = max(gather(statistics.median(times)))
        rows.append((size, slowest, bus_bandwidth(size, slowest, dist.get_world_size())))
        if slowest > 1:
            break
    return rows, equal


def bus_bandwidth(size: int, seconds: float, processes: int) -> float:
    """GB/s of an all-reduce as in nccl-tests (doc/PERFORMANCE.md): size / time × 2(n - 1) / n.

    This is the traffic of each process's link, so it can be compared with the hardware for any
    number of processes.
    """
    return size / seconds * 2 * (processes - 1) / processes / 1e9


def find_link(processes: list[Process], backend: str) -> Link:
    """The interconnect of an all-reduce between these processes."""
    if len({process.host for process in processes}) > 1:
        return network_link(backend)
    if backend != "nccl":
        return Link("loopback", f"one host, {backend}: TCP within the machine, limited by its CPU")
    return gpu_link(
        [process.gpu for process in processes if process.gpu], torch.cuda.get_device_capability()[0]
    )
