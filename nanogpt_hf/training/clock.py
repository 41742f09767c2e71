"""Time of steps on this machine: warm-up, and windows of several steps."""

import time
from collections.abc import Callable

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather

# The first step compiles and allocates, the next ones fill caches.
WARM_STEPS = 3
# The length of a window to aim at, and its largest number of steps.
_WINDOW_SECONDS = 0.5
_WINDOW_STEPS = 50


Spread = dict[str, float]


def spread(values: list[float]) -> Spread:
    """Median and quartiles of repeated measurements."""
    # Quartiles, since a busy machine has outliers in one direction.
    median, low, high = np.quantile(values, (0.5, 0.25, 0.75)).tolist()
    return {"median": median, "low": low, "high": high}


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_of(device: torch.device, work: Callable[[], object], times: int = 1) -> float:
    """Seconds per call of `work`, the mean over `times` calls, including the device's part."""
    # A GPU runs behind the host: wait until it is idle, before and after.
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / times


def slowest(accelerator: Accelerator, seconds: float) -> float:
    """The largest of the processes' times, equal on all of them; a collective."""
    times = gather(torch.tensor([seconds], device=accelerator.device))
    return torch.as_tensor(times).max().item()


def warm_up(accelerator: Accelerator, step: Callable[[], object]) -> float:
    """Take the first steps, on all processes; return the seconds of one of the next, equal on all
    processes.
    """
    # The fastest of the first steps is the one that neither compiled nor allocated.
    seconds = min(time_of(accelerator.device, step) for _ in range(WARM_STEPS))
    return slowest(accelerator, seconds)


def steps_per_window(seconds: float) -> int:
    """Steps of a window, if one takes as many seconds."""
    return max(1, min(_WINDOW_STEPS, round(_WINDOW_SECONDS / seconds)))


def time_windows(
    accelerator: Accelerator, step: Callable[[], object], steps: int, windows: int
) -> Spread:
    """Seconds per step of this process, over windows of `steps` steps."""
    # Quartiles of several windows, since the speed of a shared machine changes.
    return spread([time_of(accelerator.device, step, steps) for _ in range(windows)])
