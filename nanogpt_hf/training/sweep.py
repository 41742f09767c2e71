"""Train the runs of a sweep one after another, each in a process of its own; skip, resume and report them."""

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import nanogpt_hf
from nanogpt_hf.config.checks import accumulation_steps
from nanogpt_hf.config.grid import GridRun
from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import EXIT_STOPPED, RunFolderError, UserError
from nanogpt_hf.reports.sweep import Row, write_sweep
from nanogpt_hf.runs.folder import RunFolder, step_of

logger = logging.getLogger(__name__)

DONE = "done"
EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130
_PR_SET_PDEATHSIG = 1  # in Linux's <sys/prctl.h>
_LAUNCHER_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torch: whether the launcher serves the store at MASTER_PORT


@dataclass(frozen=True)
class Sweep:
    """The runs of a grid over a recipe, below a folder."""

    recipe: str
    runs: Sequence[GridRun]
    folder: Path
    overwrite: bool = False
    log_level: str | None = None  # of the runs' processes


@contextmanager
def locked(sweep: Sweep) -> Iterator[None]:
    """Context in which no other sweep may train in the folder.

    Raises UserError, on every process, if a run cannot be started, its folder holds another
    experiment, or another process trains in one of the folders.
    """
    whole = RunFolder(sweep.folder)
    try:
        if problem := _share("sweep/check", _problem(sweep, whole)):
            raise UserError(f"cli.py sweep: {problem}")
        yield
    finally:
        whole.unlock()


def _problem(sweep: Sweep, whole: RunFolder) -> str | None:
    """Lock the folder on the main process; return why the runs cannot be started, if so."""
    mesh, name, remedy = Mesh.from_environment(), "", ""
    try:
        if mesh.is_main:
            whole.lock()
            for grid_run in sweep.runs:  # a sweep that was killed may have left a run that saves
                RunFolder(sweep.folder / grid_run.name).check_unlocked()
        remedy = "; give another --sweep-dir, or --overwrite"
        for grid_run in sweep.runs:
            folder, name = RunFolder(sweep.folder / grid_run.name), f"{grid_run.name}: "
            accumulation_steps(grid_run.config, mesh.dp_size)
            resumes = mesh.is_main and folder.recipe.is_file() and not sweep.overwrite
            if resumes and (changes := folder.changes(grid_run.config)):
                raise RunFolderError(f"{folder.path}: holds a run of another recipe: {'; '.join(changes)}")
    except (UserError, ValueError) as error:
        return f"{name}{error}{remedy if isinstance(error, RunFolderError) else ''}"
    return None


def train_runs(sweep: Sweep) -> tuple[dict[str, str], int]:
    """Train the runs that are not done, in their order; return the status of each by name, and an exit status.

    Each run is the `pretrain` command in a process of its own. So nothing of a run is left for the next: no memory, no
    compiled graphs, none of accelerate's and torch.distributed's process-wide state; and a run that fails ends alone.
    Under a launcher every rank starts its part of each run, and rank 0 chooses a port for them to meet at.
    """
    statuses: dict[str, str] = {}
    with _signals_passed_on() as current:
        for number, grid_run in enumerate(sweep.runs, 1):
            folder = RunFolder(sweep.folder / grid_run.name)
            if _share(f"sweep/done/{number}", not sweep.overwrite and is_done(folder, grid_run.config)):
                statuses[grid_run.name] = DONE
                continue
            logger.info(f"\nrun {number} of {len(sweep.runs)}: {grid_run.name}")
            exit_status = current.run(_command(sweep, grid_run, folder), _environment(number))
            if current.stopped or exit_status in (EXIT_STOPPED, _EXIT_INTERRUPTED):
                statuses[grid_run.name] = "interrupted"
                logger.info(f"{sweep.folder}: interrupted; run the same command again to continue")
                return statuses, _EXIT_INTERRUPTED if exit_status == _EXIT_INTERRUPTED else EXIT_STOPPED
            statuses[grid_run.name] = f"failed ({exit_status})" if exit_status else DONE
            if exit_status:
                logger.error(f"{folder.path}: ended with exit status {exit_status}; the sweep continues")
            if Mesh.from_environment().is_main:
                write_report(sweep, statuses)
    return statuses, 0 if set(statuses.values()) == {DONE} else EXIT_FAILED


def planned_rows(runs: Sequence[GridRun]) -> list[Row]:
    """The runs as they would be: rows of the table."""
    from nanogpt_hf.planning.estimate import estimate  # imports transformers, which takes seconds
    from nanogpt_hf.planning.placement import Placement

    rows = []
    for grid_run in runs:
        sizes, steps = estimate(grid_run.config, Placement(on_cpu=True)), grid_run.config.train.max_steps
        rows.append(Row(grid_run.name, "planned", grid_run.values, sizes.parameters, steps, sizes.tokens, sizes.flops))
    return rows


def write_report(sweep: Sweep, statuses: dict[str, str]) -> str:
    """Write the table and the plot of the runs so far; return them as text."""
    return write_sweep(planned_rows(sweep.runs), statuses, sweep.folder)


def is_done(folder: RunFolder, config: Config) -> bool:
    """Whether the run was trained to its last step and its last model is written."""
    newest = folder.newest_checkpoint()
    written = any((folder.final / name).is_file() for name in ("config.json", "adapter_config.json"))
    return written and newest is not None and step_of(newest) == config.train.max_steps


def _command(sweep: Sweep, grid_run: GridRun, folder: RunFolder) -> list[str]:
    knobs = [word for key, text in grid_run.overrides for word in (f"--{key}", text)]
    start = "--overwrite" if sweep.overwrite else "--auto-resume"
    level = ["--log-level", sweep.log_level] if sweep.log_level else []
    command = [sys.executable, "-P", "-m", "nanogpt_hf", "pretrain", sweep.recipe, *knobs]
    return [*command, "--run-dir", str(folder.path), start, *level]


def _environment(number: int) -> dict[str, str]:
    """The environment of a run's process: this launch's, but its ranks meet at a port of their own."""
    package = str(Path(nanogpt_hf.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}
    if Mesh.from_environment().world_size > 1:  # the launcher's own store still has the keys of the run before
        environment |= {"MASTER_PORT": str(_share(f"sweep/port/{number}", _free_port())), _LAUNCHER_STORE: "False"}
    return environment


def _share(key: str, value: Any) -> Any:
    """The value of rank 0, on every rank."""
    if Mesh.from_environment().world_size == 1:
        return value  # without torch, which takes seconds to import
    from nanogpt_hf.distributed.rendezvous import share_from_main

    return share_from_main(key, value)


def _free_port() -> int:
    """A TCP port of this machine that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _stop_with_parent() -> None:
    """Let the kernel send this process SIGTERM when its parent ends, even if by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _CurrentRun:
    """The process of the run that is training now."""

    def __init__(self) -> None:
        self.stopped = False
        self._process: subprocess.Popen | None = None

    def run(self, command: list[str], environment: dict[str, str]) -> int:
        if self.stopped:  # by a signal between two runs
            return EXIT_STOPPED
        before = _stop_with_parent if sys.platform == "linux" else None
        self._process = subprocess.Popen(command, env=environment, preexec_fn=before)
        if self.stopped:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait()

    def stop(self, number: int, frame: FrameType | None) -> None:
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
