"""The results of a sweep: a row for each run, the score by which they are ranked, the settings from
best to worst, and plots.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np

from nanogpt_hf.config.stages import planned_tokens, with_known_steps
from nanogpt_hf.formatting import align, format_duration, format_number
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.planning.estimate import planned_parameters, planned_size
from nanogpt_hf.reports.comparison import best_of
from nanogpt_hf.reports.curves import draw_curves
from nanogpt_hf.reports.settings import draw_settings, settings_of
from nanogpt_hf.runs.files import write_json
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import Event, Score, last_value, read_metrics
from nanogpt_hf.runs.recipe import read_recipe
from nanogpt_hf.training.sweep_grid import GridRun, Row, Sweep


def planned(sweep: Sweep, started: Container[str] = ()) -> list[Row]:
    """Return the runs as they would be, steps and tokens None if they are not known; the
    vocabulary of the runs that `started` is known.
    """
    rows = []
    for run in sweep.runs:
        is_started = run.name in started
        folder = RunFolder(sweep.folder / run.name)
        is_recorded = run.config.train.steps_from and is_started and folder.recipe.is_file()
        steps = read_recipe(folder).train.max_steps if is_recorded else None
        rows.append(dict(_planned(run, is_started, steps)))
    return rows


@cache
def _planned(run: GridRun, started: bool, steps: int | None) -> Row:
    """Return the row of a run, estimated once before and once after its data is prepared. `steps`
    is the number that it has found when it started.
    """
    config = with_known_steps(run.config, steps) if steps else run.config
    row = {"run": run.name, "status": "planned", "steps": config.train.max_steps} | run.values
    if run.base is not None:
        # FLOPs depend on what is frozen, sampled or compared with, so they are not estimated.
        total, trainable = planned_parameters(config, run.base)
        row |= {"parameters": total, "trainable": trainable, "tokens": planned_tokens(config)}
    else:
        row |= asdict(planned_size(config))
    if config.train.steps_from:
        # The recipe has the default number of steps, which this run does not take.
        row |= {name: None for name in ("steps", "tokens", "flops") if name in row}
    return row


def write_results(sweep: Sweep, statuses: dict[str, str]) -> dict[str, Any]:
    """Write sweep.json, which is returned, sweep.png and settings.png."""
    score = sweep.score
    events_of = {}
    rows = planned(sweep, statuses)
    scores = []
    for run, row in zip(sweep.runs, rows, strict=True):
        events = events_of[run.name] = read_metrics(RunFolder(sweep.folder / run.name))
        last = {"step": 0, "tokens": 0, "seconds": None} | (events[-1] if events else {})
        if "flops" in row:
            # Planned FLOPs, in proportion to what the run has seen of its tokens. A run without a
            # plan has not begun.
            row["flops"] = row["flops"] * last["tokens"] / row["tokens"] if row["tokens"] else 0.0
        row |= {"status": statuses.get(run.name, "not started"), "steps": last["step"]}
        row |= {"tokens": last["tokens"], "seconds": last["seconds"]}
        method = method_of(run.config)
        for one in filter(None, (method.score, method.score_across)):
            row[one.column] = last_value(events, one.metric)
        found = row[score.column]
        if run.base is not None:
            # It hands best/ on, and may have trained beyond it: by eval.patience it does.
            row |= _best(events, method.score, score)
            found = row["best"]
        # A diverged run, or one that is not done, says nothing of its setting.
        scores.append(found if row["status"] == "done" else None)
    tree = {"sweep": sweep.folder.resolve().name, "score": score.metric, "runs": rows}
    # FLOPs are known for runs from scratch, and losses compare if tokens do.
    is_fitted = "flops" in rows[0] and score.metric == "val/loss"
    tree["fit"] = fit_scaling(rows) if is_fitted else None
    values = [run.values for run in sweep.runs]
    tree["settings"] = settings_of(list(zip(values, scores, strict=True)), score)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    write_json(sweep.folder / "sweep.json", tree)
    draw_curves(events_of, sweep.folder / "sweep.png", score.metric, "tokens", label=score.label)
    draw_settings(tree["settings"], sweep.folder / "settings.png", score)
    return tree


def _best(events: list[Event], own: Score, ranked_by: Score) -> Row:
    """The step of best/, which `own` has chosen, and its value of `ranked_by`."""
    found = best_of(events, own.metric)
    step = found and found[0]
    metric = ranked_by.metric
    values = [event[metric] for event in events if event["step"] == step and metric in event]
    return {"best": values[0] if values else None, "best_step": step}


def table(rows: Sequence[Row], score: Score) -> str:
    """Return the rows as aligned text, of runs that start from a model with their best scores;
    planned ones with their sizes only.
    """
    from_scratch = "flops" in rows[0]
    sizes = ["parameters" if from_scratch else "trainable", "steps", "tokens"]
    columns = [*sizes, "FLOPs"] if from_scratch else sizes
    is_measured = "seconds" in rows[0]
    if is_measured:
        scores = [score.words] if from_scratch else [f"best {score.words}", "at step", "last"]
        columns = [*columns, *scores, "time"]
    lines = [["run", *columns, "status"]]
    for row in rows:
        cells = [_shown(row[name], ",") for name in sizes]
        if from_scratch:
            cells.append(_shown(row["flops"], ".2e"))
        if is_measured:
            if not from_scratch:
                step = row["best_step"]
                cells += [_shown(row["best"]), "–" if step is None else f"{step:,}"]
            cells += [_shown(row[score.column]), format_duration(row["seconds"] or 0)]
        lines.append([row["run"], *cells, row["status"]])
    return align(lines, right=range(1, len(columns) + 1))


def _shown(value: float | None, form: str | None = None) -> str:
    if value is None:
        return "–"
    return format(value, form) if form else format_number(value, 4)


def best_lines(tree: dict[str, Any], score: Score) -> list[str]:
    """The best setting, and the runs that no training has made better."""
    best, *others = tree["settings"]
    lines = []
    if any(row["mean"] is not None for row in others):
        names = ", ".join(f"{key} {value}" for key, value in best["knobs"].items())
        lines.append(f"{score.extreme} {score.words}: {_shown(best['mean'])}, with {names}")
    lines += [
        f"{row['run']}: no evaluation was better than that of its start"
        for row in tree["runs"]
        if row["status"] == "done" and row.get("best_step") == 0
    ]
    return lines


def fit_scaling(rows: Sequence[Row]) -> dict[str, float] | None:
    """loss = coefficient × FLOPs^exponent, by least squares over the best runs of three depths."""
    measured = [row for row in rows if row["status"] == "done" and row["val_loss"]]
    measured.sort(key=lambda row: row["val_loss"], reverse=True)
    # Sorted by loss from the highest, so that the best run of each depth stays in the dict.
    best = {row.get("model.depth"): (row["flops"], row["val_loss"]) for row in measured}
    # Two points lie on any line.
    if len(best) < 3:
        return None
    # A power law is a line in logarithms: log loss = exponent × log FLOPs + intercept.
    flops, losses = np.log(np.array(list(best.values())).T)
    (exponent, intercept), covariance = np.polyfit(flops, losses, 1, cov=True)
    law = {"coefficient": math.exp(intercept), "exponent": float(exponent)}
    return law | {"standard_error": float(covariance[0, 0] ** 0.5)}
