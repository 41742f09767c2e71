"""Draw loss and reward curves as PNG: loss.png of one run, and several runs in one plot."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.stages import stages_of
from nanogpt_hf.reports.reference import Curve, Reference, find_reference
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import Event, column, names, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colors of Okabe and Ito, for color-blind readers too (https://jfly.uni-koeln.de/color/): blue,
# vermilion, green, orange, purple, sky.
RUN_COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
_LINE_STYLES = ("-", "--", ":")
_GRAY = "#555555"
_MANY_POINTS = 40  # the steep start of a longer curve is left out
# by validation metric: the curve of training, the one below, and the y axis
_AXES = {
    "val/loss": ("train/loss", "train/learning_rate", "loss (nats per token)"),
    "val/bits_per_byte": ("", "train/learning_rate", "validation bits per byte"),
    "val/pass@1": ("train/reward", "train/entropy", "reward; share of held-out questions"),
}


def draw_run(run: RunFolder, config: Config, events: list[Event]) -> None:
    """Draw loss.png, with the band of the recipe's reference if there is one."""
    metric = "val/pass@1" if "train/reward" in names(events) else "val/loss"
    stages = {stage.first: stage.name for stage in stages_of(config)[1:]}
    one, reference = {run.path.resolve().name: events}, find_reference(config)
    draw_curves(one, run.loss_plot, metric, reference=reference, stages=stages)


def draw_curves(
    runs: dict[str, list[Event]],
    path: Path,
    metric: str = "val/loss",
    by: str = "step",
    reference: Reference | None = None,
    stages: Mapping[int, str] = MappingProxyType({}),
) -> bool:
    """Draw a validation metric of runs (name -> events), with the smoothed training loss as a thin
    line. Of one run also the raw loss, its best, the learning rate below, and a line at the first
    step of each stage (-> name).

    `metric` is val/loss, val/bits_per_byte if the tokenizers differ, or val/pass@1 beside the
    reward and the entropy of reinforcement learning; `by`, the x axis, is step, tokens or seconds.
    Returns whether there was anything to draw.
    """
    training, lower, label = _AXES[metric]
    is_one, curves = len(runs) == 1, []
    figure, (axes, *below) = _new_figure(1 + is_one)
    looks = itertools.cycle(itertools.product(_LINE_STYLES, RUN_COLORS))
    for (name, events), (style, color) in zip(runs.items(), looks, strict=False):
        x, y = column(events, metric, by)
        steps, values = column(events, training, by)
        smoothed = smooth(values, len(values) // 25)
        curves += [curve for curve in ((x, y), (steps, smoothed)) if len(curve[0])]
        thin = {"linewidth": 1.2, "alpha": 0.6, "label": "training, smoothed" if is_one else None}
        axes.plot(steps, smoothed, style, color=color, **thin)
        if is_one:
            axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.25)
            name, color = "validation", RUN_COLORS[1]
        dots = {"marker": "o", "markersize": 4.5, "markeredgecolor": "white"}
        axes.plot(x, y, style, color=color, linewidth=1.8, label=_plain(name), **dots)
    if not curves:
        return False
    last = max(x[-1] for x, _ in curves)
    if metric == "val/loss":
        if reference and by == "step":
            _draw_band(axes, reference.curve, last)
        _crop_start(axes, curves)
    axes.set_ylabel(label)
    title, note = f"{len(runs)} runs", "thin: training, smoothed"
    if is_one:
        ((title, events),) = runs.items()
        note = f"step {events[-1]['step']:,}"
        _draw_below(below[0], *column(events, lower, by), lower.removeprefix("train/"))
        x, y = column(events, metric, by)
        if metric == "val/loss" and len(x):
            best = int(y.argmin())
            axes.plot(x[best], y[best], "o", markersize=11, mfc="none", mec=RUN_COLORS[1])
            note += f"; ○ best {y[best]:.4f} at step {int(x[best]):,}"
    for step, name in stages.items():
        if step <= last:
            for ax in (axes, *below):
                ax.axvline(step, color=_GRAY, linewidth=0.8, linestyle=":")
            place = axes.get_xaxis_transform()
            axes.text(step, 0.98, f" {_plain(name)}", transform=place, va="top", fontsize=8)
    units = {"tokens": "training tokens", "seconds": "seconds of training"}
    (axes, *below)[-1].set_xlabel(units.get(by, by))
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    axes.set_title(_plain(title), loc="left", fontweight="bold")
    axes.set_title(note, loc="right", color=_GRAY, fontsize=9)
    with written_whole(path) as partial:
        figure.savefig(partial, format="png")
    return True


def _draw_below(axes: "Axes", x: np.ndarray, y: np.ndarray, label: str) -> None:
    """A small curve from zero up."""
    axes.fill_between(x, y, color=_GRAY, alpha=0.15, linewidth=0)
    axes.plot(x, y, color=_GRAY, linewidth=1.4)
    axes.set_ylabel(label.replace("_", "\n"))
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", scilimits=(-2, 2))


def _new_figure(rows: int) -> tuple["Figure", list["Axes"]]:
    """A figure in our style, without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.2), dpi=120, layout="constrained")
    heights = [5, 1][:rows]
    axes = list(figure.subplots(rows, sharex=True, squeeze=False, height_ratios=heights).flat)
    for ax in axes:
        ax.grid(alpha=0.2)
        ax.margins(x=0.015)
        ax.spines[["top", "right"]].set_visible(False)
        ax.xaxis.set_major_formatter("{x:,.0f}")
    return figure, axes


def _draw_band(axes: "Axes", curve: Curve, last_step: float) -> None:
    """The band of reference runs; a published loss at one step has none."""
    steps = curve["step"]
    if len(steps) > 1:
        label, black = "band of the reference runs (validation)", "#000000"
        axes.fill_between(
            steps, curve["low"], curve["high"], alpha=0.1, linewidth=0, label=label, color=black
        )
        axes.plot(steps, curve["mean"], alpha=0.25, linewidth=0.8, color=black)
        axes.set_xlim(-0.015 * last_step, 1.02 * last_step)


def _crop_start(axes: "Axes", curves: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Leave out the first losses of a long run, which would flatten the rest."""
    if max(len(x) for x, _ in curves) > _MANY_POINTS:
        start = max(x[-1] for x, _ in curves) / 40
        axes.set_ylim(top=np.concatenate([y[x >= start] for x, y in curves]).max())


def _plain(text: str) -> str:
    """Without mathematics between dollar signs."""
    return text.replace("$", r"\$")
