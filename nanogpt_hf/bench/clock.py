"""The workload of a bench, a training run without a run folder: the time of its steps and of their
phases, and the bytes that collectives send, which do not depend on how busy a machine is.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from accelerate import Accelerator
from accelerate.utils import gather
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanogpt_hf.bench.synthetic import prepared_if_any, synthetic_data
from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.errors import UserError
from nanogpt_hf.optim.schedule import learning_rate_at
from nanogpt_hf.planning.transfers import all_gather_bytes, all_reduce_bytes
from nanogpt_hf.training.run import Run
from nanogpt_hf.training.start import build_run
from nanogpt_hf.training.step import train_step


@dataclass
class Workload:
    """A run before its first step, and the number of steps taken since."""

    run: Run
    token_source: str  # the data folder, or that the tokens are synthetic and why
    next_step: int = 0

    def step(self) -> None:
        """Take the next step with the loop's `train_step`."""
        number, config = self.next_step, self.run.config
        self.next_step += 1
        train_step(self.run, number, learning_rate_at(number, config.optim, config.train.max_steps))


def build_workload(accelerator: Accelerator, config: Config, *, use_prepared: bool) -> Workload:
    """`config` on this machine, with its prepared tokens or, if there are none, synthetic ones.

    Raises UserError if the prepared data does not fit the recipe, or the recipe the machine.
    """
    data, token_source, problem = prepared_if_any(config, use_prepared)
    if problem:
        raise UserError(problem)
    if data is None:
        token_source = f"synthetic tokens ({token_source})"
        # has all that a run needs without evaluations
        data = cast(PreparedData, synthetic_data(config))
    return Workload(build_run(config, accelerator, data), token_source)


WARM_STEPS = 3  # the first compiles and allocates, the next fill caches
_WINDOW_SECONDS, _WINDOW_STEPS = 0.5, 50  # the length to aim at, and its largest number of steps
_PROFILED_STEPS = 3
PHASES = ("data wait", "set-up", "forward", "backward", "optimizer")


Spread = dict[str, float]


def spread(values: list[float]) -> Spread:
    """Median and quartiles of repeated measurements."""
    median, low, high = np.quantile(values, (0.5, 0.25, 0.75)).tolist()
    return {"median": median, "low": low, "high": high}


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_of(device: torch.device, work: Callable[[], object], times: int = 1) -> float:
    """Seconds per call of `work`, the mean over `times` calls, including the device's part."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / times


def warm_up(work: Workload) -> int:
    """Take the first steps, on all processes; return the number of steps per window, equal on
    all processes.
    """
    device = work.run.accelerator.device
    seconds = min(time_of(device, work.step) for _ in range(WARM_STEPS))
    slowest = torch.as_tensor(gather(torch.tensor([seconds], device=device))).max().item()
    return max(1, min(_WINDOW_STEPS, round(_WINDOW_SECONDS / slowest)))


class _Timeline:
    """When the phases of a step end: on the device, by CUDA events, or by the clock."""

    def __init__(self, on_cuda: bool):
        self._on_cuda = on_cuda
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """The time since the previous mark belongs to `phase`."""
        now: Any = time.perf_counter()
        if self._on_cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((phase, now))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; on CUDA after a synchronization."""
        seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for (_, start), (phase, end) in pairwise(self._marks):
            seconds[phase] += start.elapsed_time(end) / 1e3 if self._on_cuda else end - start
        return seconds


@contextmanager
def _marked_phases(work: Workload, timeline: _Timeline) -> Iterator[None]:
    """Mark the phases of the steps taken in this block, except the start of the first and the
    end of the last.
    """
    accelerator, batches, mark = work.run.accelerator, work.run.batches, timeline.mark

    def backward(loss: torch.Tensor) -> None:
        type(accelerator).backward(accelerator, loss)
        mark("backward")

    def micro_batches(step: int) -> Iterator[dict[str, torch.Tensor]]:
        drawn = type(batches).micro_batches(batches, step)
        mark("set-up")
        while batch := next(drawn, None):
            mark("data wait")
            yield batch
            mark("optimizer")  # clipping and step, after the last backward pass

    hooks = (
        work.run.model.register_forward_pre_hook(lambda *_: mark("set-up")),
        work.run.model.register_forward_hook(lambda *_: mark("forward")),
    )
    # hide the methods
    vars(accelerator)["backward"], vars(batches)["micro_batches"] = backward, micro_batches
    try:
        yield
    finally:
        del vars(accelerator)["backward"], vars(batches)["micro_batches"]
        for hook in hooks:
            hook.remove()


def phases_of_step(work: Workload, steps: int) -> dict[str, Spread] | None:
    """Seconds of each of PHASES in a step, over `steps` steps; None on devices without such a
    clock.

    None with pipeline stages, too: passes of several micro-batches overlap, and a stage waits for
    others inside them.

    Data wait is drawing the micro-batch. Set-up is the rest before the forward pass: learning
    rate, targets of the step, dropout's seed, copy to the device. On a GPU both are only the
    time in which it idles or copies. The optimizer phase includes clipping and clearing of
    gradients. The backward phase includes their reduction, and the step of DeepSpeed's engine.
    """
    device = work.run.accelerator.device
    if device.type not in ("cpu", "cuda") or work.run.mesh.pp_size > 1:
        return None
    rows = []
    for _ in range(steps):
        timeline = _Timeline(on_cuda=device.type == "cuda")
        with _marked_phases(work, timeline):
            timeline.mark("start")
            work.step()
            timeline.mark("optimizer")
            synchronize(device)
        rows.append(timeline.seconds())
    return {phase: spread([row[phase] for row in rows]) for phase in PHASES}


def communication(work: Workload) -> float | None:
    """Seconds per step in collectives, by torch's profiler; None with one process.

    They overlap with the backward pass, so they are not part of the sum of the phases.
    """
    if work.run.mesh.world_size == 1:
        return None
    with profiler(work.run.accelerator.device) as profile:
        for _ in range(_PROFILED_STEPS):
            work.step()
        synchronize(work.run.accelerator.device)
    return (
        sum(event.time_range.elapsed_us() for event in collectives(profile)) / 1e6 / _PROFILED_STEPS
    )


def profiler(device: torch.device) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, acc_events=True)  # else torch 2.11 warns


def collectives(profile: torch.profiler.profile) -> list:
    """The events of gloo's operations and NCCL's kernels."""
    names = ("gloo:", "ncclDevKernel", "ncclKernel")
    return [event for event in profile.events() or () if event.name.startswith(names)]


# operations of c10d and of its functional form, by the beginning of their names
_KINDS = {
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "send": "send",
}


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().partition("::")[2].strip("_")
            kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
            if kind:
                values = tree_leaves((args, kwargs))
                tensors = [
                    value
                    for value in (*values, *tree_leaves(output))
                    if isinstance(value, torch.Tensor)
                ]
                whole = max(tensor.nbytes for tensor in tensors)
                if kind == "all-to-all" and func.namespace == "_c10d_functional" and 0 in args[2]:
                    kind = "send"  # torch's permute_tensor: all of it to one process
                self.sent[kind] += round(_sent(kind, whole, _group_size(values)))
        return output


def _sent(kind: str, whole: int, size: int) -> float:
    """Bytes that one of `size` processes sends of the `whole`, the larger of a collective's
    input and output.
    """
    if kind == "all-reduce":
        return all_reduce_bytes(whole, size)
    return whole if kind in ("send", "broadcast") else all_gather_bytes(whole, size)


def _group_size(arguments: list[Any]) -> int:
    """The size of the process group among the arguments of a collective: an object, or the last
    string, its name.
    """
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).size()  # pyright: ignore[reportArgumentType]
    names: list[Any] = [argument for argument in arguments if isinstance(argument, str)]
    resolve = c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
    return resolve(names[-1]).size()


def communicated_bytes(step: Callable[[], object]) -> dict[str, int]:
    """Bytes that this process sends in one call of `step`, by kind of collective, if each runs
    as a ring.
    """
    with _Counting() as counting:
        step()
    return dict(counting.sent)
