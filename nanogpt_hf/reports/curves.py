"""Draw loss and reward curves as PNG: loss.png of one run, and several runs in one plot."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.stages import stages_of
from nanogpt_hf.reports.plot_file import plain, save_plot
from nanogpt_hf.reports.reference import Curve, Reference, find_reference
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import RISING, Event, column, names, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colors of Okabe and Ito, which color-blind readers can tell apart
# (https://jfly.uni-koeln.de/color/): blue, vermilion, green, orange, purple, sky.
RUN_COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
_LINE_STYLES = ("-", "--", ":")
_GRAY = "#555555"
_MANY_POINTS = 40  # the steep start of a longer curve is left out
# The looks of a curve of training, and of one of evaluations.
_THIN: dict[str, Any] = {"linewidth": 1.2, "alpha": 0.6}
_DOTTED: dict[str, Any] = {
    "linewidth": 1.8,
    "marker": "o",
    "markersize": 4.5,
    "markeredgecolor": "white",
}
# The part of a training loss with terms (a teacher, a z-loss) that compares with val/loss.
_CROSS_ENTROPY = "train/cross_entropy"
_MANY_RUNS = 6
# x and y of a curve
Points = tuple[np.ndarray, np.ndarray]
# For each validation metric: the metric of training in the same plot, the metric in the small plot
# below, and the label of the y axis. Training has no bits per byte.
_AXES = {
    "val/loss": ("train/loss", "train/learning_rate", "loss (nats per token)"),
    "val/bits_per_byte": ("", "train/learning_rate", "validation bits per byte"),
    "val/accuracy": ("train/accuracy", "train/learning_rate", "accuracy"),
    "val/divergence": ("train/divergence", "train/learning_rate", "divergence from the teacher"),
    "val/reward": ("train/reward", "train/entropy", "mean reward"),
    "val/pass@1": ("train/reward", "train/entropy", "reward; share of held-out questions"),
}


def draw_run(run: RunFolder, config: Config, events: list[Event]) -> None:
    """Draw loss.png, with the band of the recipe's reference if there is one."""
    is_rewarded = "train/reward" in names(events)
    draw_curves(
        {run.path.resolve().name: events},
        run.loss_plot,
        metric="val/pass@1" if is_rewarded else "val/loss",
        reference=find_reference(config),
        # The first stage begins with the run, where a line would say nothing.
        stages={stage.first: stage.name for stage in stages_of(config)[1:]},
        # A preference loss is that of a pair.
        label=f"loss ({config.align.loss})" if config.align.loss else "",
    )


def draw_curves(
    runs: dict[str, list[Event]],
    path: Path,
    metric: str = "val/loss",
    by: str = "step",
    reference: Reference | None = None,
    stages: Mapping[int, str] = MappingProxyType({}),
    label: str = "",
) -> bool:
    """Draw a validation metric of runs (name -> events), with the smoothed training loss as a thin
    line. A single run also gets its raw loss, its best evaluation, the learning rate below, and a
    line at the first step of each stage (-> name).

    The training loss of a run with a teacher or another term is drawn without it: the cross-entropy
    alone compares with val/loss.

    `metric` is val/loss, val/bits_per_byte if the tokenizers differ, val/pass@1 together with the
    reward and the entropy of reinforcement learning, or another of `_AXES`; `by`, the x axis, is
    step, tokens or seconds; `label` replaces the label of the y axis. Returns whether there was
    anything to draw.
    """
    training, lower, usual_label = _AXES[metric]
    is_one = len(runs) == 1
    # The small plot below, of the learning rate, would be too crowded for several runs.
    figure, (axes, *below) = _new_figure(1 + is_one)
    curves = []
    # All colors as whole lines, then all again dashed, then dotted.
    looks = itertools.cycle(itertools.product(_LINE_STYLES, RUN_COLORS))
    for (name, events), (style, color) in zip(runs.items(), looks, strict=False):
        has_parts = training == "train/loss" and _CROSS_ENTROPY in names(events)
        trained = column(_with_cross_entropy(events) if has_parts else events, training, by)
        evaluated = column(events, metric, by)
        if is_one:
            what = "training cross-entropy" if has_parts else "training"
            curves += _draw_single(axes, trained, evaluated, color, what)
        else:
            curves += _draw_one_of_several(axes, trained, evaluated, style, color, name)
    # A run that has just begun has no evaluation yet, and no file is written.
    if not curves:
        return False
    last = max(x[-1] for x, _ in curves)
    # A band has losses by step, so it fits no other x axis and no other metric.
    if metric == "val/loss":
        if reference and by == "step":
            _draw_band(axes, reference.curve, last)
        _crop_start(axes, curves)
    axes.set_ylabel(label or usual_label)
    title = f"{len(runs)} runs"
    note = "thin: training, smoothed"
    if is_one:
        ((title, events),) = runs.items()
        note = f"step {events[-1]['step']:,}"
        _draw_below(below[0], *column(events, lower, by), lower.removeprefix("train/"))
        if metric == "val/loss":
            note += _mark_best(axes, column(events, metric, by))
    _draw_stages([axes, *below], stages, last)
    units = {"tokens": "training tokens", "seconds": "seconds of training"}
    (axes, *below)[-1].set_xlabel(units.get(by, by))
    _add_legend(axes, metric, len(runs))
    axes.set_title(plain(title), loc="left", fontweight="bold")
    axes.set_title(note, loc="right", color=_GRAY, fontsize=9)
    save_plot(figure, path)
    return True


def _add_legend(axes: "Axes", metric: str, count: int) -> None:
    """Add the legend of `count` runs, in the corner that curves of the metric leave free."""
    place: dict[str, Any] = {"loc": "lower right" if metric in RISING else "upper right"}
    # Many names would hide the curves.
    if count > _MANY_RUNS:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    axes.legend(frameon=False, fontsize=9, **place)


def _mark_best(axes: "Axes", evaluated: Points) -> str:
    """Circle the lowest loss; return the words for it, none if there is no loss yet."""
    x, y = evaluated
    if not len(x):
        return ""
    best = int(y.argmin())
    axes.plot(x[best], y[best], "o", markersize=11, mfc="none", mec=RUN_COLORS[1])
    return f"; ○ best {y[best]:.4f} at step {int(x[best]):,}"


def _with_cross_entropy(events: list[Event]) -> list[Event]:
    """Put the cross-entropy in place of the training loss, in the events that have it."""
    return [
        event | {"train/loss": event[_CROSS_ENTROPY]} if _CROSS_ENTROPY in event else event
        for event in events
    ]


def _draw_single(
    axes: "Axes", trained: Points, evaluated: Points, color: str, what: str
) -> list[Points]:
    """Draw the curves of a run that is alone in its plot, with `what` as the name of training's;
    return the ones that have points.
    """
    smoothed = _smoothed(trained)
    axes.plot(*smoothed, "-", color=color, label=f"{what}, smoothed", **_THIN)
    # The raw loss is drawn, too: smoothing hides spikes.
    axes.plot(*trained, color=color, linewidth=0.7, alpha=0.25)
    # Another color than training's. Several runs need their colors to tell them apart.
    axes.plot(*evaluated, "-", color=RUN_COLORS[1], label="validation", **_DOTTED)
    return [curve for curve in (evaluated, smoothed) if len(curve[0])]


def _draw_one_of_several(
    axes: "Axes", trained: Points, evaluated: Points, style: str, color: str, name: str
) -> list[Points]:
    """Draw the curves of a run among others; return the ones that have points."""
    smoothed = _smoothed(trained)
    axes.plot(*smoothed, style, color=color, **_THIN)
    curves = [curve for curve in (evaluated, smoothed) if len(curve[0])]
    # A run of a sweep that has not begun is no line of the legend.
    axes.plot(*evaluated, style, color=color, label=plain(name) if curves else None, **_DOTTED)
    return curves


def _smoothed(points: Points) -> Points:
    """Smooth a curve over a 25th of its points."""
    steps, values = points
    return steps, smooth(values, len(values) // 25)


def _draw_stages(all_axes: list["Axes"], stages: Mapping[int, str], last: float) -> None:
    """Mark the first step of each stage that the run has reached."""
    top = all_axes[0]
    for step, name in stages.items():
        if step > last:
            continue
        for axes in all_axes:
            axes.axvline(step, color=_GRAY, linewidth=0.8, linestyle=":")
        # x in steps, y as a share of the plot's height
        place = top.get_xaxis_transform()
        top.text(step, 0.98, f" {plain(name)}", transform=place, va="top", fontsize=8)


def _draw_below(axes: "Axes", x: np.ndarray, y: np.ndarray, label: str) -> None:
    """Draw a small curve from zero up."""
    axes.fill_between(x, y, color=_GRAY, alpha=0.15, linewidth=0)
    axes.plot(x, y, color=_GRAY, linewidth=1.4)
    axes.set_ylabel(label.replace("_", "\n"))
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", scilimits=(-2, 2))


def _new_figure(rows: int) -> tuple["Figure", list["Axes"]]:
    """Make a figure with one plot, or with a small second one below."""
    # Not pyplot, whose global state would keep every figure of a long run.
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
    """Draw the band of reference runs; a published loss at one step has none."""
    steps = curve["step"]
    if len(steps) > 1:
        axes.fill_between(
            steps,
            curve["low"],
            curve["high"],
            alpha=0.1,
            linewidth=0,
            label="band of the reference runs (validation)",
            color="black",
        )
        axes.plot(steps, curve["mean"], alpha=0.25, linewidth=0.8, color="black")
        # The band may reach far beyond the steps of a run that has just begun.
        last_step = max(last_step, 1)
        axes.set_xlim(-0.015 * last_step, 1.02 * last_step)


def _crop_start(axes: "Axes", curves: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Leave out the first losses of a long run, which would flatten the rest."""
    if max(len(x) for x, _ in curves) > _MANY_POINTS:
        # The y axis ends at the largest loss after the first 2.5% of the x axis.
        start = max(x[-1] for x, _ in curves) / 40
        axes.set_ylim(top=np.concatenate([y[x >= start] for x, y in curves]).max())
