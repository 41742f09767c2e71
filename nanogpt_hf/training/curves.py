"""The picture of a run: losses over steps, the learning rate beneath."""

from pathlib import Path
from typing import Any

import numpy as np


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Exponential moving average over about `span` values, corrected for its start as Adam's moments are."""
    decay = 1 - 1 / max(1, span)
    averages, total, weight = [], 0.0, 0.0
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        averages.append(total / weight)
    return np.array(averages)


def draw_curves(events: list[dict[str, Any]], title: str, path: Path) -> None:
    """Draw metrics.jsonl's events to a PNG at `path`: train loss smoothed over raw, validation, learning rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    train = [(e["step"], e["train/loss"], e["train/learning_rate"]) for e in events if "train/loss" in e]
    validation = [(e["step"], e["val/loss"]) for e in events if "val/loss" in e]
    if not train:
        return
    steps, losses, rates = np.array(train).T
    figure = Figure(figsize=(8, 5.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    top.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="train, each step logged")
    if len(steps) > 20:
        top.plot(steps, smooth(losses, len(steps) // 40), color="#2171b5", linewidth=1.8, label="train, smoothed")
    if validation:
        val_steps, val_losses = np.array(validation).T
        top.plot(val_steps, val_losses, color="#d94801", marker="o", markersize=4, linewidth=1.4, label="validation")
        best = int(val_losses.argmin())
        left_half = val_steps[best] < (steps[-1] + val_steps[0]) / 2
        top.annotate(
            f"best {val_losses[best]:.4f} at step {int(val_steps[best]):,}",
            (val_steps[best], val_losses[best]),
            xytext=(0, 28),
            textcoords="offset points",
            ha="left" if left_half else "right",
            color="#8c2d04",
            arrowprops={"arrowstyle": "->", "color": "#8c2d04"},
        )
    top.set_title(title.replace("$", r"\$"), loc="left", fontweight="bold")
    top.set_ylabel("loss (nats a token)")
    top.legend(frameon=False)
    bottom.plot(steps, rates, color="#525252", linewidth=1.4)
    bottom.set_ylabel("learning\nrate")
    bottom.set_ylim(bottom=0)
    bottom.ticklabel_format(axis="y", scilimits=(-2, 2))
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    partial = path.with_name(f".{path.name}")
    figure.savefig(partial, format="png")
    partial.replace(path)
