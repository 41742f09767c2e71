"""metrics.jsonl: a line an event, read whole or while a run is still writing it."""

import json
import logging
import sys
from typing import Any

import numpy as np

from nanogpt_hf.errors import one_line
from nanogpt_hf.runs.folder import RunFolder

logger = logging.getLogger(__name__)
Event = dict[str, Any]
AXES = ("step", "tokens", "seconds")  # what an event may be placed by; all three never fall as a run goes on


def read_metrics(run: RunFolder) -> list[Event]:
    """The events of a run. Lines that are no events are left out, and one warning names the first of them.

    A last line that a kill cut short, or that is being written now, is left out without a word.
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
        logger.warning(f"{run.metrics}: left out {bad[0]}{more}")
    return events


def _check_event(event: Any) -> None:
    """Raises ValueError if `event` is not what training/tracking.py writes: numbers or null by name, and samples."""
    if not isinstance(event, dict):
        raise ValueError("not an event")
    for name in AXES:
        if name == "step" or name in event:
            value = event.get(name)
            if not is_number(value) or value < 0 or (name == "step" and not isinstance(value, int)):
                raise ValueError(f"{name} is {value!r:.40}")
    for name, value in event.items():
        if name == "samples":
            samples = value if isinstance(value, list) else [None]
            if not all(isinstance(s, dict) and all(isinstance(text, str) for text in s.values()) for s in samples):
                raise ValueError("samples are no list of texts")
        elif value is not None and not is_number(value):
            raise ValueError(f"{name:.40} is {value!r:.40}")


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # false for NaN, too


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
