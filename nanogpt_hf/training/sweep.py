"""Train a grid of runs, each by `pretrain` in its own process; write their table and plot.

So nothing of a run is left for the next, and a run that fails ends alone.
"""

import itertools
import logging
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import nanogpt_hf
from nanogpt_hf.config.checks import accumulation_steps
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.values import convert, parse_flow_list
from nanogpt_hf.data.manifest import DECIDING_KNOBS
from nanogpt_hf.errors import EXIT_STOPPED, ConfigError, RunFolderError, UserError
from nanogpt_hf.formatting import align, format_duration
from nanogpt_hf.reports.curves import draw_curves
from nanogpt_hf.runs.files import write_json
from nanogpt_hf.runs.folder import RunFolder, step_of
from nanogpt_hf.runs.metrics import column, read_metrics

if TYPE_CHECKING:
    from nanogpt_hf.distributed.signals import StopRequest

logger = logging.getLogger(__name__)

_LARGEST_GRID, _LONGEST_NAME = 1000, 120  # runs, characters of a folder
_EXIT_INTERRUPTED, _POLL = 130, 0.1  # status of an interrupted run; seconds
_PREPARED_BY = tuple(f"data.{name}" for name in (*DECIDING_KNOBS, "sha256"))
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
    launcher: tuple[str, ...] = ()  # `launch` and its options, before `pretrain`
    overwrite: bool = False
    log_level: str | None = None  # for the runs' processes
    _sizes: dict[tuple[str, bool], Any] = field(default_factory=dict)  # estimates, each made once

    def run_folder(self, run: GridRun) -> RunFolder:
        return RunFolder(self.folder / run.name)

    def planned(self, started: Container[str] = ()) -> list[Row]:
        """The runs as they would be, with their sizes; of those that `started` the vocabulary is
        known from their data.
        """
        from nanogpt_hf.planning.estimate import estimate  # imports transformers, which is slow
        from nanogpt_hf.planning.placement import Placement

        rows = []
        for run in self.runs:
            if (key := (run.name, run.name in started)) not in self._sizes:
                self._sizes[key] = estimate(run.config, Placement(on_cpu=True))
            sizes, steps = self._sizes[key], run.config.train.max_steps
            rows.append({"run": run.name, "status": "planned", **run.values, "steps": steps})
            rows[-1] |= {name: getattr(sizes, name) for name in ("parameters", "tokens", "flops")}
        return rows


def build_grid(
    recipe: str, overrides: Sequence[tuple[str, str]], dp_size: int = 1
) -> list[GridRun]:
    """The runs of all combinations of the values in `overrides`, the last knob varying fastest.

    Raises UserError for a grid that is none, and ConfigError with the problems of all runs.
    """
    axes = {key: _values(key, text) for key, text in dict(overrides).items()}
    swept = [key for key, texts in axes.items() if len(texts) > 1]
    if not swept:
        raise UserError("cli.py sweep: no knob has several values: --optim.learning_rate 1e-3,3e-3")
    if (count := math.prod(map(len, axes.values()))) > _LARGEST_GRID:
        raise UserError(f"cli.py sweep: {count:,} runs; at most {_LARGEST_GRID:,} in one grid")
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
                raise UserError(f"{key}: {value}: a sweep trains from scratch and pushes nothing")
        if run.name in runs:
            raise UserError(f"cli.py sweep: two runs named {run.name}; give different values")
        runs[run.name] = run
    if problems:
        raise ConfigError(problems)
    return list(runs.values())


def _values(key: str, text: str) -> list[str]:
    """`1e-3,3e-3` -> its values as the texts that an override has. A list or a mapping is one."""
    if text.startswith(("[", "{")) or not re.search(r"[,'\"]", text):
        return [text]
    try:
        values = parse_flow_list(text)
    except ValueError as error:
        raise UserError(f"--{key}: expected values with commas between them: {error}") from None
    if any(isinstance(value, dict | list) for value in values):
        raise UserError(f"--{key}: {text}: lists and mappings cannot be swept")
    return ["null" if value is None else value for value in values]


def _grid_run(recipe: str, texts: dict[str, str], swept: list[str]) -> GridRun:
    config, overrides = load_config(recipe, list(texts.items())), list(texts.items())
    values = {}
    for key in swept:  # a knob, or one field of a mapping such as `optim.rates.mlp_in`
        knob, _, name = key.rpartition(".")
        is_knob = key in KNOBS
        values[key] = convert(KNOBS[key], texts[key]) if is_knob else get_value(config, knob)[name]
    tokens = [key for key in swept if key in _PREPARED_BY]
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
        whole.lock()
        for run in sweep.runs:
            (folder := sweep.run_folder(run)).check_unlocked()
            kept = folder.recipe.is_file() and not sweep.overwrite
            if kept and (changes := "; ".join(folder.differences(run.config))):
                raise RunFolderError(
                    f"{folder.path}: holds a run of another recipe ({changes}); give another "
                    "--sweep-dir, or --overwrite"
                )
        yield
    finally:
        whole.unlock()


def train_runs(sweep: Sweep) -> tuple[dict[str, str], int]:
    """Train the runs that are not done, in their order; return the status of each by name, and an
    exit status.
    """
    from nanogpt_hf.distributed.signals import stop_on_signals

    statuses: dict[str, str] = {}
    with stop_on_signals(message="") as stop:  # a run prints it
        for number, run in enumerate(sweep.runs, 1):
            if not sweep.overwrite and is_done(sweep.run_folder(run), run.config):
                statuses[run.name] = "done"
                continue
            logger.info(f"\nrun {number} of {len(sweep.runs)}: {run.name}")
            status = run_process(_command(sweep, run), stop)
            if stop.reason or status in (EXIT_STOPPED, _EXIT_INTERRUPTED):
                statuses[run.name] = "interrupted"
                logger.info(f"{sweep.folder}: interrupted; run the same command again to continue")
                return statuses, status if status == _EXIT_INTERRUPTED else EXIT_STOPPED
            statuses[run.name] = f"failed ({status})" if status else "done"
            if status:
                logger.error(f"{run.name}: ended with exit status {status}; the sweep continues")
            write_results(sweep, statuses)
    return statuses, int(set(statuses.values()) != {"done"})


def is_done(folder: RunFolder, config: Config) -> bool:
    """Whether the run was trained to its last step and its last model is written."""
    newest = folder.newest_checkpoint()
    if newest is None or not (folder.final / "config.json").is_file():
        return False
    return step_of(newest) == config.train.max_steps


def _command(sweep: Sweep, run: GridRun) -> list[str]:
    words = [word for key, text in run.overrides for word in (f"--{key}", text)]
    words += ["--run-dir", str(sweep.run_folder(run).path)]
    words += ["--log-level", sweep.log_level] if sweep.log_level else []
    words.append("--overwrite" if sweep.overwrite else "--auto-resume")
    command = [sys.executable, "-P", "-m", "nanogpt_hf", *sweep.launcher, "pretrain"]
    return [*command, sweep.recipe, *words]


def run_process(command: list[str], stop: "StopRequest") -> int:
    """Run a process and return its exit status; if `stop` has a reason it saves and ends, or is not
    started.
    """
    if stop.reason:  # a signal between two runs
        return EXIT_STOPPED
    package = str(Path(nanogpt_hf.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    # --json - keeps stdout for its own output
    stdout = 2 if sys.stdout is sys.stderr else None
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stdout=stdout)
    while process.poll() is None and not stop.reason:
        time.sleep(_POLL)
    if stop.reason:  # after Ctrl-C, which has reached it, a second SIGINT would end it at once
        process.terminate()
    return process.wait()


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [
        ["run", "parameters", "steps", "tokens", "FLOPs", "val loss", "best", "time", "status"]
    ]
    for row in rows:
        sizes = [f"{row[name]:,}" for name in ("parameters", "steps", "tokens")]
        losses = [row.get(name) for name in ("val_loss", "best_val_loss")]
        shown = ["–" if loss is None else f"{loss:.4f}" for loss in losses]
        time = format_duration(row.get("seconds") or 0)
        lines.append([row["run"], *sizes, f"{row['flops']:.2e}", *shown, time, row["status"]])
    return align(lines, right=range(1, 8))


def _is_measured(row: Row) -> bool:
    return row["val_loss"] is not None and row["status"] == "done"


def seed_means(rows: Sequence[Row], knobs: Sequence[str]) -> list[str]:
    """Mean and standard deviation of the final loss over the seeds that are done, for each
    combination of the other swept knobs.
    """
    losses: dict[str, list[float]] = {}
    for row in filter(_is_measured, rows if "train.seed" in knobs else ()):
        others = ", ".join(f"{key} {row[key]}" for key in knobs if key != "train.seed")
        losses.setdefault(others, []).append(row["val_loss"])
    return [
        f"{others or 'all'}: {np.mean(of):.4f} ± {np.std(of, ddof=1):.4f} over {len(of)} seeds"
        for others, of in losses.items()
        if len(of) > 1
    ]


def fit_scaling(rows: Sequence[Row]) -> dict[str, float] | None:
    """loss = coefficient × FLOPs^exponent, by least squares in logarithms over the best run of each
    depth; None without three depths that are done.
    """
    measured = [row for row in rows if "model.depth" in row and _is_measured(row)]
    measured.sort(key=lambda row: row["val_loss"], reverse=True)
    best = {row["model.depth"]: (row["flops"], row["val_loss"]) for row in measured}
    if len(best) < 3:
        return None
    flops, losses = np.log(np.array(list(best.values())).T)
    (exponent, intercept), covariance = np.polyfit(flops, losses, 1, cov=True)
    law = {"coefficient": math.exp(intercept), "exponent": float(exponent)}
    return law | {"standard_error": float(covariance[0, 0] ** 0.5)}


def write_results(sweep: Sweep, statuses: dict[str, str]) -> dict[str, Any]:
    """Write sweep.json and sweep.png of the runs so far; return what sweep.json has.

    Runs whose tokens differ are drawn by bits per byte.
    """
    rows, events_of, knobs = [], {}, sweep.runs[0].values
    other_tokens = {"data.tokenizer", "data.source"} & knobs.keys()
    for run, row in zip(sweep.runs, sweep.planned(statuses), strict=True):
        events = events_of[run.name] = read_metrics(sweep.run_folder(run))
        last = {"step": 0, "tokens": 0, "seconds": None} | (events[-1] if events else {})
        losses, bits = (column(events, f"val/{name}")[1] for name in ("loss", "bits_per_byte"))
        row |= {"status": statuses.get(run.name, "not started"), "steps": last["step"]}
        row["flops"] *= last["tokens"] / row["tokens"]
        row |= {"tokens": last["tokens"], "seconds": last["seconds"]}
        for name, values in (("val_loss", losses), ("val_bits_per_byte", bits)):
            row[name] = float(values[-1]) if len(values) else None
        row["best_val_loss"] = float(losses.min()) if len(losses) else None
        rows.append(row)
    fit = None if other_tokens else fit_scaling(rows)
    tree = {"sweep": sweep.folder.resolve().name, "runs": rows, "fit": fit}
    tree["seed_means"] = seed_means(rows, list(knobs))
    sweep.folder.mkdir(parents=True, exist_ok=True)
    write_json(sweep.folder / "sweep.json", tree)
    metric = "val/bits_per_byte" if other_tokens else "val/loss"
    draw_curves(events_of, sweep.folder / "sweep.png", metric, "tokens")
    return tree
