"""Read metrics.jsonl (one event per line), also while a run is still writing it."""

import json
import logging
from typing import Any

import numpy as np

from nanogpt_hf.errors import one_line
from nanogpt_hf.runs.folder import RunFolder

logger = logging.getLogger(__name__)
_LARGEST = 1e305  # above the largest perplexity, exp(700); plots overflow near float64's limit
Event = dict[str, Any]
AXES = ("step", "tokens", "seconds")  # the x axes of plots; none of them ever decreases during a run


def read_metrics(run: RunFolder) -> list[Event]:
    """The events of a run. Skips invalid lines, with one warning that names the first of them.

    An incomplete last line, cut by a kill or being written now, is skipped silently.
    """
    events, bad = [], []
    if run.metrics.exists():
        lines = run.metrics.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            try:
                event = json.loads(line)
                _check_event(event)
            except (ValueError, RecursionError) as error:
                if line.strip() and number < len(lines):  # the last one has no line end
                    reason = "not JSON" if isinstance(error, json.JSONDecodeError) else one_line(error)
                    bad.append(f"line {number}: {reason}")
            else:
                events.append(event)
    if bad:
        more = f", and {len(bad) - 1} more such lines" if len(bad) > 1 else ""
        logger.warning(f"{run.metrics}: skipped {bad[0]}{more}")
    return events


def _check_event(event: Any) -> None:
    """Raises ValueError unless `event` is as training/tracking.py writes it: numbers or null by name, and samples."""
    if not isinstance(event, dict):
        raise ValueError("not an event")
    for name in AXES:
        if name == "step" or name in event:
            value = event.get(name)
            types = int if name == "step" else int | float
            if not isinstance(value, types) or not is_number(value) or value < 0:
                raise ValueError(f"{name} is {value!r:.40}")
    for name, value in event.items():
        if name == "samples":
            samples = value if isinstance(value, list) else [None]
            if not all(isinstance(s, dict) and all(isinstance(text, str) for text in s.values()) for s in samples):
                raise ValueError("samples are not a list of texts")
        elif value is not None and not is_number(value):
            raise ValueError(f"{name:.40} is {value!r:.40}")


def is_number(value: Any) -> bool:
    """Whether it is a finite number that a plot can show."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= _LARGEST  # false for NaN, too


def column(events: list[Event], name: str, by: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """The x and y values of a metric, in float64, without those that were not finite (null)."""
    rows = [(event[by], event[name]) for event in events if is_number(event.get(name)) and is_number(event.get(by))]
    x, y = np.array(rows, dtype=np.float64).reshape(-1, 2).T
    return x, y


def names(events: list[Event]) -> list[str]:
    """The names of all numeric metrics, in order of first appearance."""
    ordered = {name: None for event in events for name, value in event.items() if is_number(value) or value is None}
    return [name for name in ordered if name not in AXES]


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Exponential moving average over about `span` values, with Adam's bias correction for the start."""
    decay = 1 - 1 / max(1, span)
    averages, total, weight = [], 0.0, 0.0
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        averages.append(total / weight)
    return np.array(averages)
