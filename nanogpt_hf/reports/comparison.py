"""Compare runs: progress, speed, losses, and differences between their recipes."""

from typing import Any

import numpy as np

from nanogpt_hf.config.schema import KNOBS, Config
from nanogpt_hf.config.sources import knob_text
from nanogpt_hf.formatting import align, format_duration
from nanogpt_hf.runs.metrics import Event, column, names


def summarize(events: list[Event], metric: str) -> dict[str, Any]:
    """Progress and speed of a run, best (of rewards the highest) and last value of `metric`, and
    the last losses by source of a mixture.
    """
    steps, values = column(events, metric)
    rates = column(events, "train/tokens_per_second")[1]
    last, best, beats_start = (
        {"step": 0, "tokens": 0, "seconds": 0} | (events[-1] if events else {}),
        None,
        None,
    )
    if len(values):
        best = int((-values if metric == "val/reward" else values).argmin())
    if len(values) > 1 and not steps[0]:
        beats_start = best != 0
    sources = [name for name in names(events) if name.startswith(f"{metric}/")]
    return {
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_second": float(np.median(rates)) if len(rates) else None,
        "best": None if best is None else float(values[best]),
        "best_step": None if best is None else int(steps[best]),
        "beats_start": beats_start,  # None without an evaluation before the first step or after it
        "last": None if best is None else float(values[-1]),
        "sources": {name: float(column(events, name)[1][-1]) for name in sources},
    }


def compare_runs(runs: dict[str, dict[str, Any]], metric: str) -> str:
    """A table of summaries, one row per run; of mixtures with the last loss of each source."""
    sources = list(dict.fromkeys(name for run in runs.values() for name in run["sources"]))
    head = ["run", "steps", "tokens", "time", "tokens/s", f"best {metric}", "at step", "last"]
    rows = [[*head, *(name.removeprefix(f"{metric}/") for name in sources)]]
    for name, run in runs.items():
        done = [f"{run['steps']:,}", f"{run['tokens']:,}", format_duration(run["seconds"])]
        best = [_shown(run["best"]), _shown(run["best_step"], ","), _shown(run["last"])]
        losses = [*best, *(_shown(run["sources"].get(source)) for source in sources)]
        rows.append([name, *done, _shown(run["tokens_per_second"], ",.0f"), *losses])
    lines = [
        f"{name}: no evaluation was better than that of its start"
        for name, run in runs.items()
        if run["beats_start"] is False
    ]
    return "\n".join([align(rows, range(1, len(rows[0]))), *lines])


def _shown(value: float | None, form: str = "#.5g") -> str:
    return "–" if value is None else format(value, form)


def compare_recipes(configs: dict[str, Config]) -> dict[str, dict[str, str]]:
    """The knobs that differ between the recipes: knob -> run -> value as text."""
    knobs = {
        key: {name: knob_text(config, key) for name, config in configs.items()} for key in KNOBS
    }
    return {key: values for key, values in knobs.items() if len(set(values.values())) > 1}
