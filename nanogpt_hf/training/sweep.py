"""Train the runs of a sweep, each by its command in a process of its own, so that nothing of one
is left for the next.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import nanogpt_hf
from nanogpt_hf.checkpoint.reader import newest_checkpoint
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.sources import sources_of
from nanogpt_hf.config.stages import naming, stages_of
from nanogpt_hf.data.local_files import local_files
from nanogpt_hf.data.manifest import read_manifest
from nanogpt_hf.data.prepared import check_knobs_of_prepared
from nanogpt_hf.data.source import check_source
from nanogpt_hf.distributed.accelerate_config import check_launch, check_recipe
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.layout import check_layout
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.distributed.signals import StopRequest, stop_on_signals
from nanogpt_hf.errors import EXIT_STOPPED, RunFolderError, UserError
from nanogpt_hf.interrupts import SAID_BY_PARENT, ctrl_c_waits
from nanogpt_hf.methods.resolve import missing_path
from nanogpt_hf.methods.run import is_done
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.place import dead_link
from nanogpt_hf.planning.config_files import NotEstimated, read_launch
from nanogpt_hf.reports.comparison import diverged_at, score_of
from nanogpt_hf.runs.folder import MODEL_FILES, RunFolder
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.runs.recipe import read_recipe, recipe_differences
from nanogpt_hf.tasks.task import is_generated
from nanogpt_hf.training.early_checks import check_before_the_data
from nanogpt_hf.training.sweep_grid import GridRun, Sweep
from nanogpt_hf.training.sweep_results import write_results

logger = logging.getLogger(__name__)
# The time that a run has to end after a second Ctrl-C has interrupted it.
_SECONDS_TO_END = 10.0


def check_runs(sweep: Sweep) -> None:
    """Raises UserError, with the run's name, if one of the runs could not be launched, and
    RunFolderError if the folder of the sweep holds a run.
    """
    whole = RunFolder(sweep.folder)
    if whole.path.exists() and not whole.path.is_dir():
        raise RunFolderError(f"{whole.path}: is a file; give another --sweep-dir")
    if problem := dead_link(whole.path):
        raise RunFolderError(f"{problem}, or give another --sweep-dir")
    if whole.recipe.exists() or whole.checkpoints.exists():
        raise RunFolderError(f"{whole.path}: holds a run itself; give another --sweep-dir")
    for parent in Path(os.path.realpath(whole.path)).parents:
        # A run that is trained again removes what is in its folders.
        if RunFolder(parent).recipe.is_file():
            raise RunFolderError(
                f"{whole.path}: is inside the run {parent}; give another --sweep-dir"
            )
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
            if missing := missing_path(run.config):
                raise UserError(f"{missing}: no such file or folder")
            _check_sources(run.config)
        except UserError as error:
            reason = _of_sweep(error)
            raise UserError(f"{run.name}: {reason}; no run was started") from None


def _check_sources(config: Config) -> None:
    """Raises UserError if the files are missing from which a run makes its data, or its folder has
    data of other knobs.
    """
    if is_generated(config.rl.task or ""):
        return
    for source in sources_of(config.data):
        prepared = Path(source.data.dir).resolve()
        if not method_of(config).uses_prepared_data:
            local_files(source.data)
        elif read_manifest(prepared) is None:
            check_source(source.data, prepared)
    if method_of(config).uses_prepared_data:
        check_knobs_of_prepared(config.data)


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
            if not sweep.overwrite and _is_done(run, folder):
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


def _is_done(run: GridRun, folder: RunFolder) -> bool:
    """Whether a run has ended by itself. One that has diverged has not: it is started again, so
    that it says so again.
    """
    # The last checkpoint is written before final/, and final/ at the end: both are there.
    has_model = any((folder.final / name).is_file() for name in MODEL_FILES)
    # A run whose steps are not known, since its data is gone, finds them when it starts.
    if not has_model or run.config.train.steps_from:
        return False
    if diverged_at(read_metrics(folder), score_of(run.config)) is not None:
        return False
    try:
        # By eval.patience it may have ended before its last step.
        return is_done(run.config, newest_checkpoint(folder).state)
    except RunFolderError:
        return False


def _command(sweep: Sweep, run: GridRun) -> list[str]:
    knobs = dict(run.overrides) | {"run-dir": str(sweep.folder / run.name)}
    # The commit of today: the Hub may have another one when the last run starts.
    if revision := run.config.finetune.revision:
        knobs["finetune.revision"] = revision
    words = [word for key, text in knobs.items() for word in (f"--{key}", text)]
    words += ["--log-level", sweep.log_level] if sweep.log_level else []
    words.append("--overwrite" if sweep.overwrite else "--auto-resume")
    # -P: a file in the current folder must not hide a module.
    python = [sys.executable, "-P", "-m", "nanogpt_hf"]
    launcher = ["launch", "--config_file", sweep.machine] if sweep.machine else []
    recipe = [sweep.recipe] if sweep.recipe else []
    return [*python, *launcher, run.command, *recipe, *words]


def run_process(command: list[str], stop: StopRequest) -> int:
    """Run a process and return its exit status; it ends early, after saving, if `stop` says so."""
    # A signal may have come between two runs.
    if stop.reason:
        return EXIT_STOPPED
    # The package as it is imported here, also from a checkout that is not installed.
    paths = [str(Path(nanogpt_hf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment[SAID_BY_PARENT] = "1"
    # With `--json -` stdout is for the sweep's own output, and the runs print to stderr.
    stdout = 2 if sys.stdout is sys.stderr else None
    with ctrl_c_waits():
        process = subprocess.Popen(command, env=environment, stdout=stdout)
    try:
        while process.poll() is None and not stop.reason:
            time.sleep(0.1)
        # Ctrl-C has reached the process already. It gets SIGTERM, since a second SIGINT would end
        # it at once, without a checkpoint.
        if stop.reason:
            process.terminate()
        return process.wait()
    except KeyboardInterrupt:
        # A second Ctrl-C, which has reached the process, too. Its folder stays locked to its end.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SECONDS_TO_END)
        raise
