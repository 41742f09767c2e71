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
BLUE, VERMILION, GREEN = RUN_COLORS[:3]
_LINE_STYLES = ("-", "--", ":")
_GRAY = "#555555"
_MANY_POINTS = 40  # a curve of more points is smoothed, and its steep start may be cropped
_NAME_LENGTH = 24  # characters of a label


def draw_run(run: RunFolder, config: Config, events: list[Event]) -> None:
    """Draw loss.png, with the band of the recipe's reference if the run can be compared with it."""
    has_loss = not any("train/reward" in event for event in events)
    reference = find_reference(config) if has_loss else None
    if reference and differences(reference, config)[0]:
        reference = None
    stages = {stage.first: stage.name for stage in stages_of(config)[1:]}
    draw_curves(events, run.path.resolve().name, run.loss_plot, reference, stages)


def draw_curves(
    events: list[Event],
    title: str,
    path: Path,
    reference: Reference | None = None,
    stages: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Draw training loss (raw and smoothed), validation loss and learning rate, and a line at the
    first step of each stage (-> name).

    Of reinforcement learning: reward, held-out pass rates and entropy. No plot without a training
    loss or reward.
    """
    is_rl = any("train/reward" in event for event in events)
    steps, values = column(events, "train/reward" if is_rl else "train/loss")
    if not len(steps):
        return
    figure, (axes, lower_axes) = new_figure(2, height_ratios=[5, 1])
    last_step = max([steps[-1], *column(events, "val/loss")[0]])
    if reference and reference.curve and not is_rl:
        _draw_band(axes, reference.curve, last_step)
    smoothed = smooth(values, len(steps) // 25)
    if len(steps) > _MANY_POINTS:
        axes.plot(steps, values, color=BLUE, linewidth=0.7, alpha=0.3)
    axes.plot(steps, smoothed, color=BLUE, linewidth=2)
    labels = {"train": (smoothed[-1], BLUE)}
    evaluations = {"val/loss": "validation"}
    if is_rl:
        rates = [name for name in names(events) if name.startswith("val/pass@")]
        evaluations = {name: name.removeprefix("val/") for name in rates}
    for (metric, name), color in zip(evaluations.items(), (VERMILION, GREEN), strict=False):
        x, y = column(events, metric)
        if len(x):
            _plot_evaluations(axes, x, y, color=color, linewidth=1.6)
            labels[name] = (y[-1], color)
            if not is_rl:
                _mark_best(axes, x, y, steps[-1])
    if not is_rl:
        _crop_start(axes, steps, smoothed, *column(events, "val/loss"))
    _label_ends(axes, labels)
    for step, name in stages.items():
        if step <= last_step:
            _mark_stage(axes, step, name)
            _mark_stage(lower_axes, step, "")
    is_of_pairs = "val/margin" in names(events)
    y_label = "loss per example" if is_of_pairs else "loss (nats per token)"
    axes.set_ylabel("reward; share of questions" if is_rl else y_label)
    note = f"step {int(last_step):,}"
    _title(axes, title, f"{note}; pass@k on held-out questions" if is_rl else note)
    lower = column(events, "train/entropy" if is_rl else "train/learning_rate")
    lower_axes.fill_between(*lower, color=_GRAY, alpha=0.15, linewidth=0)
    lower_axes.plot(*lower, color=_GRAY, linewidth=1.4)
    lower_axes.set_ylabel("entropy\n(nats)" if is_rl else "learning\nrate")
    lower_axes.set_ylim(bottom=0)
    if not is_rl:
        lower_axes.ticklabel_format(axis="y", scilimits=(-2, 2))
    lower_axes.set_xlabel("step")
    save_figure(figure, path)


def draw_comparison(
    runs: dict[str, list[Event]],
    metric: str,
    by: str,
    path: Path,
    reference: Reference | None = None,
) -> bool:
    """Draw a validation metric of several runs (name -> events), with the smoothed training loss as
    a thin line.

    `metric` is val/loss, or val/bits_per_byte if the tokenizers differ; `by`, the x axis, is step,
    tokens or seconds.
    Returns whether there was anything to draw.
    """
    curves = {name: column(events, metric, by) for name, events in runs.items()}
    if not any(len(x) for x, _ in curves.values()):
        return False
    figure, (axes,) = new_figure(1)
    if reference and reference.curve and (metric, by) == ("val/loss", "step"):
        _draw_band(axes, reference.curve, max(x[-1] for x, _ in curves.values() if len(x)))
    labels, train_curves = {}, []
    for number, (name, (x, values)) in enumerate(curves.items()):
        color = RUN_COLORS[number % len(RUN_COLORS)]
        style = _LINE_STYLES[number // len(RUN_COLORS) % len(_LINE_STYLES)]
        if metric == "val/loss":
            train_x, losses = column(runs[name], "train/loss", by)
            smoothed = smooth(losses, len(losses) // 25)
            axes.plot(train_x, smoothed, color=color, linewidth=0.9, alpha=0.45, linestyle=style)
            train_curves.append((train_x, smoothed))
        _plot_evaluations(axes, x, values, color=color, linewidth=1.8, linestyle=style)
        if len(values):
            labels[name] = (values[-1], color)
    if train_curves:
        both = (*zip(*train_curves, strict=True), *zip(*curves.values(), strict=True))
        _crop_start(axes, *map(np.concatenate, both))
    _label_ends(axes, labels)
    is_loss, name = metric == "val/loss", next(iter(runs))
    axes.set_ylabel("validation loss (nats per token)" if is_loss else "validation bits per byte")
    axes.set_xlabel({"tokens": "training tokens", "seconds": "seconds of training"}.get(by, by))
    title = f"{len(runs)} runs" if len(runs) > 1 else name
    _title(axes, title, "thin: training loss, smoothed" if is_loss else "")
    save_figure(figure, path)
    return True


def _plot_evaluations(axes: "Axes", x: np.ndarray, values: np.ndarray, **style) -> None:
    axes.plot(x, values, marker="o", markersize=4.5, markeredgecolor="white", **style)


def new_figure(rows: int, **options: Any) -> tuple["Figure", list["Axes"]]:
    """A figure in our style, without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, 1, sharex=True, squeeze=False, **options).flat)
    for ax in axes:
        ax.grid(alpha=0.2)
        ax.margins(x=0.015)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color("#aaaaaa")
        ax.tick_params(color="#aaaaaa", labelcolor="#333333")
        ax.xaxis.set_major_formatter("{x:,.0f}")
    return figure, axes


def _draw_band(axes: "Axes", curve: Curve, last_step: float) -> None:
    axes.fill_between(curve.step, curve.low, curve.high, color="#000000", alpha=0.1, linewidth=0)
    axes.plot(curve.step, curve.mean, color="#000000", alpha=0.25, linewidth=0.8)
    axes.set_xlim(-0.015 * last_step, 1.02 * last_step)
    label = "band of the reference runs (validation)"
    axes.plot([], [], color="#000000", alpha=0.15, linewidth=8, label=label)
    axes.legend(frameon=False, loc="upper right", fontsize=9)


def _mark_best(axes: "Axes", steps: np.ndarray, losses: np.ndarray, last_step: float) -> None:
    best = int(losses.argmin())
    point = (steps[best], losses[best])
    ring = {"marker": "o", "markersize": 11, "markerfacecolor": "none"}
    axes.plot(*point, markeredgecolor=VERMILION, **ring)
    axes.annotate(
        f"best {losses[best]:.4f} at step {int(steps[best]):,}",
        point,
        xytext=(0, 62),
        textcoords="offset points",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        ha="left" if steps[best] < last_step / 2 else "right",
        color="#8c3d00",
        arrowprops={"arrowstyle": "-", "color": VERMILION, "linewidth": 0.8, "shrinkB": 6},
    )


def _mark_stage(axes: "Axes", step: int, name: str) -> None:
    axes.axvline(step, color=_GRAY, linewidth=0.8, linestyle=":")
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    style = {"rotation": 90, "va": "top", "color": _GRAY, "fontsize": 8}
    axes.annotate(name.replace("$", r"\$"), (step, 0.98), xytext=(3, 0), **place, **style)


def _crop_start(
    axes: "Axes", x: np.ndarray, losses: np.ndarray, val_x: np.ndarray, val_losses: np.ndarray
) -> None:
    """Start the y axis below the first losses of a long run, which would flatten the rest; a
    note shows their value.
    """
    if len(x) <= _MANY_POINTS:
        return
    start = max(x.max(), val_x.max(initial=0)) / 40
    shown = np.concatenate([losses[x >= start], val_losses[val_x >= start]])
    shown = shown[np.isfinite(shown)]
    first = float(np.concatenate([losses[:1], val_losses[:1]]).max())
    low, high = shown.min(), shown.max()
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
    axes.annotate(text.replace("$", r"\$"), place, xycoords="axes fraction", **style)


def _title(axes: "Axes", title: str, note: str) -> None:
    axes.set_title(title.replace("$", r"\$"), loc="left", fontweight="bold")
    axes.set_title(note, loc="right", color=_GRAY, fontsize=9)


def save_figure(figure: "Figure", path: Path) -> None:
    with written_whole(path) as partial:
        figure.savefig(partial, format="png")
