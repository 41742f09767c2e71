"""Compare runs: progress, speed, losses, and differences between their recipes."""

from typing import Any

import numpy as np

from nanogpt_hf.config.schema import KNOBS, Config
from nanogpt_hf.config.sources import knob_text, learns_teacher_alone
from nanogpt_hf.formatting import align, format_duration
from nanogpt_hf.runs.metrics import RISING, Event, column, is_number, last_value, names

REWARD = "val/reward"


def score_of(config: Config) -> str:
    """Name the metric by which a run of a recipe chooses best/: the `score` of its method."""
    if learns_teacher_alone(config):
        return "val/divergence"
    return REWARD if config.rl.task else "val/loss"


def best_of(events: list[Event], metric: str) -> tuple[int, float, bool | None] | None:
    """Find the best evaluation: its step, its value, and whether it is better than the evaluation
    before the first step. The last is None without an evaluation before the first step or after
    it. Returns None without any evaluation.
    """
    steps, values = column(events, metric)
    if not len(values):
        return None
    best = int((-values if metric in RISING else values).argmin())
    # Evaluations that are not finite count: they were no better than the start.
    evaluated = [event["step"] for event in events if metric in event]
    beats_start = bool(steps[best]) if len(evaluated) > 1 and not evaluated[0] else None
    return int(steps[best]), float(values[best]), beats_start


def diverged_at(events: list[Event], score: str) -> int | None:
    """The step of the last evaluation if its `score` is not finite, else None."""
    last = next((event for event in reversed(events) if score in event), None)
    return last["step"] if last and not is_number(last[score]) else None


def summarize(events: list[Event], metric: str, score: str) -> dict[str, Any]:
    """Summarize a run: progress and speed, best (the highest reward, the lowest loss) and last
    value of `metric`, whether the run improved on its start, the step at which it has diverged, and
    the last losses by source of a mixture. A last value that is not finite is None. `score` is the
    run's own (`score_of`).
    """
    rates = column(events, "train/tokens_per_second")[1]
    last = {"step": 0, "tokens": 0, "seconds": 0} | (events[-1] if events else {})
    best = best_of(events, metric)
    # A comparison may be by bits per byte; whether a run improved is a question of its own score.
    scored = best_of(events, score)
    sources = [name for name in names(events) if name.startswith(f"{metric}/")]
    return {
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_second": float(np.median(rates)) if len(rates) else None,
        "best": best and best[1],
        "best_step": best and best[0],
        "beats_start": scored and scored[2],
        "diverged_at": diverged_at(events, score),
        "last": last_value(events, metric),
        "sources": {name: last_value(events, name) for name in sources},
    }


def compare_runs(runs: dict[str, dict[str, Any]], metric: str) -> str:
    """Lay out summaries as a table, a row per run; mixtures have a column for each source."""
    sources = list(dict.fromkeys(name for run in runs.values() for name in run["sources"]))
    head = ["run", "steps", "tokens", "time", "tokens/s", f"best {metric}", "at step", "last"]
    rows = [[*head, *(name.removeprefix(f"{metric}/") for name in sources)]]
    for name, run in runs.items():
        done = [f"{run['steps']:,}", f"{run['tokens']:,}", format_duration(run["seconds"])]
        best = [_shown(run["best"]), _shown(run["best_step"], ",")]
        # The last value, then its parts by source. A number that is missing because the run has
        # diverged is nan, one that never was is a dash.
        unknown = "–" if run["diverged_at"] is None else "nan"
        own = dict.fromkeys(run["sources"], unknown)
        last = [_shown(run["last"], none=unknown)]
        last += [_shown(run["sources"].get(one), none=own.get(one, "–")) for one in sources]
        rows.append([name, *done, _shown(run["tokens_per_second"], ",.0f"), *best, *last])
    lines = []
    for name, run in runs.items():
        if run["diverged_at"] is not None:
            at = f"the evaluation at step {run['diverged_at']:,}"
            lines.append(f"{name}: has diverged: {at} is not finite; lower optim.learning_rate")
        if run["beats_start"] is False:
            lines.append(f"{name}: no evaluation was better than that of its start")
    return "\n".join([align(rows, range(1, len(rows[0]))), *lines])


def _shown(value: float | None, form: str = "#.5g", none: str = "–") -> str:
    return none if value is None else format(value, form)


def compare_recipes(configs: dict[str, Config]) -> dict[str, dict[str, str]]:
    """The knobs that differ between the recipes: knob -> run -> value as text."""
    differing = {}
    for key in KNOBS:
        values = {name: knob_text(config, key) for name, config in configs.items()}
        if len(set(values.values())) > 1:
            differing[key] = values
    return differing
