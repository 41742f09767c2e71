"""What `doctor` measures beyond the machine: whether all processes agree, and how fast they talk and step.

Nothing here prints or judges. What is named "on all processes" is a collective: every process has to call it.
"""

import hashlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType

from nanogpt_hf.config.schema import Config, DataSection, ModelSection, TrainSection
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.prepare import check_prepared
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.doctor.interconnect import Link, gpu_link, network_link
from nanogpt_hf.doctor.machine import Process
from nanogpt_hf.errors import DataError
from nanogpt_hf.training.run import Run
from nanogpt_hf.training.step import train_step

Gather = Callable[[Any], list[Any]]  # one value a process -> all of them by rank, on all processes
WARM_STEPS = 2
_LEARNING_RATE = 1e-4  # of the steps that are timed


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step with one micro-batch, medians; what is neither data nor compute is communication."""

    step: float
    data: float
    compute: float


def small_config(world_size: int) -> Config:
    """The recipe of a doctor without one: 0.8 M parameters, one micro-batch a process and step."""
    return Config(
        model=ModelSection(n_layer=4, n_head=4, n_embd=128, n_positions=128),
        data=DataSection(tokenizer="char", block_size=128, dir="data"),
        train=TrainSection(micro_batch_size=8, tokens_per_step=8 * 128 * world_size),
        name="doctor",
    )


def build_gather() -> Gather:
    """Collects one value a process. Always over gloo: it answers where NCCL is what is wrong."""
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
    """A checksum of each parameter by its name."""
    tensors = ((name, p.detach().cpu().contiguous().view(torch.uint8)) for name, p in model.named_parameters())
    return {name: hashlib.sha256(tensor.numpy()).hexdigest()[:16] for name, tensor in tensors}


def verify_data(config: Config) -> tuple[bool, str | None]:
    """Whether the prepared data has checksums, and how it differs from what was written. Reads all of it."""
    try:
        return check_prepared(Path(config.data.dir)), None
    except DataError as error:
        return True, str(error)


def _digests(batch: dict[str, torch.Tensor]) -> list[str]:
    rows = torch.cat([batch["input_ids"], batch["shift_labels"]], dim=1).numpy()
    return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in rows]


def windows_read(batches: Batches, step: int) -> list[str]:
    """Checksums of the windows that this process draws for a step."""
    return [digest for batch in batches.micro_batches(step) for digest in _digests(batch)]


def windows_of_step(batches: Batches, step: int) -> list[str]:
    """Checksums of the windows that all processes together should draw for a step."""
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
    """Bytes, seconds (median of 5, the slowest process's) and bus GB/s by size, on all processes.

    Sizes grow until one takes a second.
    """
    rows = []
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26, *([1 << 28, 1 << 30] if device.type == "cuda" else [])):
        tensor = torch.zeros(size // 4, device=device)
        dist.all_reduce(tensor)  # the first opens connections
        times = [_seconds(device, lambda tensor=tensor: dist.all_reduce(tensor)) for _ in range(5)]
        slowest = max(gather(statistics.median(times)))
        rows.append((size, slowest, bus_bandwidth(size, slowest, dist.get_world_size())))
        if slowest > 1:
            break
    return rows


def bus_bandwidth(size: int, seconds: float, processes: int) -> float:
    """GB/s of an all-reduce as nccl-tests counts it (doc/PERFORMANCE.md): size / time × 2(n - 1) / n.

    That is what each process's link carries, whatever the number of processes, so it compares with the hardware.
    """
    return size / seconds * 2 * (processes - 1) / processes / 1e9


def find_link(processes: list[Process], backend: str) -> Link:
    """What an all-reduce between these processes runs over."""
    if len({process.host for process in processes}) > 1:
        return network_link(backend)
    if backend != "nccl":
        return Link("loopback", f"one host, {backend}: TCP inside the machine, as fast as its CPU")
    return gpu_link([process.gpu for process in processes], torch.cuda.get_device_capability()[0])


def warm_up(run: Run) -> float:
    """WARM_STEPS steps, on all processes: the first compiles and allocates. Seconds of the last."""
    for step in range(WARM_STEPS):
        seconds = _seconds(run.accelerator.device, lambda step=step: train_step(run, step, _LEARNING_RATE))
    return seconds


def _compute(run: Run, batches: list) -> None:
    """The arithmetic of a step without the communication of its gradients."""
    with run.accelerator.no_sync(run.model):
        for batch in batches:
            batch = {name: tensor.to(run.accelerator.device) for name, tensor in batch.items()}
            run.accelerator.backward(run.model(**batch, use_cache=False).loss)
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.optimizer.step()
    run.optimizer.optimizer.zero_grad()


def time_steps(run: Run, count: int) -> StepTimes:
    """Medians over `count` whole steps and, with several processes, over as many drawn and computed alone.

    DeepSpeed cannot compute without communicating: there both count as compute.

    On all processes. Afterwards their parameters differ, so the model is not usable.
    """
    device, batches, steps = run.accelerator.device, run.batches, range(WARM_STEPS, WARM_STEPS + count)
    whole = [_seconds(device, lambda s=s: train_step(run, s, _LEARNING_RATE)) for s in steps]
    data = [_seconds(device, lambda s=s: list(batches.micro_batches(s))) for s in steps]
    step, drawing = statistics.median(whole), statistics.median(data)
    if run.mesh.world_size == 1 or run.accelerator.distributed_type == DistributedType.DEEPSPEED:
        return StepTimes(step, drawing, step - drawing)
    drawn = [list(batches.micro_batches(s)) for s in (1, *steps)]
    alone = [_seconds(device, lambda d=d: _compute(run, d)) for d in drawn][1:]
    return StepTimes(step, drawing, statistics.median(alone))
