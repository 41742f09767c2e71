"""Time as the device keeps it: windows of steps with their spread, and the phases of a step."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from nanogpt_hf.bench.workload import Workload

WARM_STEPS = 3  # the first compiles and allocates, the next ones fill caches
_WINDOW_SECONDS, _WINDOW_STEPS = 0.5, 50  # a window takes about as long, and no more steps
PHASES = ("data wait", "set-up", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements, and the quartiles on both sides of it."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Spread(statistics.median(values), low, high)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_of(device: torch.device, work: Callable[[], object], times: int = 1) -> float:
    """Seconds of one call of `work`, the mean over `times` in a row, until the device has done it."""
    synchronize(device)
    started = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - started) / times


def warm_up(work: Workload) -> int:
    """Take the first steps, on all processes; how many steps make a window, the same for all of them."""
    device = work.run.accelerator.device
    seconds = min(time_of(device, work.step) for _ in range(WARM_STEPS))
    slowest = work.run.accelerator.gather(torch.tensor([seconds], device=device)).max().item()
    return max(1, min(_WINDOW_STEPS, round(_WINDOW_SECONDS / slowest)))


@contextmanager
def _marks(work: Workload) -> Iterator[Callable[[str], None]]:
    """Between the beginning and the end of a step, note when each phase ends; yields the function that notes it."""
    device, accelerator, batches = work.run.accelerator.device, work.run.accelerator, work.run.batches
    moments = []

    def mark(phase: str) -> None:
        if device.type == "cuda":  # the stream reaches it when the device does
            moments.append((phase, torch.cuda.Event(enable_timing=True)))
            moments[-1][1].record()
        else:
            moments.append((phase, time.perf_counter()))

    def backward(loss: torch.Tensor) -> None:
        type(accelerator).backward(accelerator, loss)
        mark("backward")

    def micro_batches(step: int) -> Iterator[dict[str, torch.Tensor]]:
        drawn = type(batches).micro_batches(batches, step)
        mark("set-up")
        while batch := next(drawn, None):
            mark("data wait")
            yield batch
            mark("optimizer")  # clips and steps where the gradients are complete

    mark.moments = moments
    hooks = (
        work.run.model.register_forward_pre_hook(lambda *_: mark("set-up")),
        work.run.model.register_forward_hook(lambda *_: mark("forward")),
    )
    accelerator.backward, batches.micro_batches = backward, micro_batches
    try:
        yield mark
    finally:
        del accelerator.backward, batches.micro_batches  # their classes have their own
        for hook in hooks:
            hook.remove()


def phases_of_step(work: Workload, steps: int) -> dict[str, Spread] | None:
    """Seconds of each of PHASES in a step, over `steps` of them; None on devices without such a clock.

    Data wait is drawing the micro-batch; set-up what else comes before its forward pass: the learning rate, counting
    the step's targets, seeding dropout, copying to the device. On a GPU both are only the time in which it stands
    still, or copies. Clipping and clearing the gradients count to the optimizer. Gradients are reduced in backward;
    DeepSpeed's engine steps there, too.
    """
    device = work.run.accelerator.device
    if device.type not in ("cpu", "cuda"):
        return None
    rows = []
    for _ in range(steps):
        with _marks(work) as mark:
            mark("")
            work.step()
            mark("optimizer")
            synchronize(device)
        row = dict.fromkeys(PHASES, 0.0)
        for (_, before), (phase, after) in zip(mark.moments, mark.moments[1:], strict=False):
            row[phase] += before.elapsed_time(after) / 1e3 if device.type == "cuda" else after - before
        rows.append(row)
    return {phase: spread([row[phase] for row in rows]) for phase in PHASES}


def communication(work: Workload, steps: int = 3) -> float | None:
    """Seconds of collectives in a step, as torch's profiler sees them; None where there is one process.

    They overlap with the backward pass, so they are no part of the sum of the phases.
    """
    if work.run.mesh.world_size == 1:
        return None
    with profiler(work.run.accelerator.device) as profile:
        for _ in range(steps):
            work.step()
        synchronize(work.run.accelerator.device)
    return collective_seconds(profile) / steps


def profiler(device: torch.device) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def collective_seconds(profile: torch.profiler.profile) -> float:
    """Seconds of gloo's operations and of NCCL's kernels in a profile."""
    return sum(event.time_range.elapsed_us() for event in collectives(profile)) / 1e6


def collectives(profile: torch.profiler.profile) -> list:
    return [event for event in profile.events() if event.name.startswith(("gloo:", "ncclDevKernel", "ncclKernel"))]
