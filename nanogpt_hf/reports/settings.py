"""Settings of a sweep: runs that differ in their seed alone, with mean and standard error of their
scores, as a table and as a plot of the score over a knob.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from nanogpt_hf.formatting import align, format_number
from nanogpt_hf.reports.curves import RUN_COLORS
from nanogpt_hf.reports.plot_file import plain, save_plot
from nanogpt_hf.runs.metrics import Score

SEED = "train.seed"
Row = dict[str, Any]


def settings_of(runs: Sequence[tuple[Mapping[str, Any], float | None]], score: Score) -> list[Row]:
    """Group runs by all their swept knobs but the seed, best setting first.

    A run is its values of the swept knobs and its score, None if it has none. Each setting has
    its knobs, the number of runs with a score, their mean, and its standard error: the standard
    deviation over √n, None for a single run.
    """
    scores: dict[tuple[tuple[str, Any], ...], list[float]] = {}
    for values, value in runs:
        knobs = tuple((key, value) for key, value in values.items() if key != SEED)
        found = scores.setdefault(knobs, [])
        if value is not None and math.isfinite(value):
            found.append(value)
    settings = []
    for knobs, found in scores.items():
        error = stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None
        settings.append(
            {
                "knobs": dict(knobs),
                "runs": len(found),
                "mean": mean(found) if found else None,
                "standard_error": error,
            }
        )
    # A setting without a score comes last.
    sign = -1 if score.is_rising else 1
    return sorted(settings, key=lambda row: math.inf if row["mean"] is None else sign * row["mean"])


def settings_table(settings: Sequence[Row], score: Score) -> str:
    """The settings as aligned text: a column for each swept knob, runs, mean and standard error."""
    keys = list(dict.fromkeys(key for row in settings for key in row["knobs"]))
    lines = [[*keys, "runs", score.words, "± s.e."]]
    for row in settings:
        # A knob that this setting does not read has no value.
        values = [str(row["knobs"].get(key, "–")) for key in keys]
        error = row["standard_error"]
        figures = [
            "–" if row["mean"] is None else format_number(row["mean"], 4),
            "–" if error is None else format_number(error, 4),
        ]
        lines.append([*values, str(row["runs"]), *figures])
    return align(lines, right=range(len(keys), len(keys) + 3))


def draw_settings(settings: Sequence[Row], path: Path, score: Score) -> bool:
    """Draw the mean score over each swept knob of numbers, a line for each setting of the others.

    Standard errors are bars. Returns whether there was anything to draw: a knob with at least two
    numbers.
    """
    measured = [row for row in settings if row["mean"] is not None]
    values: dict[str, set[float]] = {}
    for row in measured:
        for key, value in row["knobs"].items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                values.setdefault(key, set()).add(value)
    keys = [key for key, found in values.items() if len(found) > 1]
    if not keys:
        return False
    # Not pyplot, whose global state would keep every figure.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(keys), 4), dpi=120, layout="constrained")
    all_axes = figure.subplots(1, len(keys), squeeze=False).flat
    for key, axes in zip(keys, all_axes, strict=True):
        lines: dict[tuple[tuple[str, Any], ...], list[Row]] = {}
        for row in measured:
            if key in row["knobs"]:
                others = tuple(item for item in row["knobs"].items() if item[0] != key)
                lines.setdefault(others, []).append(row)
        for (others, rows), color in zip(lines.items(), itertools.cycle(RUN_COLORS), strict=False):
            rows.sort(key=lambda row: row["knobs"][key])
            axes.errorbar(
                [row["knobs"][key] for row in rows],
                [row["mean"] for row in rows],
                yerr=[row["standard_error"] or 0.0 for row in rows],
                label=", ".join(
                    plain(f"{name.rpartition('.')[2]} {value}") for name, value in others
                ),
                color=color,
                marker="o",
                capsize=3,
            )
        # Rates are tried by factors, so equal factors get equal distances.
        if min(values[key]) > 0 and max(values[key]) >= 4 * min(values[key]):
            axes.set_xscale("log")
        axes.set_xlabel(key)
        axes.set_ylabel(score.label)
        axes.set_title("mean and standard error", loc="right", fontsize=9)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
        if any(lines):
            axes.legend(frameon=False, fontsize=9)
    save_plot(figure, path)
    return True
