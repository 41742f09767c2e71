"""Decide whether a run resumes, and check what a resume needs."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanogpt_hf.checkpoint.reader import (
    Checkpoint,
    check_identity,
    newest_checkpoint,
    newest_identity,
)
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.stages import config_at, with_known_steps
from nanogpt_hf.data.manifest import find_manifest
from nanogpt_hf.data.prepared import check_prepared_sources
from nanogpt_hf.errors import ChangedError, DataError, UserError
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.optim.optimizer import learning_rate_at
from nanogpt_hf.runs.folder import RunFolder, run_folder
from nanogpt_hf.runs.origin import origin_of
from nanogpt_hf.runs.provenance import last_start
from nanogpt_hf.runs.recipe import changed_knobs, known_recipe
from nanogpt_hf.runs.state import knobs_at, run_identity
from nanogpt_hf.training.early_checks import check_folders

logger = logging.getLogger(__name__)


def decide(config: Config, folder: RunFolder, options: dict[str, bool]) -> dict[str, Any]:
    """Decide whether the run resumes, with the steps that it has recorded. Raises RunFolderError if
    it may not write to the folder, or if its recipe is another experiment.
    """
    if not folder.check(**options):
        return {"resumes": False}
    changed_knobs(folder, config)
    steps = {"max_steps": _recorded_steps(folder)} if config.train.budget else {}
    return {"resumes": True} | steps


@contextmanager
def remedies_of_run(folder: RunFolder, config: Config) -> Iterator[None]:
    """Context in which ChangedError becomes a DataError with the remedy for the run in `folder`, if
    the prepared data of `config` is what the run has learned.
    """
    try:
        yield
    except ChangedError as error:
        if _has_learned(folder, config):
            raise DataError(error.of_a_run) from None
        raise


def _has_learned(folder: RunFolder, config: Config) -> bool:
    """Return whether the prepared data may be the data of the run's newest checkpoint."""
    learned = newest_identity(folder).get("data")
    if learned is None:
        return False
    # Data of another method is in memory: there is no folder that may hold other data.
    if not method_of(config).uses_prepared_data:
        return True
    manifest = find_manifest(config.data)
    # Without one source the checkpoint does not tell which data a mixture had. Only the remedies of
    # a run never lose what it has learned.
    return manifest is None or manifest.content().items() <= learned.items()


def check_learned_data(folder: RunFolder, config: Config) -> None:
    """Raises DataError if the prepared data is known not to be what the run has learned: by its
    newest checkpoint, or by its last start if none was saved.
    """
    manifest = find_manifest(config.data)
    learned = newest_identity(folder).get("data") or last_start(folder).get("data")
    if manifest is None or learned is None:
        return
    for name, value in manifest.content().items():
        # A stage changes the weights of a mixture.
        known = learned.get(name, value)
        if name != "weights" and known != value:
            raise DataError(
                f"{config.data.dir}: holds other data than {folder.path} has learned: {name} "
                f"{value!s:.80}, not {known!s:.80}; put that data back"
            )


def _recorded_steps(folder: RunFolder) -> int:
    """Return train.max_steps of a run that is resumed: its recipe has it, and if that is lost, its
    newest checkpoint.
    """
    if recipe := known_recipe(folder):
        return recipe.train.max_steps
    state = newest_checkpoint(folder).state
    return knobs_at(state.history, state.step)["train.max_steps"]


def with_recorded_steps(config: Config, steps: int | None) -> Config:
    """The recipe of a resumed run, which is not timed again: train.budget holds for its start
    only.
    """
    if config.train.budget is None:
        return config
    logger.info(
        f"train.budget {config.train.budget}: times a run when it begins; this one keeps its "
        f"train.max_steps {steps}, which --train.max_steps changes"
    )
    assert steps is not None, "a run that was timed has recorded its steps"
    return with_known_steps(config, steps)


def change_lines(folder: RunFolder, config: Config, step: int) -> list[str]:
    """The knobs that a resume at `step` changes, in lines, and what follows from them for its next
    step.
    """
    changes = changed_knobs(folder, config)
    lines = [f"changed since the run began: {change}" for change in changes]
    before = known_recipe(folder) if changes else None
    if before is None:
        return lines
    # Without the data, the steps of train.epochs are not counted yet.
    if config.train.steps_from is None:
        was = _learning_rate(before, step)
        now = _learning_rate(config, step)
        # A longer schedule decays later, so the rate may rise.
        if abs(now - was) > 0.05 * was:
            rates = f"{now:.3g} instead of {was:.3g}"
            lines.append(f"  so the learning rate of the next step is {rates}")
    # `auto` keeps the size of the run.
    if config.train.micro_batch_size not in ("auto", before.train.micro_batch_size):
        lora = before.lora
        extra = (value for name, value in before.model.extra.items() if "drop" in name)
        if before.model.dropout or any(extra) or (lora.rank is not None and lora.dropout):
            lines.append("  so dropout draws other masks: they follow from the micro-batches")
    return lines


def _learning_rate(config: Config, step: int) -> float:
    config = config_at(config, step)
    return learning_rate_at(step, config.optim, config.train.max_steps)


def check_end(config: Config, folder: RunFolder, checkpoint: Checkpoint) -> None:
    if checkpoint.state.step > config.train.max_steps:
        raise UserError(
            f"{folder.path}: its step {checkpoint.state.step:,} is past train.max_steps "
            f"{config.train.max_steps:,}; set --train.max_steps, or --train.epochs, above it"
        )


def check_resume(
    config: Config,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
    auto_resume: bool = False,
) -> list[str]:
    """Describe in lines what a resume would do. Raises what `prepare_run` raises for the run
    folder, the knobs that changed, the data, what the run starts from and its checkpoints; writes
    nothing.
    """
    folder = run_folder(config.name, run_dir)
    check_folders(config, folder)
    folder.check_unlocked()
    # The checks of a resume, in its order, without a lock: nothing is written.
    options = {"resume": resume, "overwrite": False, "auto_resume": auto_resume}
    decision = decide(config, folder, options)
    if not decision["resumes"]:
        return [f"{folder.path}: starts at step 0"]
    config = with_recorded_steps(config, decision.get("max_steps"))
    checkpoint = newest_checkpoint(folder)
    lines = change_lines(folder, config, checkpoint.state.step)
    method = method_of(config)
    # Without the data, the steps of train.epochs are not counted yet.
    if config.train.epochs is None:
        check_end(config, folder, checkpoint)
    if method.uses_prepared_data and find_manifest(config.data) is None:
        with remedies_of_run(folder, config):
            check_prepared_sources(config.data)
        lines.append(f"not compared with the run: {config.data.dir} is not prepared yet")
    else:
        with remedies_of_run(folder, config):
            data = method.load(config)
        origin = origin_of(config, resumes=True)
        check_identity(folder, checkpoint.state, run_identity(config, data.manifest, origin))
        if problem := method.resume_problem(config, folder, data, checkpoint.state):
            raise UserError(problem)
    return [*lines, f"resumes from {checkpoint.folder}"]
