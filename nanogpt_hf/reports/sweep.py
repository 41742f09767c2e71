"""Results of a sweep: one table (text, CSV, JSON), one plot, and the scaling law fitted over depths."""

import csv
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanogpt_hf.formatting import format_duration
from nanogpt_hf.reports.curves import RUN_COLOURS
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import Event, column, read_metrics, smooth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DEPTH, _SEED = "model.depth", "train.seed"
_LEGEND_ROWS = 24
_SHOWN_FROM = 0.01  # share of a run's tokens at which its curve begins in the plot


@dataclass(frozen=True)
class Row:
    """One run: its size, and what it has reached so far."""

    run: str
    status: str
    values: dict[str, Any]  # swept knob -> value
    parameters: int
    steps: int
    tokens: int
    flops: float
    val_loss: float | None = None  # the last
    best_val_loss: float | None = None
    val_bits_per_byte: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class SeedMean:
    """The final validation loss over several seeds."""

    values: dict[str, Any]  # swept knob -> value, without the seed
    val_loss: float
    standard_deviation: float
    seeds: int

    def __str__(self) -> str:
        label = "".join(f"{key} {value}: " for key, value in self.values.items())
        return f"{label}{self.val_loss:.4f} ± {self.standard_deviation:.4f} over {self.seeds} seeds"


@dataclass(frozen=True)
class PowerLaw:
    """loss = coefficient × FLOPs^exponent, fitted by least squares in logarithms."""

    coefficient: float
    exponent: float
    standard_error: float | None  # of the exponent; None for two points


def result_rows(planned: Sequence[Row], metrics: dict[str, list[Event]], statuses: dict[str, str]) -> list[Row]:
    """The runs as they are; `metrics` and `statuses` by their names."""
    rows = []
    for row in planned:
        events = metrics[row.run]
        last = events[-1] if events else {}
        tokens = int(last.get("tokens", 0))
        losses, bits = column(events, "val/loss")[1], column(events, "val/bits_per_byte")[1]
        reached = {
            "status": statuses.get(row.run, "not started"),
            "steps": last.get("step", 0),
            "tokens": tokens,
            "flops": row.flops / row.tokens * tokens,
            "val_loss": float(losses[-1]) if len(losses) else None,
            "best_val_loss": float(losses.min()) if len(losses) else None,
            "val_bits_per_byte": float(bits[-1]) if len(bits) else None,
            "seconds": last.get("seconds"),
        }
        rows.append(dataclasses.replace(row, **reached))
    return rows


def sweep_table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    cells = [["run", "parameters", "steps", "tokens", "FLOPs"]]
    results = any(row.val_loss is not None or row.status != "planned" for row in rows)
    cells[0] += ["val loss", "best", "time", "status"] if results else []
    for row in rows:
        cells.append([row.run, f"{row.parameters:,}", f"{row.steps:,}", f"{row.tokens:,}", f"{row.flops:.2e}"])
        if results:
            losses = ["–" if loss is None else f"{loss:.4f}" for loss in (row.val_loss, row.best_val_loss)]
            time = "–" if row.seconds is None else format_duration(row.seconds)
            cells[-1] += [*losses, time, row.status]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i in (0, 8) else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def seed_means(rows: Sequence[Row]) -> list[SeedMean]:
    """The mean final loss over the seeds that are done, for each combination of the other swept knobs."""
    losses: dict[tuple[tuple[str, Any], ...], list[float]] = {}
    for row in rows:
        if _SEED in row.values and row.val_loss is not None and row.status == "done":
            others = tuple((key, value) for key, value in row.values.items() if key != _SEED)
            losses.setdefault(others, []).append(row.val_loss)
    return [
        SeedMean(dict(others), float(np.mean(values)), float(np.std(values, ddof=1)), len(values))
        for others, values in losses.items()
        if len(values) > 1
    ]


def fit_scaling(rows: Sequence[Row]) -> PowerLaw | None:
    """The scaling law over the best run of each depth; None without three depths that are done."""
    best: dict[int, tuple[float, float]] = {}  # depth -> loss, FLOPs
    for row in rows:
        if (depth := row.values.get(_DEPTH)) is not None and row.val_loss is not None and row.status == "done":
            best[depth] = min((row.val_loss, row.flops), best.get(depth, (math.inf, 0.0)))
    if len(best) < 3:
        return None
    losses, flops = np.array(list(best.values())).T
    return fit_power_law(flops, losses)


def fit_power_law(flops: np.ndarray, losses: np.ndarray) -> PowerLaw:
    """Fit losses = coefficient × flops^exponent."""
    x, y = np.log(flops), np.log(losses)
    spread = ((x - x.mean()) ** 2).sum()
    exponent = float(((x - x.mean()) * (y - y.mean())).sum() / spread)
    intercept = y.mean() - exponent * x.mean()
    residuals = y - intercept - exponent * x
    freedom = len(x) - 2
    error = float(np.sqrt((residuals**2).sum() / freedom / spread)) if freedom else None
    return PowerLaw(float(np.exp(intercept)), exponent, error)


def write_sweep(planned: Sequence[Row], statuses: dict[str, str], sweep_dir: Path) -> str:
    """Write sweep.csv, sweep.json and sweep.png of the runs so far; return the table and the names of the files."""
    metrics = {row.run: read_metrics(RunFolder(sweep_dir / row.run)) for row in planned}
    rows = result_rows(planned, metrics, statuses)
    law, means = fit_scaling(rows), seed_means(rows)
    sweep_dir.mkdir(parents=True, exist_ok=True)
    with written_whole(sweep_dir / "sweep.json") as partial:
        law_fields = law and dataclasses.asdict(law)
        tree = {"sweep": sweep_dir.resolve().name, "runs": [dataclasses.asdict(row) for row in rows], "fit": law_fields}
        tree["seed_means"] = [dataclasses.asdict(mean) for mean in means]
        partial.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    with written_whole(sweep_dir / "sweep.csv") as partial, partial.open("w", newline="", encoding="utf-8") as file:
        knobs = list(rows[0].values)
        fields = [field.name for field in dataclasses.fields(Row) if field.name != "values"]
        table = csv.writer(file)
        table.writerow([*fields[:2], *knobs, *fields[2:]])
        for row in rows:
            table.writerow([row.run, row.status, *row.values.values(), *(getattr(row, name) for name in fields[2:])])
    drawn = draw_sweep(rows, metrics, law, sweep_dir.resolve().name, sweep_dir / "sweep.png")
    lines = [sweep_table(rows)]
    if means:
        lines += ["\nfinal validation loss, mean and standard deviation:", *(f"  {mean}" for mean in means)]
    if law:
        error = "" if law.standard_error is None else f" ± {law.standard_error:.4f}"
        lines.append(f"\nscaling over depths: loss = {law.coefficient:.4g} × FLOPs^{law.exponent:.4f}{error}")
    plot = [f"plot: {sweep_dir / 'sweep.png'}"] * drawn
    return "\n".join([*lines, "", *plot, f"table: {sweep_dir / 'sweep.csv'}, {sweep_dir / 'sweep.json'}"])


def draw_sweep(
    rows: Sequence[Row], metrics: dict[str, list[Event]], law: PowerLaw | None, title: str, path: Path
) -> bool:
    """Draw the losses of all runs by tokens and by FLOPs to a PNG; return whether there was anything to draw."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, NullLocator

    metric = _metric([row for row in rows if row.val_loss is not None])
    shown = [row for row in rows if len(_late(metrics[row.run], metric, row)[0])]
    if not shown:
        return False
    figure = Figure(figsize=(11, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, 2, sharey=True))
    ordered = len(rows[0].values) == 1 and all(
        isinstance(value, int | float) for row in rows for value in row.values.values()
    )
    for number, row in enumerate(rows):
        if row not in shown:
            continue
        shade = number / max(1, len(rows) - 1)
        colour = colormaps["viridis"](0.82 * shade) if ordered else RUN_COLOURS[number % len(RUN_COLOURS)]
        style = "-" if ordered else ("-", "--", ":")[number // len(RUN_COLOURS) % 3]
        for one, scale in zip(axes, (1.0, row.flops / row.tokens), strict=True):
            _draw_losses(one, metrics[row.run], metric, row, scale, color=colour, linestyle=style)
    for one, label in zip(axes, ("training tokens", "FLOPs of training"), strict=True):
        one.set(xscale="log", yscale="log", xlabel=label)
        one.yaxis.set_major_locator(MaxNLocator(8))
        one.yaxis.set_minor_locator(NullLocator())
        one.yaxis.set_major_formatter("{x:.2f}")
        one.grid(alpha=0.2)
        one.spines[["top", "right"]].set_visible(False)
    if law and metric == "val/loss":
        ends = np.array([min(row.flops for row in shown) / 1.5, max(row.flops for row in shown) * 1.5])
        label = f"{law.coefficient:.3g} · C$^{{{law.exponent:.3f}}}$"
        axes[1].plot(
            ends, law.coefficient * ends**law.exponent, color="black", linestyle="--", linewidth=1, label=label
        )
    axes[0].set_ylabel("loss (nats per token)" if metric == "val/loss" else "validation, bits per byte")
    axes[0].set_title(title.replace("$", r"\$"), loc="left", fontweight="bold")
    axes[1].set_title(
        "thin: training, smoothed" if metric == "val/loss" else "", loc="right", fontsize=9, color="#555555"
    )
    handles, labels = axes[1].get_legend_handles_labels()
    hidden = max(0, len(labels) - _LEGEND_ROWS)
    more = f"and {hidden} more" if hidden else ""
    figure.legend(handles[hidden:], labels[hidden:], loc="outside right upper", frameon=False, fontsize=9, title=more)
    with written_whole(path) as partial:
        figure.savefig(partial, format="png")
    return True


def _metric(rows: Sequence[Row]) -> str:
    """Losses per token are compared if all runs predict tokens of one tokenizer, else bits per byte."""
    tokenizers = {tuple(row.values.get(key) for key in ("data.tokenizer", "data.source")) for row in rows}
    return "val/loss" if len(tokenizers) == 1 else "val/bits_per_byte"


def _draw_losses(axes: "Axes", events: list[Event], metric: str, row: Row, scale: float, **style: Any) -> None:
    where, values = _late(events, metric, row)
    style_of_evaluations = {"linewidth": 1.6, "marker": "o", "markersize": 3.5, "label": row.run}
    axes.plot(where * scale, values, **style_of_evaluations, **style)
    if metric == "val/loss":
        where, losses = column(events, "train/loss", "tokens")
        averages = smooth(losses, len(losses) // 25)
        late = where >= _SHOWN_FROM * row.tokens
        axes.plot(where[late] * scale, averages[late], linewidth=0.8, alpha=0.5, **style)


def _late(events: list[Event], metric: str, row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and values of a metric without those at the start, for logarithmic axes."""
    where, values = column(events, metric, "tokens")
    late = (where > 0) & (where >= _SHOWN_FROM * row.tokens) & (values > 0)
    return where[late], values[late]
