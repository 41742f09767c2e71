"""Pictures of runs: the losses of one over its steps with the learning rate beneath, and those of several."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nanogpt_hf.config.schema import Config
from nanogpt_hf.reports.reference import Curve, Reference, differences, find_reference
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import Event, column, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which are told apart by colour-blind readers, too (https://jfly.uni-koeln.de/color/).
BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"
_RUNS = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
_GREY = "#555555"
_LONG = 40  # points from which on a curve is smoothed, and its steep beginning may leave the picture


def draw_run(run: RunFolder, config: Config, events: list[Event]) -> None:
    """Draw loss.png, with the band of the recipe's reference behind it where one is of this experiment."""
    reference = find_reference(config)
    if reference and differences(reference, config)[0]:
        reference = None
    draw_curves(events, run.path.resolve().name, run.loss_plot, reference)


def draw_curves(events: list[Event], title: str, path: Path, reference: Reference | None = None) -> None:
    """Draw train loss (smoothed over raw), validation loss and learning rate to a PNG; nothing of no training loss."""
    steps, losses = column(events, "train/loss")
    if not len(steps):
        return
    figure, (top, bottom) = _figure(2, height_ratios=[5, 1])
    where, validation = column(events, "val/loss")
    if reference and "val/loss" in reference.curves:
        _band(top, reference.curves["val/loss"], steps[-1])
    ends = {}
    long = len(steps) > _LONG
    top.plot(steps, losses, color=BLUE, linewidth=0.7 if long else 1.8, alpha=0.3 if long else 1)
    average = smooth(losses, len(steps) // 25)
    if long:
        top.plot(steps, average, color=BLUE, linewidth=2)
    ends["train"] = (average[-1], BLUE)
    if len(where):
        top.plot(where, validation, color=VERMILION, linewidth=1.4, marker="o", markersize=4.5, markeredgecolor="white")
        ends["validation"] = (validation[-1], VERMILION)
        _mark_best(top, where, validation, steps[-1])
    _leave_out_the_start(top, steps, average, where, validation)
    _label_ends(top, ends)
    top.set_ylabel("loss (nats a token)")
    _title(figure, top, title, f"step {int(steps[-1]):,}")
    rates = column(events, "train/learning_rate")
    bottom.fill_between(*rates, color=_GREY, alpha=0.15, linewidth=0)
    bottom.plot(*rates, color=_GREY, linewidth=1.4)
    bottom.set_ylabel("learning\nrate")
    bottom.set_ylim(bottom=0)
    bottom.ticklabel_format(axis="y", scilimits=(-2, 2))
    bottom.set_xlabel("step")
    _save(figure, path)


def draw_comparison(
    runs: dict[str, list[Event]], metric: str, by: str, path: Path, reference: Reference | None = None
) -> bool:
    """Draw one metric of several runs (name -> events) to a PNG: of each the validation, over its smoothed training.

    `metric` is val/loss, or val/bits_per_byte where tokens differ, `by` what is on the x axis: step, tokens, seconds.
    Returns whether there was anything to draw.
    """
    figure, (axes,) = _figure(1)
    shown = {name: column(events, metric, by) for name, events in runs.items()}
    furthest = max((where[-1] for where, _ in shown.values() if len(where)), default=0)
    if reference and metric in reference.curves and by == "step":
        _band(axes, reference.curves[metric], furthest)
    ends, means, spots = {}, [], []
    for number, (name, (where, values)) in enumerate(shown.items()):
        colour = _RUNS[number % len(_RUNS)]
        style = ("-", "--", ":")[number // len(_RUNS) % 3]
        if metric == "val/loss":
            train, losses = column(runs[name], "train/loss", by)
            average = smooth(losses, len(losses) // 25)
            axes.plot(train, average, color=colour, linewidth=0.9, alpha=0.45, linestyle=style)
            spots, means = [*spots, *train], [*means, *average]
        axes.plot(
            where,
            values,
            color=colour,
            linewidth=1.8,
            linestyle=style,
            marker="o",
            markersize=4,
            markeredgecolor="white",
        )
        if len(values):
            ends[name] = (values[-1], colour)
    if not ends:
        return False
    spots, means = np.array(spots), np.array(means)
    everywhere = np.concatenate([where for where, _ in shown.values()])
    _leave_out_the_start(axes, spots, means, everywhere, np.concatenate([values for _, values in shown.values()]))
    _label_ends(axes, ends)
    axes.set_ylabel("validation loss (nats a token)" if metric == "val/loss" else "validation, bits a byte")
    axes.set_xlabel({"step": "step", "tokens": "training tokens", "seconds": "seconds of training"}[by])
    _title(figure, axes, f"{len(runs)} runs" if len(runs) > 1 else next(iter(runs)), "thin: training, smoothed")
    _save(figure, path)
    return True


def _figure(rows: int, **options) -> tuple["Figure", list["Axes"]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, 1, sharex=True, squeeze=False, **options).flat)
    for one in axes:
        one.grid(alpha=0.2)
        one.margins(x=0.015)
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color("#aaaaaa")
        one.tick_params(color="#aaaaaa", labelcolor="#333333")
        one.xaxis.set_major_formatter("{x:,.0f}")
    return figure, axes


def _band(axes: "Axes", curve: Curve, until: float) -> None:
    axes.fill_between(curve.step, curve.low, curve.high, color="#000000", alpha=0.1, linewidth=0)
    axes.plot(curve.step, curve.mean, color="#000000", alpha=0.25, linewidth=0.8)
    axes.set_xlim(right=until * 1.02)
    axes.plot([], [], color="#000000", alpha=0.15, linewidth=8, label="validation of the reference runs, band")
    axes.legend(frameon=False, loc="upper right", fontsize=9)


def _mark_best(axes: "Axes", where: np.ndarray, values: np.ndarray, until: float) -> None:
    best = int(values.argmin())
    axes.plot(where[best], values[best], marker="o", markersize=11, markerfacecolor="none", markeredgecolor=VERMILION)
    axes.annotate(
        f"best {values[best]:.4f} at step {int(where[best]):,}",
        (where[best], values[best]),
        xytext=(0, 62),
        textcoords="offset points",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        ha="left" if where[best] < until / 2 else "right",
        color="#8c3d00",
        arrowprops={"arrowstyle": "-", "color": VERMILION, "linewidth": 0.8, "shrinkB": 6},
    )


def _leave_out_the_start(
    axes: "Axes", steps: np.ndarray, losses: np.ndarray, where: np.ndarray, validation: np.ndarray
) -> None:
    """Let the picture begin below the first losses of a long run, which would flatten all others, and say so."""
    if len(steps) <= _LONG:
        return
    late = max(steps.max(), where.max(initial=0)) / 40
    kept = np.concatenate([losses[steps >= late], validation[where >= late]])
    kept = kept[np.isfinite(kept)]
    first = float(np.concatenate([losses[:1], validation[:1]]).max())
    low, high = kept.min(), kept.max()
    if first > high + 0.2 * (high - low):
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
        axes.annotate(f"↑ from {first:.2f}", (0.16, 0.985), xycoords="axes fraction", va="top", color=_GREY, fontsize=9)


def _label_ends(axes: "Axes", ends: dict[str, tuple[float, str]]) -> None:
    """Names at the right end of the curves instead of a legend, moved apart where they would lie on each other."""
    low, high = axes.get_ylim()
    placed = -np.inf
    for name, (value, colour) in sorted(ends.items(), key=lambda item: item[1][0]):
        height = max((min(max(value, low), high) - low) / (high - low), placed + 0.055)
        placed = height
        text = name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"
        axes.annotate(
            text.replace("$", r"\$"),
            (1.012, height),
            xycoords="axes fraction",
            va="center",
            color=colour,
            weight="bold",
        )


def _title(figure: "Figure", axes: "Axes", title: str, beside: str) -> None:
    axes.set_title(title.replace("$", r"\$"), loc="left", fontweight="bold")
    axes.set_title(beside, loc="right", color=_GREY, fontsize=9)


def _save(figure: "Figure", path: Path) -> None:
    with written_whole(path) as partial:
        figure.savefig(partial, format="png")
