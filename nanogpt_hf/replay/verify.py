"""Repeat steps of a run from its checkpoints, and compare with what it recorded: metrics of each
logged step, and the tensors of each kept checkpoint.
"""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanogpt_hf.checkpoint.reader import (
    DamagedError,
    check_recorded_start,
    identity_of,
    read_checkpoint,
)
from nanogpt_hf.checkpoint.writer import CheckpointWriter
from nanogpt_hf.config.schema import KNOBS, Config, replace_knobs
from nanogpt_hf.config.stages import config_at
from nanogpt_hf.config.step_size import accumulation_steps
from nanogpt_hf.distributed.accelerate_config import keep_compiler
from nanogpt_hf.distributed.accelerator import precision_of, sum_over_ranks
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process, prepare_on_all_ranks
from nanogpt_hf.errors import RunFolderError, Stopped, UserError
from nanogpt_hf.formatting import shows_bars
from nanogpt_hf.methods.run import Run
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.place import Interrupted, raise_on_signals
from nanogpt_hf.replay.difference import tensor_differences, value_differences
from nanogpt_hf.replay.repeatable import start_at
from nanogpt_hf.runs.folder import RunFolder, step_of
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.runs.provenance import continue_on, read_starts
from nanogpt_hf.runs.recipe import read_recipe
from nanogpt_hf.runs.state import KnobChange, TrainState, knobs_at
from nanogpt_hf.training.build import start_again
from nanogpt_hf.training.loop import Action, next_action, record_evaluation
from nanogpt_hf.training.resume import check_learned_data, remedies_of_run
from nanogpt_hf.training.start import prepare_run
from nanogpt_hf.training.step import next_step


def recipe_of(folder: RunFolder, step: int = 0) -> Config:
    """Read the recipe of a run on text, with the knobs that held when `step` was taken, by default
    the knobs of its last start. Raises UserError for other runs.

    Trackers and pushes are left out: a repeated step must not reach them. A checkpoint has the
    knobs of the steps before it; the recipe has the knobs of the steps after the newest one.
    """
    config = read_recipe(folder)
    if not method_of(config).uses_prepared_data:
        raise UserError(
            f"{folder.path}: trained by {method_of(config).name}; only steps on text or "
            "conversations can be repeated"
        )
    check_recorded_start(folder, config)
    config = replace_knobs(config, {"tracking.trackers": [], "hub.push": None})
    # The first checkpoint at or after the step knows with which knobs it was taken. Another one
    # does as well if that one is damaged.
    for path in folder.checkpoint_folders() if step else ():
        if step_of(path) >= step:
            with suppress(DamagedError):
                history = read_checkpoint(path).state.history
                return replace_knobs(config, knobs_at(history, step - 1))
    return config


@contextmanager
def run_at(folder: RunFolder, config: Config, first: int, mesh: Mesh) -> Iterator[Run]:
    """Context with the run at step `first`, 0 or a step with a checkpoint, in a temporary folder of
    the main process: the run's own folder is only read.
    """
    start = start_at(read_starts(folder), first)
    mesh = keep_compiler(mesh, start)
    made = tempfile.TemporaryDirectory() if mesh.is_main else nullcontext("")
    with _stopped_by_signals(), one_line_for_a_lost_process(), made as temporary:

        def check() -> tuple[None, dict[str, Any]]:
            if not first:
                # A resume compares the data with its checkpoint's.
                check_learned_data(folder, config)
            # The other processes learn the name of the folder from the main one.
            return None, {"folder": temporary} if mesh.is_main else {}

        _, place = prepare_on_all_ranks(mesh, check)
        copy = RunFolder(Path(place["folder"]) / "run")
        if mesh.is_main:
            copy.path.mkdir()
            # Written here, so that the message of a full disk names this folder and not the run's.
            (copy.path / ".lock").touch()
        if first:
            # Raises an error if the checkpoint is damaged. A resume would search for an older one.
            identity_of(read_checkpoint(folder.checkpoint(first)))
        if first and mesh.is_main:
            copy.checkpoints.mkdir(parents=True)
            copy.recipe.write_bytes(folder.recipe.read_bytes())
            copy.checkpoint(first).symlink_to(folder.checkpoint(first).resolve())
            # A resume forgets the best loss, and evaluates again, if best/ was removed.
            copy.best.mkdir()
        try:
            with _without_lines(), remedies_of_run(folder, config):
                run = prepare_run(config, copy.path, resume=first > 0, mesh=mesh)
        except RunFolderError as error:
            raise RunFolderError(str(error).replace(str(copy.path), str(folder.path))) from None
        try:
            accelerator = run.accelerator
            processes = mesh.local_world_size
            continue_on(
                start, accelerator.device, processes, precision_of(accelerator), run.mesh.compiler
            )
            yield run
            # The main process removes the folder, which others may still read.
            accelerator.wait_for_everyone()
        finally:
            copy.unlock()


@contextmanager
def _without_lines() -> Iterator[None]:
    """Context without log lines about the temporary folder."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _start_again(run: Run) -> None:
    """Start the run again from a checkpoint in its temporary folder, as training does."""
    for folder in (run.folder.checkpoints, run.folder.best):
        folder.mkdir(exist_ok=True)
    try:
        with CheckpointWriter(run.accelerator, run.folder, keep=2) as checkpoints:
            checkpoints.save(run.model, run.optimizer, run.state)
    except RunFolderError as error:
        # What to do for a run that trains follows there.
        remedy = "correct that, or set TMPDIR to another folder"
        raise RunFolderError(error.fault, remedy) from None
    run.saved = replace(run.state)
    with _without_lines():
        start_again(run)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Context in which a signal ends the command like a run that is stopped, by exit status 75."""
    try:
        with raise_on_signals():
            yield
    except Interrupted as signal:
        raise Stopped(f"stopped by {signal}") from None


def first_difference(
    run: Run, folder: RunFolder, last: int, bound: float
) -> tuple[int, list[str]] | None:
    """Repeat the steps up to `last`; return the first that differs from what the folder has
    recorded by more than `bound`, and what differs. All processes call it, and get the same.
    """
    first = run.state.step
    built_at = first
    recorded = _metrics_by_step(folder)
    end = read_checkpoint(folder.checkpoint(last)).state
    # Resumes with other knobs. The ones at the first step hold already.
    resumes = [entry for entry in end.history if entry["step"] > first]
    # Whether the run was stopped there before its evaluation, and has saved without it.
    stopped_at_end = end.evaluated_step < last and "val/loss" not in recorded.get(last, {})
    # What differs at the current step: metrics, and tensors of its checkpoint.
    lines: list[str] = []
    tensors: list[str] = []
    hides_bar = not (run.mesh.is_main and shows_bars())
    with tqdm(total=last - first, unit="step", disable=hides_bar) as bar:
        while True:
            step = run.state.step
            resumed = [entry for entry in resumes if _is_next(entry, run.state)]
            stopping = bool(resumed) or (step == last and stopped_at_end)
            match next_action(
                run.config, run.state, run.saved, built_at=built_at, stopping=stopping
            ):
                case Action.EVALUATE:
                    metrics = _evaluate(run)
                    lines += value_differences(metrics, recorded.get(step, {}), bound)
                case Action.SAVE:
                    # Its tensors are compared already. It is written if the run starts again.
                    run.saved = replace(run.state)
                case Action.START_AGAIN:
                    _start_again(run)
                    built_at = step
                case Action.STOP if resumed:
                    resumes = [entry for entry in resumes if entry not in resumed]
                    _change_knobs(run, resumed)
                    built_at = step
                    # The checkpoint may have been saved again since, with optimizer state of
                    # another precision.
                    tensors = tensors and _compare_tensors(run, folder, bound)
                # Also where the run had ended before it was continued.
                case Action.STEP | Action.STOP | Action.FINISH:
                    if lines or tensors:
                        return step, lines + tensors
                    if step == last:
                        return None
                    metrics = _repeat_step(run)
                    lines = value_differences(metrics, recorded.get(step + 1, {}), bound)
                    tensors = _compare_tensors(run, folder, bound)
                    bar.update()


def _metrics_by_step(folder: RunFolder) -> dict[int, dict[str, Any]]:
    """The recorded metrics of each step. After a rollback the last ones count."""
    recorded: dict[int, dict[str, Any]] = {}
    for event in read_metrics(folder):
        recorded.setdefault(event["step"], {}).update(event)
    return recorded


def _is_next(entry: KnobChange, state: TrainState) -> bool:
    """Whether the run resumed with other knobs here: at this step, and before or after its
    evaluation, as the state is.
    """
    is_evaluated = state.evaluated_step >= state.step
    return entry["step"] == state.step and (entry["evaluated_step"] >= state.step) == is_evaluated


def _compare_tensors(run: Run, folder: RunFolder, bound: float) -> list[str]:
    """Compare with the checkpoint of this step, if it is kept; return differences as lines."""
    path = folder.checkpoint(run.state.step)
    if not path.is_dir():
        return []
    saved = read_checkpoint(path)
    # A rollback to this checkpoint has skipped data since, and saved it again.
    run.state.skipped_steps = saved.state.skipped_steps
    return tensor_differences(run, saved, bound)


def _evaluate(run: Run) -> dict[str, float]:
    """Evaluate; return the metrics that the run has logged for it."""
    evaluated = method_of(run.config).evaluate(run, lambda: False)
    if evaluated is None:
        return {}
    record_evaluation(run, evaluated)
    return evaluated.metrics


def _repeat_step(run: Run) -> dict[str, float]:
    """Take the next step; return the metrics that the run has logged for it."""
    result, learning_rate = next_step(run)
    if run.state.step % run.config.tracking.every:
        return {}
    return {
        "train/loss": sum_over_ranks(run.accelerator, result.loss).item(),
        "train/grad_norm": result.grad_norm.item(),
        "train/learning_rate": learning_rate,
    }


def _change_knobs(run: Run, resumed: list[KnobChange]) -> None:
    """Continue with other knobs, as a resumed run does."""
    knobs = {key: value for entry in resumed for key, value in entry["knobs"].items()}
    # A knob of another version may be unknown to this one.
    known = {key: value for key, value in knobs.items() if key in KNOBS}
    run.config = config_at(replace_knobs(run.config.recipe, known), run.state.step)
    accumulated = accumulation_steps(run.config, run.mesh.dp_size)
    run.accelerator.gradient_accumulation_steps = accumulated
    _start_again(run)
