"""Read metrics.jsonl (one event per line), also while a run is still writing it."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_hf.runs.folder import RunFolder

Event = dict[str, Any]
# the x axes of plots; none of them ever decreases during a run
AXES = ("step", "tokens", "seconds")


def read_metrics(run: RunFolder) -> list[Event]:
    """The events of a run."""
    return read_events(run.metrics)


def read_events(path: Path) -> list[Event]:
    """The events in a file, without an incomplete last line, cut by a kill or being written now."""
    events = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
        with suppress(ValueError):
            events.append(json.loads(line))
    return events


def is_number(value: Any) -> bool:
    """Whether it is a finite number, which a plot can show."""
    return isinstance(value, int | float) and math.isfinite(value)


def column(events: list[Event], name: str, by: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """The x and y values of a metric, in float64, without those that were not finite (null)."""
    rows = [(event[by], event[name]) for event in events if is_number(event.get(name))]
    x, y = np.array(rows, dtype=np.float64).reshape(-1, 2).T
    return x, y


def names(events: list[Event]) -> list[str]:
    """The names of all numeric metrics, in order of first appearance."""
    ordered = {
        name: None
        for event in events
        for name, value in event.items()
        if is_number(value) or value is None
    }
    return [name for name in ordered if name not in AXES]


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Exponential moving average over about `span` values, at the start the mean of all so far."""
    averages, average = [], 0.0
    for number, value in enumerate(values, 1):
        average += (value - average) / min(number, max(1, span))
        averages.append(average)
    return np.array(averages)
