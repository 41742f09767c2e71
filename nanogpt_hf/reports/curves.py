"""Draw loss and reward curves as PNG: loss.png of one run, and several runs in one plot."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.stages import stages_of
from nanogpt_hf.reports.reference import Curve, Reference, differences, find_reference
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
_MANY_POINTS = 40  # a curve of more points is smoothed, and its steep start may be cropped
_NAME_LENGTH = 24  # characters of a label
# by validation metric: the curve of training, the one below, and the y axis
_AXES = {
    "val/loss": ("train/loss", "train/learning_rate", "loss (nats per token)"),
    "val/bits_per_byte": ("", "train/learning_rate", "validation bits per byte"),
    "val/pass@1": ("train/reward", "train/entropy", "reward; share of held-out questions"),
}


def draw_run(run: RunFolder, config: Config, events: list[Event]) -> None:
    """Draw loss.png, with the band of the recipe's reference if the run can be compared with it."""
    reference = find_reference(config)
    if reference and differences(reference, config)[0]:
        reference = None
    metric = "val/pass@1" if "train/reward" in names(events) else "val/loss"
    stages = {stage.first: stage.name for stage in stages_of(config)[1:]}
    draw_curves({run.path.resolve().name: events}, run.loss_plot, metric, "step", reference, stages)


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
    curves = {name: column(events, metric, by) for name, events in runs.items()}
    trained = {name: column(events, training, by) for name, events in runs.items()}
    is_one = len(runs) == 1
    if not any(len(x) for x, _ in (trained if is_one else curves).values()):
        return False
    last = max(x[-1] for x, _ in (*curves.values(), *trained.values()) if len(x))
    figure, (axes, *below) = new_figure(1 + is_one)
    shown, labels, note = [*curves.values()], {}, "thin: training, smoothed"
    for number, (name, (x, y)) in enumerate(curves.items()):
        rounds, color = divmod(number, len(RUN_COLORS))
        style: dict[str, Any] = {"linestyle": _LINE_STYLES[rounds % len(_LINE_STYLES)]}
        steps, values = trained[name]
        smoothed = smooth(values, len(values) // 25)
        shown.append((steps, smoothed))
        axes.plot(steps, smoothed, color=RUN_COLORS[color], linewidth=1.2, alpha=0.6, **style)
        if is_one:
            if len(steps) > _MANY_POINTS:
                axes.plot(steps, values, color=RUN_COLORS[color], linewidth=0.7, alpha=0.25)
            labels["train"] = (smoothed[-1], RUN_COLORS[color])
            name, color, note = "validation", 1, f"step {int(steps[-1]):,}"
        style |= {"color": RUN_COLORS[color], "marker": "o", "markeredgecolor": "white"}
        axes.plot(x, y, linewidth=1.8, markersize=4.5, **style)
        if len(y):
            labels[name] = (y[-1], RUN_COLORS[color])
    if metric == "val/loss":
        if reference and by == "step":
            _draw_band(axes, reference.curve, last)
        _crop_start(axes, shown)
    _label_ends(axes, labels)
    axes.set_ylabel(label)
    for ax in below:
        (events,) = runs.values()
        _draw_below(ax, *column(events, lower, by), lower.removeprefix("train/"))
        x, y = shown[0]
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
    title = next(iter(runs)) if is_one else f"{len(runs)} runs"
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


def new_figure(rows: int) -> tuple["Figure", list["Axes"]]:
    """A figure in our style, without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    heights = [5, 1][:rows]
    axes = list(figure.subplots(rows, sharex=True, squeeze=False, height_ratios=heights).flat)
    for ax in axes:
        ax.grid(alpha=0.2)
        ax.margins(x=0.015)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color("#aaaaaa")
        ax.tick_params(color="#aaaaaa", labelcolor="#333333")
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
        axes.legend(frameon=False, loc="upper right", fontsize=9)


def _crop_start(axes: "Axes", curves: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Start the y axis below the first losses of a long run, which would flatten the rest; a
    note shows their value.
    """
    curves = [(x, losses) for x, losses in curves if len(x)]
    if max(len(x) for x, _ in curves) <= _MANY_POINTS:
        return
    start = max(x[-1] for x, _ in curves) / 40
    shown = np.concatenate([losses[x >= start] for x, losses in curves])
    first, low, high = max(losses[0] for _, losses in curves), shown.min(), shown.max()
    if first > high + 0.2 * (high - low):
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
        _note(axes, f"↑ from {first:.2f}", (0.16, 0.985), va="top", color=_GRAY, fontsize=9)


def _label_ends(axes: "Axes", labels: dict[str, tuple[float, str]]) -> None:
    """Write names (-> last value and color) at the right end of the curves, moved apart if they
    would overlap.
    """
    low, high = axes.get_ylim()
    height = -np.inf
    for name, (value, color) in sorted(labels.items(), key=lambda item: item[1][0]):
        height = max((min(max(value, low), high) - low) / (high - low), height + 0.055)
        half = _NAME_LENGTH // 2
        text = name if len(name) <= _NAME_LENGTH else f"{name[: half - 1]}…{name[-half:]}"
        _note(axes, text, (1.012, height), va="center", color=color, weight="bold")


def _note(axes: "Axes", text: str, place: tuple[float, float], **style: Any) -> None:
    axes.annotate(_plain(text), place, xycoords="axes fraction", **style)


def _plain(text: str) -> str:
    """Without mathematics between dollar signs."""
    return text.replace("$", r"\$")
