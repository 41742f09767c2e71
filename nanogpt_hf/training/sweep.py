"""Train a grid of runs, each by `pretrain` in a process of its own, so that nothing of one is left
for the next; write their table and plot.
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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import nanogpt_hf
from nanogpt_hf.config.load import load_config, unread_overrides
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.sources import sources_of
from nanogpt_hf.config.stages import naming, stages_of
from nanogpt_hf.config.values import convert, parse_flow_list
from nanogpt_hf.data.manifest import DECIDING_KNOBS, read_manifest
from nanogpt_hf.data.source import check_source
from nanogpt_hf.distributed.accelerate_config import check_launch, check_recipe
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.layout import check_layout
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.distributed.signals import StopRequest, stop_on_signals
from nanogpt_hf.errors import EXIT_STOPPED, RunFolderError, UserError
from nanogpt_hf.formatting import align, format_duration
from nanogpt_hf.planning.config_files import NotEstimated, read_launch
from nanogpt_hf.planning.estimate import estimate
from nanogpt_hf.program import program
from nanogpt_hf.reports.comparison import diverged_at
from nanogpt_hf.reports.curves import draw_curves
from nanogpt_hf.reports.settings import draw_settings, settings_of
from nanogpt_hf.runs.files import write_json
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import last_value, read_metrics
from nanogpt_hf.runs.recipe import read_recipe, recipe_differences
from nanogpt_hf.training.start import check_before_the_data

logger = logging.getLogger(__name__)
_PREPARED_BY = tuple(f"data.{name}" for name in (*DECIDING_KNOBS, "sha256"))
Row = dict[str, Any]
Texts = Sequence[tuple[str, str]]  # knobs and their values


@dataclass(frozen=True, eq=False)
class GridRun:
    """One run of a grid: its folder's name, its values of the swept knobs, its knobs as texts."""

    name: str
    values: Row
    overrides: Texts
    config: Config


@dataclass(frozen=True)
class Sweep:
    """Runs of a grid over a recipe, below a folder."""

    recipe: str
    runs: list[GridRun]
    folder: Path
    machine: str | None = None  # an accelerate config, with which `launch` starts each run
    overwrite: bool = False
    log_level: str | None = None  # the runs' own

    def planned(self, started: Container[str] = ()) -> list[Row]:
        """Return the runs as they would be; the vocabulary of the runs that `started` is known."""
        return [dict(_planned(run, run.name in started)) for run in self.runs]


@cache
def _planned(run: GridRun, started: bool) -> Row:
    """Return the row of a run, estimated once before and once after its data is prepared."""
    sizes = estimate(run.config, Launch(device="cpu"))
    row = {"run": run.name, "status": "planned", "steps": run.config.train.max_steps} | run.values
    return row | {name: getattr(sizes, name) for name in ("parameters", "tokens", "flops")}


def build_grid(recipe: str, overrides: Texts) -> list[GridRun]:
    """Return the runs of all combinations of values, the last knob varying fastest. Raises
    UserError.
    """
    # One list of values per knob; a knob with one value is an axis of length 1.
    axes = {key: _values(key, text) for key, text in dict(overrides).items()}
    swept = [key for key, texts in axes.items() if len(texts) > 1]
    if not swept:
        raise UserError(
            f"{program()} sweep: no knob has several values: --optim.learning_rate 1e-3,3e-3"
        )
    # The name of a run is its folder, so two values that give one name are refused.
    runs = {}
    for texts in _combinations(recipe, axes):
        run = _grid_run(recipe, texts, [key for key in swept if key in texts])
        if run.config.hub.push:
            raise UserError(f"{program()} sweep: leave out hub.push")
        if run.name in runs:
            raise UserError(f"{program()} sweep: two runs named {run.name}; give different values")
        runs[run.name] = run
    return list(runs.values())


def _combinations(recipe: str, axes: dict[str, list[str]]) -> list[dict[str, str]]:
    """Every combination of values, as the text of each knob.

    A knob that only some combinations read, such as `optim.muon_momentum` next to `optim.name
    adamw,muon`, is left out of the others, which then make one run instead of several.
    """
    combinations = [
        dict(zip(axes, texts, strict=True)) for texts in itertools.product(*axes.values())
    ]
    unread = [unread_overrides(recipe, [*texts.items()]) for texts in combinations]
    # A knob that no run reads is a mistake, which load_config reports.
    never_read = set.intersection(*unread)
    found: list[dict[str, str]] = []
    for texts, keys in zip(combinations, unread, strict=True):
        left_out = keys - never_read
        kept = {key: text for key, text in texts.items() if key not in left_out}
        if not (left_out and kept in found):
            found.append(kept)
    return found


def _values(key: str, text: str) -> list[str]:
    """`1e-3,3e-3` -> its values as the texts that an override has. A list or a mapping is one."""
    if text.startswith(("[", "{")) or not re.search(r"[,'\"]", text):
        return [text]
    try:
        return ["null" if value is None else str(value) for value in parse_flow_list(text)]
    except ValueError as error:
        raise UserError(f"--{key}: expected values with commas between them: {error}") from None


def _grid_run(recipe: str, texts: dict[str, str], swept: list[str]) -> GridRun:
    overrides = list(texts.items())
    config = load_config(recipe, overrides)
    values = {}
    # A key is a knob, or one field of a mapping such as `optim.rates.mlp_in`.
    for key in swept:
        knob, _, name = key.rpartition(".")
        is_knob = key in KNOBS
        values[key] = convert(KNOBS[key], texts[key]) if is_knob else get_value(config, knob)[name]
    # Runs with other tokens need prepared data of their own.
    tokens = [key for key in swept if key in _PREPARED_BY]
    if tokens and "data.dir" not in swept:
        overrides += [("data.dir", f"{config.data.dir}-{_label(values, tokens)}")]
        config = load_config(recipe, overrides)
    return GridRun(_label(values, swept), values, overrides, config)


def _label(values: Row, keys: list[str]) -> str:
    """`depth=2_seed=1`: a name for a folder."""
    # `seed` for `train.seed`, unless two of the knobs end alike.
    last = [key.rpartition(".")[2] for key in keys]
    names = last if len(set(last)) == len(keys) else keys
    text = "_".join(f"{name}={values[key]}" for name, key in zip(names, keys, strict=True))
    return re.sub(r"[^\w.+=-]+", "-", text)[:120].strip("-")


def check_runs(sweep: Sweep) -> None:
    """Raises UserError, with the run's name, if one of the runs could not be launched, and
    RunFolderError if the folder of the sweep holds a run.
    """
    whole = RunFolder(sweep.folder)
    if whole.path.exists() and not whole.path.is_dir():
        raise RunFolderError(f"{whole.path}: is a file; give another --sweep-dir")
    if whole.recipe.exists() or whole.checkpoints.exists():
        raise RunFolderError(f"{whole.path}: holds a run itself; give another --sweep-dir")
    launch = read_machine(sweep.machine) if sweep.machine else None
    mesh = Mesh.from_environment()

    def check_machine(config: Config) -> None:
        if not sweep.machine:
            check_launch(config, mesh)
            return
        check_recipe(config)
        if launch is None:
            return
        for stage in stages_of(config):
            with naming(stage):
                check_layout(stage.config, launch)

    for run in sweep.runs:
        try:
            check_machine(run.config)
            check_before_the_data(run.config, RunFolder(sweep.folder / run.name))
            for source in sources_of(run.config.data):
                prepared = Path(source.data.dir).resolve()
                if read_manifest(prepared) is None:
                    check_source(source.data, prepared)
        except UserError as error:
            reason = _of_sweep(error)
            raise UserError(f"{run.name}: {reason}; no run was started") from None


def _of_sweep(error: UserError) -> str:
    """Return what is wrong with a folder, with the option that names it in `sweep`."""
    return str(error).replace("--run-dir", "--sweep-dir")


def read_machine(path: str) -> Launch | None:
    """Return the launch of an accelerate config; None if only its own launch can check the layout.

    Raises UserError if it is no such config.
    """
    try:
        return read_launch(path)
    except NotEstimated:
        return None


@contextmanager
def locked(sweep: Sweep) -> Iterator[None]:
    """Context in which nothing else trains in the folder or in its runs, which have these knobs."""
    whole = RunFolder(sweep.folder)
    try:
        try:
            whole.lock()
        except RunFolderError as error:
            raise RunFolderError(_of_sweep(error)) from None
        for run in sweep.runs:
            folder = RunFolder(sweep.folder / run.name)
            folder.check_unlocked()
            # A run that is in the folder already is continued, so its knobs must be the same.
            kept = folder.recipe.is_file() and not sweep.overwrite
            if changes := recipe_differences(read_recipe(folder), run.config) if kept else ():
                reason = f"{folder.path}: holds a run of another recipe ({'; '.join(changes)})"
                raise RunFolderError(f"{reason}; give another --sweep-dir, or --overwrite")
        yield
    finally:
        whole.unlock()


def train_runs(sweep: Sweep) -> tuple[dict[str, str], int]:
    """Train the runs that are not done; return the status of each by name, and an exit status."""
    statuses: dict[str, str] = {}
    # Without a message, since the run that stops prints one.
    with stop_on_signals(message="") as stop:
        for number, run in enumerate(sweep.runs, 1):
            folder = RunFolder(sweep.folder / run.name)
            last = run.config.train.max_steps
            # The last checkpoint is written before final/, and final/ at the end: both are there.
            has_model = not sweep.overwrite and (folder.final / "config.json").is_file()
            is_done = has_model and folder.newest_checkpoint() == folder.checkpoint(last)
            # One that has diverged is started again, so that it says so again.
            if is_done and diverged_at(read_metrics(folder)) is None:
                statuses[run.name] = "done"
                continue
            logger.info(f"\nrun {number} of {len(sweep.runs)}: {run.name}")
            status = run_process(_command(sweep, run), stop)
            if stop.reason or status == EXIT_STOPPED:
                statuses[run.name] = "interrupted"
                logger.info(f"{sweep.folder}: interrupted; run the same command again to continue")
                return statuses, EXIT_STOPPED
            statuses[run.name] = f"failed ({status})" if status else "done"
            if status:
                logger.error(f"{run.name}: ended with exit status {status}; the sweep continues")
            write_results(sweep, statuses)
    return statuses, int(set(statuses.values()) != {"done"})


def _command(sweep: Sweep, run: GridRun) -> list[str]:
    knobs = [*run.overrides, ("run-dir", str(sweep.folder / run.name))]
    words = [word for key, text in knobs for word in (f"--{key}", text)]
    words += ["--log-level", sweep.log_level] if sweep.log_level else []
    words.append("--overwrite" if sweep.overwrite else "--auto-resume")
    # -P: a file in the current folder must not hide a module.
    python = [sys.executable, "-P", "-m", "nanogpt_hf"]
    launcher = ["launch", "--config_file", sweep.machine] if sweep.machine else []
    return [*python, *launcher, "pretrain", sweep.recipe, *words]


def run_process(command: list[str], stop: StopRequest) -> int:
    """Run a process and return its exit status; it ends early, after saving, if `stop` says so."""
    # A signal may have come between two runs.
    if stop.reason:
        return EXIT_STOPPED
    # The package as it is imported here, also from a checkout that is not installed.
    paths = [str(Path(nanogpt_hf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # With `--json -` stdout is for the sweep's own output, and the runs print to stderr.
    stdout = 2 if sys.stdout is sys.stderr else None
    process = subprocess.Popen(command, env=environment, stdout=stdout)
    while process.poll() is None and not stop.reason:
        time.sleep(0.1)
    # Ctrl-C has reached the process already. It gets SIGTERM, since a second SIGINT would end it
    # at once, without a checkpoint.
    if stop.reason:
        process.terminate()
    return process.wait()


def table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text."""
    lines = [["run", "parameters", "steps", "tokens", "FLOPs", "val loss", "time", "status"]]
    for row in rows:
        sizes = [f"{row[name]:,}" for name in ("parameters", "steps", "tokens")]
        loss = row.get("val_loss")
        time = format_duration(row.get("seconds") or 0)
        shown = [f"{row['flops']:.2e}", "–" if loss is None else f"{loss:.4f}", time]
        lines.append([row["run"], *sizes, *shown, row["status"]])
    return align(lines, right=range(1, 7))


def fit_scaling(rows: Sequence[Row]) -> dict[str, float] | None:
    """loss = coefficient × FLOPs^exponent, by least squares over the best runs of three depths."""
    measured = [row for row in rows if row["status"] == "done" and row["val_loss"]]
    measured.sort(key=lambda row: row["val_loss"], reverse=True)
    # Sorted by loss from the highest, so that the best run of each depth stays in the dict.
    best = {row.get("model.depth"): (row["flops"], row["val_loss"]) for row in measured}
    # Two points lie on any line.
    if len(best) < 3:
        return None
    # A power law is a line in logarithms: log loss = exponent × log FLOPs + intercept.
    flops, losses = np.log(np.array(list(best.values())).T)
    (exponent, intercept), covariance = np.polyfit(flops, losses, 1, cov=True)
    law = {"coefficient": math.exp(intercept), "exponent": float(exponent)}
    return law | {"standard_error": float(covariance[0, 0] ** 0.5)}


def write_results(sweep: Sweep, statuses: dict[str, str]) -> dict[str, Any]:
    """Write sweep.json, which is returned, and sweep.png, by bits per byte if tokens differ."""
    events_of = {}
    rows = sweep.planned(statuses)
    # Losses per token cannot be compared between tokenizers or texts; bits per byte can.
    other_tokens = {"data.tokenizer", "data.source"} & sweep.runs[0].values.keys()
    for run, row in zip(sweep.runs, rows, strict=True):
        events = events_of[run.name] = read_metrics(RunFolder(sweep.folder / run.name))
        last = {"step": 0, "tokens": 0, "seconds": None} | (events[-1] if events else {})
        # Planned FLOPs, in proportion to what the run has seen of its tokens.
        row["flops"] *= last["tokens"] / row["tokens"]
        row |= {"status": statuses.get(run.name, "not started"), "steps": last["step"]}
        row |= {"tokens": last["tokens"], "seconds": last["seconds"]}
        for name in ("loss", "bits_per_byte"):
            row[f"val_{name}"] = last_value(events, f"val/{name}")
    tree = {"sweep": sweep.folder.resolve().name, "runs": rows}
    tree["fit"] = None if other_tokens else fit_scaling(rows)
    metric = "val/bits_per_byte" if other_tokens else "val/loss"
    # A diverged run, or one that is not done, says nothing of its setting.
    losses = [row[metric.replace("/", "_")] if row["status"] == "done" else None for row in rows]
    values = [run.values for run in sweep.runs]
    tree["settings"] = settings_of(list(zip(values, losses, strict=True)))
    sweep.folder.mkdir(parents=True, exist_ok=True)
    write_json(sweep.folder / "sweep.json", tree)
    draw_curves(events_of, sweep.folder / "sweep.png", metric, "tokens")
    draw_settings(tree["settings"], sweep.folder / "settings.png")
    return tree
