"""Measurements of `doctor`: equality between processes, all-reduce bandwidth, and times of steps.

Nothing here prints or judges. A function "on all processes" is a collective: every process has to call it.
"""

import dataclasses
import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer

from nanogpt_hf.config.schema import Config, DataSection, ModelSection, TrainSection
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.prepared import check_prepared
from nanogpt_hf.distributed.deepspeed import is_zero
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.doctor.interconnect import Link, gpu_link, network_link
from nanogpt_hf.doctor.machine import Process
from nanogpt_hf.errors import DataError
from nanogpt_hf.training.run import Run
from nanogpt_hf.training.step import train_step

Gather = Callable[[Any], list[Any]]  # one value per process -> all of them by rank, on all processes
WARM_STEPS = 2
_LEARNING_RATE = 1e-4  # of the timed steps


@dataclass(frozen=True)
class StepTimes:
    """Median seconds of one step with one micro-batch; the rest besides data and compute is communication."""

    step: float
    data: float
    compute: float


def small_config(world_size: int) -> Config:
    """The recipe if none is given: 0.8 M parameters, one micro-batch per process and step."""
    return Config(
        model=ModelSection(n_layer=4, n_head=4, n_embd=128, n_positions=128),
        data=DataSection(tokenizer="char", block_size=128, dir="data"),
        train=TrainSection(micro_batch_size=8, tokens_per_step=8 * 128 * world_size),
        name="doctor",
    )


def build_gather() -> Gather:
    """A function that gathers one value per process, always with gloo, which works when NCCL is the problem."""
    world_size = Mesh.from_environment().world_size
    if world_size == 1:
        return lambda value: [value]
    group = dist.new_group(backend="gloo")

    def gather(value: Any) -> list[Any]:
        values = [None] * world_size
        dist.all_gather_object(values, value, group=group)
        return values

    return gather


def parameter_digests(model: torch.nn.Module) -> dict[str, str]:
    """A checksum of each parameter, by name."""
    tensors = ((name, p.detach().cpu().contiguous().view(torch.uint8)) for name, p in model.named_parameters())
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16] for name, tensor in tensors}


def verify_data(config: Config) -> tuple[bool, str | None]:
    """Whether the prepared data has checksums, and the first mismatch. Reads all of it."""
    try:
        return check_prepared(config.data), None
    except DataError as error:
        return True, str(error)


def _digests(batch: dict[str, torch.Tensor]) -> list[str]:
    rows = torch.cat([batch["input_ids"], batch["shift_labels"]], dim=1).numpy()
    return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in rows]


def windows_read(batches: Batches, step: int) -> list[str]:
    """Checksums of the windows that this process reads for a step."""
    return [digest for batch in batches.micro_batches(step) for digest in _digests(batch)]


def by_data_rank(read: list[list[str]]) -> list[list[str]]:
    """The windows that each data-parallel rank reads, from those of every process.

    Processes of one rank read the same; if one does not, its windows are a rank more, so that they are reported.
    """
    mesh, of_rank, others = Mesh.from_environment(), {}, []
    for rank, windows in enumerate(read):
        if of_rank.setdefault(dataclasses.replace(mesh, rank=rank).dp_rank, windows) != windows:
            others.append(windows)
    return [*of_rank.values(), *others]


def windows_of_step(batches: Batches, step: int) -> list[str]:
    """Checksums of the windows that all processes together have to read for a step."""
    return _digests(batches.blocks.batch(batches.indices(step)))


def _seconds(device: torch.device, work: Callable[[], Any]) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started


def all_reduce_times(device: torch.device, gather: Gather) -> list[tuple[int, float, float]]:
    """Bytes, seconds (median of 5, of the slowest process) and bus GB/s for several sizes, on all processes.

    Sizes grow until an all-reduce takes a second.
    """
    rows = []
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26, *([1 << 28, 1 << 30] if device.type == "cuda" else [])):
        tensor = torch.zeros(size // 4, device=device)
        dist.all_reduce(tensor)  # opens connections
        times = [_seconds(device, lambda tensor=tensor: dist.all_reduce(tensor)) for _ in range(5)]
        slowest = max(gather(statistics.median(times)))
        rows.append((size, slowest, bus_bandwidth(size, slowest, dist.get_world_size())))
        if slowest > 1:
            break
    return rows


def bus_bandwidth(size: int, seconds: float, processes: int) -> float:
    """GB/s of an all-reduce as in nccl-tests (doc/PERFORMANCE.md): size / time × 2(n - 1) / n.

    This is the traffic of each process's link, so it can be compared with the hardware for any number of processes.
    """
    return size / seconds * 2 * (processes - 1) / processes / 1e9


def find_link(processes: list[Process], backend: str) -> Link:
    """The interconnect of an all-reduce between these processes."""
    if len({process.host for process in processes}) > 1:
        return network_link(backend)
    if backend != "nccl":
        return Link("loopback", f"one host, {backend}: TCP within the machine, limited by its CPU")
    return gpu_link([process.gpu for process in processes if process.gpu], torch.cuda.get_device_capability()[0])


def warm_up(run: Run) -> float:
    """Take WARM_STEPS steps, on all processes: the first compiles and allocates. Return the seconds of the last."""
    seconds = 0.0
    for step in range(WARM_STEPS):
        seconds = _seconds(run.accelerator.device, lambda step=step: train_step(run, step, _LEARNING_RATE))
    return seconds


def _compute(run: Run, batches: list) -> None:
    """Compute a step without communicating its gradients."""
    with run.accelerator.no_sync(run.model):
        for batch in batches:
            batch = {name: tensor.to(run.accelerator.device) for name, tensor in batch.items()}
            run.accelerator.backward(run.model(**batch, use_cache=False).loss)
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    optimizer = cast(AcceleratedOptimizer, run.optimizer).optimizer  # no_sync makes the wrapper skip the step
    optimizer.step()
    optimizer.zero_grad()


def is_separable(run: Run) -> bool:
    """Whether a step can be computed without communication."""
    return run.mesh.dp_size == run.mesh.world_size and not is_zero(run.accelerator)


def time_steps(run: Run, count: int) -> StepTimes:
    """Medians over `count` steps and, with several processes, over as many computed without communication.

    If a step cannot be computed without communication, both count as compute. On all processes; afterwards their
    parameters differ, so the model is not usable.
    """
    device, batches, steps = run.accelerator.device, run.batches, range(WARM_STEPS, WARM_STEPS + count)
    whole = [_seconds(device, lambda s=s: train_step(run, s, _LEARNING_RATE)) for s in steps]
    data = [_seconds(device, lambda s=s: list(batches.micro_batches(s))) for s in steps]
    step, data_seconds = statistics.median(whole), statistics.median(data)
    if run.mesh.world_size == 1 or not is_separable(run):
        return StepTimes(step, data_seconds, step - data_seconds)
    drawn = [list(batches.micro_batches(s)) for s in (1, *steps)]
    alone = [_seconds(device, lambda d=d: _compute(run, d)) for d in drawn][1:]
    return StepTimes(step, data_seconds, statistics.median(alone))
