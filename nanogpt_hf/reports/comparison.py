"""Compare runs as text: progress, speed, losses, and differences between their recipes."""

import numpy as np

from nanogpt_hf.config.schema import KNOBS, Config
from nanogpt_hf.config.sources import knob_text
from nanogpt_hf.formatting import format_duration, format_number
from nanogpt_hf.runs.metrics import Event, column, names


def compare_runs(runs: dict[str, list[Event]], metric: str) -> str:
    """A table with one row per run: steps, tokens, time, speed, best and last value of `metric`.

    For mixtures tables of the last losses by source follow.
    """
    rows = [["run", "steps", "tokens", "time", "tokens/s", f"best {metric}", "at step", "last"]]
    for name, events in runs.items():
        steps, values = column(events, metric)
        _, rates = column(events, "train/tokens_per_second")
        last = events[-1]
        row = [name, f"{last['step']:,}", f"{last.get('tokens', 0):,}", format_duration(last.get("seconds", 0))]
        row.append(f"{np.median(rates):,.0f}" if len(rates) else "–")
        if len(values):
            best = values.argmin()
            row += [format_number(values[best], 4), f"{int(steps[best]):,}", format_number(values[-1], 4)]
        else:
            row += ["–", "–", "–"]
        rows.append(row)
    tables = [_table(rows, right_aligned=True), *(_source_table(runs, kind) for kind in (metric, "train/loss"))]
    return "\n\n".join(table for table in tables if table)


def _source_table(runs: dict[str, list[Event]], metric: str) -> str:
    """The last values of `metric` of each source of a mixture, one row per run; empty without a mixture."""
    sources = {name: None for events in runs.values() for name in names(events) if name.startswith(f"{metric}/")}
    if not sources:
        return ""
    rows = [[f"last {metric} of", *(name.removeprefix(f"{metric}/") for name in sources)]]
    for run, events in runs.items():
        values = (column(events, name)[1] for name in sources)
        rows.append([run, *(format_number(value[-1], 4) if len(value) else "–" for value in values)])
    return _table(rows, right_aligned=True)


def compare_recipes(configs: dict[str, Config]) -> str:
    """A table of the knobs that differ between the recipes, with one column per run."""
    rows = []
    for key in KNOBS:
        values = [knob_text(config, key) for config in configs.values()]
        if any(value != values[0] for value in values):
            rows.append([key, *values])
    if not rows:
        return "the recipes are equal"
    return "the recipes differ in\n" + _table([["knob", *configs], *rows])


def _table(rows: list[list[str]], right_aligned: bool = False) -> str:
    """Align cells in columns; `right_aligned` is for all columns but the first."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right_aligned and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
