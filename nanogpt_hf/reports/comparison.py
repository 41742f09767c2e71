"""Runs side by side as text: where each stands, and what differs in their recipes."""

import numpy as np

from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.formatting import format_duration
from nanogpt_hf.runs.metrics import Event, column


def compare_runs(runs: dict[str, list[Event]], metric: str) -> str:
    """A line a run: how far it is, how fast it was, and the best and the last value of `metric`."""
    rows = [["run", "steps", "tokens", "time", "tokens/s", f"best {metric}", "at step", "last"]]
    for name, events in runs.items():
        steps, values = column(events, metric)
        _, rates = column(events, "train/tokens_per_second")
        last = events[-1]
        row = [name, f"{last['step']:,}", f"{last.get('tokens', 0):,}", format_duration(last.get("seconds", 0))]
        row.append(f"{np.median(rates):,.0f}" if len(rates) else "–")
        if len(values):
            best = values.argmin()
            row += [f"{values[best]:.4f}", f"{int(steps[best]):,}", f"{values[-1]:.4f}"]
        else:
            row += ["–", "–", "–"]
        rows.append(row)
    return _columns(rows, right=True)


def compare_recipes(configs: dict[str, Config]) -> str:
    """A line a knob that is not the same in all recipes, a column a run."""
    rows = []
    for key in KNOBS:
        values = [get_value(config, key) for config in configs.values()]
        if any(value != values[0] for value in values):
            rows.append([key, *map(str, values)])
    if not rows:
        return "their recipes are the same"
    return "their recipes differ in\n" + _columns([["knob", *configs], *rows])


def _columns(rows: list[list[str]], right: bool = False) -> str:
    """Cells under each other; all columns but the first to the right where they are numbers."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if right and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
