"""Read metrics.jsonl (one event per line), also while a run is still writing it."""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanogpt_hf.own_files import read_json_lines
from nanogpt_hf.runs.folder import RunFolder

Event = dict[str, Any]
# The x axes of plots. None of them ever decreases during a run.
AXES = ("step", "tokens", "seconds")
# Metrics whose highest value is the best. The lowest is the best of all others.
RISING = ("val/accuracy", "val/reward", "val/pass@1")


@dataclass(frozen=True)
class Score:
    """A figure of evaluations by which runs are ranked."""

    metric: str
    # In tables and plots: a short name, and the label of an axis.
    words: str
    label: str

    @property
    def column(self) -> str:
        """Its name in sweep.json."""
        return self.metric.replace("/", "_")

    @property
    def is_rising(self) -> bool:
        return self.metric in RISING

    @property
    def extreme(self) -> str:
        return "highest" if self.is_rising else "lowest"


def read_metrics(run: RunFolder) -> list[Event]:
    """Return the events of a run, without damaged ones: training needs none of them."""
    return read_json_lines(run.metrics, _is_event)


def _is_event(value: Any) -> bool:
    """Return whether a line has a step, and every other value but samples is a number or null."""
    if not isinstance(value, dict) or not _is_count(value.get("step")):
        return False
    return all(
        _are_samples(field) if name == "samples" else field is None or is_number(field)
        for name, field in value.items()
    ) and all(_is_count(value.get(axis, 0)) for axis in ("step", "tokens"))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _are_samples(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(sample, dict) and all(isinstance(text, str) for text in sample.values())
        for sample in value
    )


def is_number(value: Any) -> bool:
    """Return whether it is a finite number, which a plot can show."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def column(events: list[Event], name: str, by: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """Return the x and y values of a metric in float64, without null (values not finite)."""
    # An event has the metrics of a step, or of an evaluation, so most columns have gaps.
    rows = [
        (event[by], event[name])
        for event in events
        if is_number(event.get(name)) and is_number(event.get(by))
    ]
    x, y = np.array(rows, dtype=np.float64).reshape(-1, 2).T
    return x, y


def last_value(events: list[Event], name: str) -> float | None:
    """Return the last value of a metric; None if there is none, or if it is null (not finite)."""
    # An event without the metric is one of another kind, not one without a value.
    value = next((event[name] for event in reversed(events) if name in event), None)
    return float(value) if value is not None and is_number(value) else None


def names(events: list[Event]) -> list[str]:
    """Return the names of all numeric metrics, in order of first appearance."""
    ordered = {
        name: None
        for event in events
        for name, value in event.items()
        if is_number(value) or value is None
    }
    return [name for name in ordered if name not in AXES]


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Exponential moving average over about `span` values, at the start the mean of all so far."""
    averages = []
    average = 0.0
    # The weight of a new value falls from 1 to 1 / span, so that the first value does not count
    # more than the others.
    for number, value in enumerate(values, 1):
        average += (value - average) / min(number, max(1, span))
        averages.append(average)
    return np.array(averages)
