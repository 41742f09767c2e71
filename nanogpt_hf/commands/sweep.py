"""Train a grid of runs: a knob with several values, such as --optim.learning_rate 1e-3,3e-3, is swept.

Every combination of values is an ordinary run folder below the sweep's. Run the same command again to continue: what is
done is skipped, what was interrupted resumes, what failed is tried again. A failed run does not stop the others. At
the end there are a table (sweep.csv, sweep.json) and a plot (sweep.png), with --depth 2,3,4 also a fitted scaling law.

Values with commas, and lists, are quoted as in YAML: --eval.samples '["Once, ", "The "], []'.
"""

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import nanogpt_hf
from nanogpt_hf.commands.arguments import list_knobs
from nanogpt_hf.commands.console import show
from nanogpt_hf.commands.training_run import add_depth, depth_override
from nanogpt_hf.config.checks import accumulation_steps
from nanogpt_hf.config.grid import GridRun, build_grid, sweep_name
from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import EXIT_STOPPED, RunFolderError, UserError
from nanogpt_hf.formatting import plural

if TYPE_CHECKING:
    from nanogpt_hf.reports.sweep import Row
    from nanogpt_hf.runs.folder import RunFolder

logger = logging.getLogger(__name__)

DONE = "done"
EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130
_LAUNCHER_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torch: whether the launcher serves the store at MASTER_PORT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe, for example recipes/quickstart.yaml")
    add_depth(parser)
    parser.add_argument("--sweep-dir", metavar="DIR", help="folder of the runs (default runs/<recipe name>-<knobs>)")
    parser.add_argument(
        "--overwrite", action="store_true", help="remove the runs that are in the folder, and start again"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs with their sizes, and stop")
    list_knobs(parser)


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    runs = build_grid(arguments.recipe, depth_override(arguments) + overrides)
    for grid_run in runs:
        if start := grid_run.config.finetune.model:
            raise UserError(f"{arguments.recipe}: starts from {start}; the runs of a sweep are trained from scratch")
        if grid_run.config.hub.push:
            raise UserError("hub.push: the runs of a sweep would push to one repository; set it to null")
    sweep_dir = Path(arguments.sweep_dir or Path("runs") / sweep_name(runs))
    if arguments.dry_run:
        from nanogpt_hf.reports.sweep import sweep_table

        show(
            f"{plural(len(runs), 'run')} below {sweep_dir}\n\n{sweep_table(planned_rows(runs))}\n\nnothing was started"
        )
        return 0
    check_runs(runs, sweep_dir, overwrite=arguments.overwrite)
    statuses, exit_status = train_runs(arguments, runs, sweep_dir)
    if Mesh.from_environment().is_main:
        show(write_report(runs, sweep_dir, statuses))
    return exit_status


def check_runs(runs: Sequence[GridRun], sweep_dir: Path, *, overwrite: bool) -> None:
    """Raises UserError, on every process, if a run cannot be started or its folder holds another experiment."""
    from nanogpt_hf.runs.folder import RunFolder

    mesh, problem = Mesh.from_environment(), None
    for grid_run in runs:
        folder = RunFolder(sweep_dir / grid_run.name)
        try:
            accumulation_steps(grid_run.config, mesh.dp_size)
            if (
                mesh.is_main
                and folder.recipe.is_file()
                and not overwrite
                and (changes := folder.changes(grid_run.config))
            ):
                raise RunFolderError(f"{folder.path}: holds a run of another recipe: {'; '.join(changes)}")
        except (UserError, ValueError) as error:
            remedy = "; give another --sweep-dir, or --overwrite" if isinstance(error, RunFolderError) else ""
            problem = f"{grid_run.name}: {error}{remedy}"
            break
    if problem := _share("sweep/check", problem):
        raise UserError(f"cli.py sweep: {problem}")


def train_runs(arguments: argparse.Namespace, runs: Sequence[GridRun], sweep_dir: Path) -> tuple[dict[str, str], int]:
    """Train the runs that are not done, in their order; return what became of each, and an exit status.

    Each run is the `pretrain` command in a process of its own. So nothing of a run is left for the next: no memory, no
    compiled graphs, none of accelerate's and torch.distributed's process-wide state; and a run that fails ends alone.
    Under a launcher every rank starts its part of each run, and rank 0 chooses a port for them to meet at.
    """
    from nanogpt_hf.runs.folder import RunFolder

    statuses: dict[str, str] = {}
    with _signals_passed_on() as current:
        for number, grid_run in enumerate(runs, 1):
            folder = RunFolder(sweep_dir / grid_run.name)
            if _share(f"sweep/done/{number}", not arguments.overwrite and is_done(folder, grid_run.config)):
                statuses[grid_run.name] = DONE
                continue
            logger.info(f"\nrun {number} of {len(runs)}: {grid_run.name}")
            exit_status = current.run(_command(arguments, grid_run, folder), _environment(number))
            if current.stopped or exit_status in (EXIT_STOPPED, _EXIT_INTERRUPTED):
                statuses[grid_run.name] = "interrupted"
                logger.info(f"{sweep_dir}: interrupted; run the same command again to continue")
                return statuses, _EXIT_INTERRUPTED if exit_status == _EXIT_INTERRUPTED else EXIT_STOPPED
            statuses[grid_run.name] = f"failed ({exit_status})" if exit_status else DONE
            if exit_status:
                logger.error(f"{folder.path}: ended with exit status {exit_status}; the sweep continues")
            if Mesh.from_environment().is_main:
                write_report(runs, sweep_dir, statuses)
    return statuses, 0 if set(statuses.values()) == {DONE} else EXIT_FAILED


def planned_rows(runs: Sequence[GridRun]) -> "list[Row]":
    """The runs as they would be: rows of the table."""
    from nanogpt_hf.planning.estimate import estimate
    from nanogpt_hf.planning.placement import Placement
    from nanogpt_hf.reports.sweep import Row

    rows = []
    for grid_run in runs:
        sizes, steps = estimate(grid_run.config, Placement(on_cpu=True)), grid_run.config.train.max_steps
        rows.append(Row(grid_run.name, "planned", grid_run.values, sizes.parameters, steps, sizes.tokens, sizes.flops))
    return rows


def write_report(runs: Sequence[GridRun], sweep_dir: Path, statuses: dict[str, str]) -> str:
    """Write the table and the plot of the runs so far; return them as text."""
    from nanogpt_hf.reports.sweep import write_sweep

    return write_sweep(planned_rows(runs), statuses, sweep_dir)


def is_done(folder: "RunFolder", config: Config) -> bool:
    """Whether the run was trained to its last step and its last model is written."""
    from nanogpt_hf.runs.folder import step_of

    newest = folder.newest_checkpoint()
    written = any((folder.final / name).is_file() for name in ("config.json", "adapter_config.json"))
    return written and newest is not None and step_of(newest) == config.train.max_steps


def _command(arguments: argparse.Namespace, grid_run: GridRun, folder: "RunFolder") -> list[str]:
    knobs = [word for key, text in grid_run.overrides for word in (f"--{key}", text)]
    start = "--overwrite" if arguments.overwrite else "--auto-resume"
    level = ["--log-level", arguments.log_level] if arguments.log_level else []
    command = [sys.executable, "-P", "-m", "nanogpt_hf", "pretrain", arguments.recipe, *knobs]
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


class _CurrentRun:
    """The process of the run that is training now."""

    def __init__(self) -> None:
        self.stopped = False
        self._process: subprocess.Popen | None = None

    def run(self, command: list[str], environment: dict[str, str]) -> int:
        self._process = subprocess.Popen(command, env=environment)
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
