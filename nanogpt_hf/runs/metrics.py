"""metrics.jsonl: a line an event, read whole or while a run is still writing it."""

import contextlib
import json
import math
from typing import Any

import numpy as np

from nanogpt_hf.runs.folder import RunFolder

Event = dict[str, Any]
AXES = ("step", "tokens", "seconds")  # what an event may be placed by; all three never fall as a run goes on


def read_metrics(run: RunFolder) -> list[Event]:
    """The events of a run. What is no event, such as a last line that a kill cut short, is left out."""
    events = []
    if run.metrics.exists():
        for line in run.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("step"), int):
                    events.append(event)
    return events


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def column(events: list[Event], name: str, by: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """(where, value) of a metric, in float64; what was not finite, and so is null, is left out."""
    rows = [(event[by], event[name]) for event in events if is_number(event.get(name)) and is_number(event.get(by))]
    where, values = np.array(rows, dtype=np.float64).reshape(-1, 2).T
    return where, values


def names(events: list[Event]) -> list[str]:
    """The names of all numeric metrics, in the order in which they first came."""
    found = {name: None for event in events for name, value in event.items() if is_number(value) or value is None}
    return [name for name in found if name not in AXES]


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Exponential moving average over about `span` values, corrected for its start as Adam's moments are."""
    decay = 1 - 1 / max(1, span)
    averages, total, weight = [], 0.0, 0.0
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        averages.append(total / weight)
    return np.array(averages)
