"""Train a grid of runs, each by `pretrain` in its own process; write their table and plot.

So nothing of a run is left for the next, and a run that fails ends alone. Under a launcher every
rank starts its part of each run, and rank 0 chooses a port for them to meet at.
"""

import itertools
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import nanogpt_hf
from nanogpt_hf.config.checks import accumulation_steps
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.values import convert, parse_flow_list
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import EXIT_STOPPED, ConfigError, RunFolderError, UserError
from nanogpt_hf.formatting import align, format_duration
from nanogpt_hf.reports.curves import RUN_COLORS, new_figure, save_figure
from nanogpt_hf.runs.files import write_json
from nanogpt_hf.runs.folder import RunFolder, step_of
from nanogpt_hf.runs.metrics import column, read_metrics

logger = logging.getLogger(__name__)

_LARGEST_GRID = 1000  # runs
_LONGEST_NAME = 120  # of characters, for a run folder
_EXIT_INTERRUPTED = 130
_LEGEND_ROWS = 24
# Data knobs that leave the prepared tokens as they are; of the others each value has a data folder.
_SAME_TOKENS = ("block_size", "order", "packing", "num_threads", "dir", "max_epochs", "streaming")
Row = dict[str, Any]


@dataclass(frozen=True)
class GridRun:
    """One run of a grid: its folder's name, its values of the swept knobs, its knobs as texts."""

    name: str
    values: Row
    overrides: list[tuple[str, str]]
    config: Config


@dataclass(frozen=True)
class Sweep:
    """The runs of a grid over a recipe, below a folder."""

    recipe: str
    runs: list[GridRun]
    folder: Path
    mesh: Mesh
    overwrite: bool = False
    log_level: str | None = None  # for the runs' processes

    def run_folder(self, run: GridRun) -> RunFolder:
        return RunFolder(self.folder / run.name)

    def share(self, key: str, value: Any) -> Any:
        """The value of rank 0, on every rank."""
        if self.mesh.world_size == 1:
            return value  # without torch, which takes seconds to import
        from nanogpt_hf.distributed.rendezvous import share_from_main

        return share_from_main(f"sweep/{key}", value)


def build_grid(
    recipe: str, overrides: Sequence[tuple[str, str]], dp_size: int = 1
) -> list[GridRun]:
    """The runs of all combinations of the values in `overrides`, the last knob varying fastest.

    Raises UserError for a grid that is none, and ConfigError with the problems of all runs.
    """
    axes = {key: _values(key, text) for key, text in dict(overrides).items()}
    swept = [key for key, texts in axes.items() if len(texts) > 1]
    count = math.prod(map(len, axes.values()))
    if not swept or count > _LARGEST_GRID:
        wanted = f"{count:,} runs; at most {_LARGEST_GRID:,} in one grid"
        none = "no knob has several values; give one, such as --optim.learning_rate 1e-3,3e-3"
        raise UserError(f"cli.py sweep: {wanted if swept else none}")
    runs, problems = {}, {}
    for texts in itertools.product(*axes.values()):
        try:
            run = _grid_run(recipe, dict(zip(axes, texts, strict=True)), swept)
            accumulation_steps(run.config, dp_size)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)  # most are the same in all runs
            continue
        except ValueError as error:  # the micro-batch does not divide the step
            problems[f"{recipe}: {error}"] = None
            continue
        for key in ("finetune.model", "hub.push"):
            if value := get_value(run.config, key):
                raise UserError(
                    f"{key}: {value}: the runs of a sweep start from scratch and push nothing; "
                    "leave it out"
                )
        if run.name in runs:
            raise UserError(
                f"cli.py sweep: several runs would be named {run.name}; give different values"
            )
        runs[run.name] = run
    if problems:
        raise ConfigError(problems)
    return list(runs.values())


def _values(key: str, text: str) -> list[str]:
    """`1e-3,3e-3` -> its values as the texts that an override has."""
    if not re.search(r"[,\[\]'\"]", text):
        return [text]
    try:
        values = parse_flow_list(text)
        if any(isinstance(value, dict) for value in values):
            raise ValueError("a mapping is no value")
        lists = [value for value in values if isinstance(value, list)]
        if any(
            not isinstance(part, str) or set(part) & set("[],") for part in itertools.chain(*lists)
        ):
            raise ValueError("a list holds names without commas or brackets")
    except ValueError as error:
        raise UserError(f"--{key}: expected values with commas between them: {error}") from None
    texts = [f"[{', '.join(value)}]" if isinstance(value, list) else value for value in values]
    return ["null" if text is None else text for text in texts] or [""]


def _grid_run(recipe: str, texts: dict[str, str], swept: list[str]) -> GridRun:
    config, overrides = load_config(recipe, list(texts.items())), list(texts.items())
    values = {key: convert(KNOBS[key], texts[key]) for key in swept}
    tokens = [key for key in swept if re.match(rf"data\.(?!{'|'.join(_SAME_TOKENS)})", key)]
    if tokens and "data.dir" not in swept:
        overrides.append(("data.dir", f"{config.data.dir}-{_label(values, tokens)}"))
        config = load_config(recipe, overrides)
    return GridRun(_label(values, swept), values, overrides, config)


def _label(values: Row, keys: list[str]) -> str:
    """`depth=2_seed=1`: a name for a folder."""
    last = [key.rpartition(".")[2] for key in keys]
    names = last if len(set(last)) == len(keys) else keys
    text = "_".join(f"{name}={values[key]}" for name, key in zip(names, keys, strict=True))
    return re.sub(r"[^\w.+=-]+", "-", text)[:_LONGEST_NAME].strip("-")


@contextmanager
def locked(sweep: Sweep) -> Iterator[None]:
    """Context in which no other sweep may train in the folder.

    Raises UserError if another process trains in it, or in one of its runs: a sweep that was killed
    may have left a run that saves. Raises it, too, if a run's folder holds another experiment.
    """
    whole = RunFolder(sweep.folder)
    try:
        if sweep.mesh.is_main:
            whole.lock()
            for run in sweep.runs:
                (folder := sweep.run_folder(run)).check_unlocked()
                kept = folder.recipe.is_file() and not sweep.overwrite
                if kept and (changes := "; ".join(folder.differences(run.config))):
                    raise RunFolderError(
                        f"{folder.path}: holds a run of another recipe ({changes}); give another "
                        "--sweep-dir, or --overwrite"
                    )
        sweep.share("locked", True)
        yield
    finally:
        whole.unlock()


def train_runs(sweep: Sweep) -> tuple[dict[str, str], int]:
    """Train the runs that are not done, in their order; return the status of each by name, and an
    exit status.
    """
    statuses: dict[str, str] = {}
    with _signals_passed_on() as current:
        for number, run in enumerate(sweep.runs, 1):
            done = not sweep.overwrite and is_done(sweep.run_folder(run), run.config)
            if sweep.share(f"done/{number}", done):
                statuses[run.name] = "done"
                continue
            logger.info(f"\nrun {number} of {len(sweep.runs)}: {run.name}")
            status = current.run(_command(sweep, run), _environment(sweep, number))
            if current.stopped or status in (EXIT_STOPPED, _EXIT_INTERRUPTED):
                statuses[run.name] = "interrupted"
                logger.info(f"{sweep.folder}: interrupted; run the same command again to continue")
                return statuses, status if status == _EXIT_INTERRUPTED else EXIT_STOPPED
            statuses[run.name] = f"failed ({status})" if status else "done"
            if status:
                logger.error(f"{run.name}: ended with exit status {status}; the sweep continues")
            if sweep.mesh.is_main:
                write_results(sweep, statuses)
    return statuses, int(set(statuses.values()) != {"done"})


def is_done(folder: RunFolder, config: Config) -> bool:
    """Whether the run was trained to its last step and its last model is written."""
    newest = folder.newest_checkpoint()
    written = any((folder.final / f"{kind}config.json").is_file() for kind in ("", "adapter_"))
    return written and newest is not None and step_of(newest) == config.train.max_steps


def _command(sweep: Sweep, run: GridRun) -> list[str]:
    command = [sys.executable, "-P", "-m", "nanogpt_hf", "pretrain", sweep.recipe]
    command += [word for key, text in run.overrides for word in (f"--{key}", text)]
    command += ["--run-dir", str(sweep.run_folder(run).path)]
    level = ["--log-level", sweep.log_level] if sweep.log_level else []
    return [*command, "--overwrite" if sweep.overwrite else "--auto-resume", *level]


def _environment(sweep: Sweep, number: int) -> dict[str, str]:
    """This launch's environment, but the ranks of a run meet at a port of their own."""
    package = str(Path(nanogpt_hf.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths}
    if sweep.mesh.world_size > 1:  # the launcher's own store has the keys of the run before
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = sweep.share(f"port/{number}", probe.getsockname()[1])
        environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return environment


class _CurrentRun:
    """The process of the run that is training now."""

    def __init__(self) -> None:
        self.stopped = False
        self._process: subprocess.Popen | None = None

    def run(self, command: list[str], environment: dict[str, str]) -> int:
        if self.stopped:  # by a signal between two runs
            return EXIT_STOPPED
        # --json - keeps stdout for its own output
        stdout = 2 if sys.stdout is sys.stderr else None
        self._process = subprocess.Popen(command, env=environment, stdout=stdout)
        if self.stopped:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait()

    def stop(self, number: int, frame: Any) -> None:
        """Signal handler: the run saves and ends, and no other is started."""
        self.stopped = True
        if self._process is not None:
            # Ctrl-C has reached it already, and a second SIGINT would interrupt a run that saves.
            self._process.send_signal(signal.SIGTERM if number == signal.SIGINT else number)


@contextmanager
def _signals_passed_on() -> Iterator[_CurrentRun]:
    current, before = _CurrentRun(), {}
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, current.stop)
    try:
        yield current
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def planned_rows(sweep: Sweep) -> list[Row]:
    """The runs as they would be, with their sizes."""
    from nanogpt_hf.planning.estimate import estimate  # imports transformers, which is slow
    from nanogpt_hf.planning.placement import Placement

    rows = []
    for run in sweep.runs:
        sizes, steps = estimate(run.config, Placement(on_cpu=True)), run.config.train.max_steps
        rows.append({"run": run.name, "status": "planned", **run.values})
        rows[-1] |= {"parameters": sizes.parameters, "steps": steps}
        rows[-1] |= {"tokens": sizes.tokens, "flops": sizes.flops}
    return rows


def result_rows(sweep: Sweep, statuses: dict[str, str]) -> list[Row]:
    """The runs as they are."""
    rows = planned_rows(sweep)
    for row, run in zip(rows, sweep.runs, strict=True):
        events = read_metrics(sweep.run_folder(run))
        last, flops_per_token = events[-1] if events else {}, row["flops"] / row["tokens"]
        losses, bits = (
            column(events, f"val/{name}")[1].tolist() for name in ("loss", "bits_per_byte")
        )
        row["status"] = statuses.get(run.name, "not started")
        row["steps"], row["tokens"] = last.get("step", 0), last.get("tokens", 0)
        row["flops"] = flops_per_token * row["tokens"]
        row["val_loss"], row["best_val_loss"] = (
            (losses[-1], min(losses)) if losses else (None, None)
        )
        row["val_bits_per_byte"] = bits[-1] if bits else None
        row["seconds"] = last.get("seconds")
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    head = ["run", "parameters", "steps", "tokens", "FLOPs", "val loss", "best", "time", "status"]
    lines = [head]
    for row in rows:
        sizes = [f"{row[name]:,}" for name in ("parameters", "steps", "tokens")]
        losses = [row.get(name) for name in ("val_loss", "best_val_loss")]
        shown = ["–" if loss is None else f"{loss:.4f}" for loss in losses]
        time = format_duration(row.get("seconds") or 0)
        lines.append([row["run"], *sizes, f"{row['flops']:.2e}", *shown, time, row["status"]])
    return align(lines, right=range(1, 8))


def seed_means(rows: Sequence[Row], knobs: Sequence[str]) -> list[str]:
    """Mean and standard deviation of the final loss over the seeds that are done, for each
    combination of the other swept knobs.
    """
    losses: dict[str, list[float]] = {}
    for row in rows if "train.seed" in knobs else ():
        if row["val_loss"] is not None and row["status"] == "done":
            others = ", ".join(f"{key} {row[key]}" for key in knobs if key != "train.seed")
            losses.setdefault(others, []).append(row["val_loss"])
    return [
        f"{others or 'all'}: {np.mean(values):.4f} ± {np.std(values, ddof=1):.4f} over "
        f"{len(values)} seeds"
        for others, values in losses.items()
        if len(values) > 1
    ]


def fit_scaling(rows: Sequence[Row]) -> dict[str, float] | None:
    """loss = coefficient × FLOPs^exponent, by least squares in logarithms over the best run of each
    depth; None without three depths that are done.
    """
    best: dict[int, tuple[float, float]] = {}  # depth -> loss, FLOPs
    for row in rows:
        if "model.depth" in row and row["val_loss"] is not None and row["status"] == "done":
            depth = row["model.depth"]
            best[depth] = min((row["val_loss"], row["flops"]), best.get(depth, (math.inf, 0.0)))
    if len(best) < 3:
        return None
    losses, flops = np.log(np.array(list(best.values())).T)
    (exponent, intercept), covariance = np.polyfit(flops, losses, 1, cov=True)
    law = {"coefficient": np.exp(intercept), "exponent": exponent}
    law["standard_error"] = covariance[0, 0] ** 0.5
    return {name: float(value) for name, value in law.items()}


def write_results(sweep: Sweep, statuses: dict[str, str]) -> dict[str, Any]:
    """Write sweep.json and sweep.png of the runs so far; return what sweep.json has."""
    sweep.folder.mkdir(parents=True, exist_ok=True)
    rows = result_rows(sweep, statuses)
    tree: dict[str, Any] = {"sweep": sweep.folder.resolve().name, "runs": rows}
    tree["fit"] = fit_scaling(rows)
    tree["seed_means"] = seed_means(rows, list(sweep.runs[0].values))
    write_json(sweep.folder / "sweep.json", tree)
    draw(sweep, tree)
    return tree


def draw(sweep: Sweep, tree: dict[str, Any]) -> None:
    """Draw the validation losses of all runs by tokens and by FLOPs to sweep.png.

    Runs whose tokens differ are compared by bits per byte.
    """
    knobs, rows = set(sweep.runs[0].values), tree["runs"]
    metric = "val/bits_per_byte" if knobs & {"data.tokenizer", "data.source"} else "val/loss"
    figure, axes = new_figure(1, 2, sharex=False, sharey=True)
    for number, (run, row) in enumerate(zip(sweep.runs, rows, strict=True)):
        tokens, values = column(read_metrics(sweep.run_folder(run)), metric, "tokens")
        late = tokens > tokens.max(initial=0) / 100  # the first would flatten the rest
        if not late.any():
            continue
        style = ("-", "--", ":")[number // len(RUN_COLORS) % 3]
        options: dict[str, Any] = {
            "color": RUN_COLORS[number % len(RUN_COLORS)],
            "linestyle": style,
        }
        if number < _LEGEND_ROWS:
            options["label"] = row["run"].replace("$", r"\$")
        for one, scale in zip(axes, (1.0, row["flops"] / max(row["tokens"], 1)), strict=True):
            one.plot(tokens[late] * scale, values[late], marker="o", markersize=3.5, **options)
    if not axes[0].lines:
        return
    if (law := tree["fit"]) and metric == "val/loss":
        flops = [row["flops"] for row in rows if row["flops"]]
        ends = np.geomspace(min(flops), max(flops))
        label = f"{law['coefficient']:.3g} · C$^{{{law['exponent']:.3f}}}$"
        fitted = law["coefficient"] * ends ** law["exponent"]
        axes[1].plot(ends, fitted, color="black", linestyle="--", linewidth=1, label=label)
    for one, label in zip(axes, ("training tokens", "FLOPs of training"), strict=True):
        one.set(xscale="log", xlabel=label)
    axes[0].set_ylabel("validation loss" if metric == "val/loss" else "validation, bits per byte")
    axes[0].set_title(tree["sweep"].replace("$", r"\$"), loc="left", fontweight="bold")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    save_figure(figure, sweep.folder / "sweep.png")
