"""Checkpoints: everything that going on needs, whole or absent, for any number of processes to go on from."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nanogpt_hf.config.schema import EvalSection
from nanogpt_hf.distributed.full_state import (
    full_moments,
    full_weights,
    named_parameters,
    scaler_state,
    set_moments,
    set_scaler_state,
    set_weights,
    whole_shape,
)
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.identity import differences
from nanogpt_hf.training.evaluate import Evaluation

logger = logging.getLogger(__name__)
_MODEL, _OPTIMIZER, _STATE, _CHECKSUMS = "model.safetensors", "optimizer.safetensors", "state.json", "checksums.json"


@dataclass
class TrainState:
    """Where a run stands; with the recipe and the weights, all that going on needs."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # training tokens seen
    seconds: float = 0.0  # spent training and evaluating, over all resumes
    evaluation: Evaluation | None = None  # the last one
    evaluated_step: int = -1
    skipped_steps: int = 0  # whose data was left out after loss spikes: step s sees the data of s + skipped_steps
    loss_average: float | None = None  # running, of the reported training losses
    best_loss: float | None = None  # validation loss of best/
    best_step: int | None = None
    identity: dict[str, Any] | None = None  # of the run (runs/identity.py); older versions recorded none

    def out_of_patience(self, eval_section: EvalSection) -> bool:
        """Whether the evaluations since the best one, that of this step included, are as many as may pass."""
        if eval_section.patience is None or self.best_step is None or self.evaluated_step < self.step:
            return False
        return self.step - self.best_step >= eval_section.patience * eval_section.every


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_checkpoint(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    run: RunFolder,
    keep: int,
) -> None:
    """Write a checkpoint aside, flush it, and move it into place; then drop all but the `keep` newest.

    Raises RunFolderError where it cannot be written; the checkpoints before it stay as they are.
    """
    weights = full_weights(accelerator, model)
    moments = full_moments(accelerator, model, optimizer)
    if accelerator.is_main_process and state.step > 0 and not moments:
        raise RuntimeError("there is no optimizer state to save")
    if accelerator.is_main_process:
        facts = dataclasses.asdict(state) | {"scaler": scaler_state(accelerator, optimizer)}
        target = run.checkpoint(state.step)
        partial = target.with_name(f".{target.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            save_file(weights, partial / _MODEL)
            save_file(moments, partial / _OPTIMIZER)
            (partial / _STATE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            checksums = {path.name: _file_digest(path) for path in sorted(partial.iterdir())}
            (partial / _CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n", encoding="utf-8")
            for path in (*partial.iterdir(), partial):
                _flush(path)
            shutil.rmtree(target, ignore_errors=True)  # of the same step, from before a resume
            partial.rename(target)
            _flush(run.checkpoints)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise RunFolderError(
                f"{target}: the checkpoint cannot be written, older ones are intact: {error}"
            ) from None
        logger.debug(f"step {state.step:,}: saved {target}")
        for old in run.checkpoint_folders()[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def read_checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Weights, optimizer state and facts of a checkpoint. Raises RunFolderError where a byte has changed."""
    try:
        checksums = json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8"))
        for name in (_MODEL, _OPTIMIZER, _STATE):
            if _file_digest(folder / name) != checksums[name]:
                raise ValueError(f"{name} is not as it was written")
        facts = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        return load_file(folder / _MODEL), load_file(folder / _OPTIMIZER), facts
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{folder}: damaged checkpoint: {error}") from None


def _newest_whole(run: RunFolder, log: Callable[[int, str], None]) -> tuple[dict, dict, dict]:
    for folder in reversed(run.checkpoint_folders()):
        try:
            read = read_checkpoint(folder)
        except RunFolderError as error:
            log(logging.WARNING, f"{error}; trying the one before")
            continue
        log(logging.INFO, f"resuming from {folder}")
        return read
    raise RunFolderError(f"{run.checkpoints}: no checkpoint is whole; start anew with --overwrite")


def newest_step(accelerator: Accelerator, run: RunFolder) -> int:
    """The step of the newest whole checkpoint, 0 where none is; the same on all processes."""
    step = [0]
    if accelerator.is_main_process:
        with contextlib.suppress(RunFolderError):
            step = [_newest_whole(run, lambda level, line: None)[2]["step"]]
    return broadcast_object_list(step, from_process=0)[0]


def load_checkpoint(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: RunFolder,
    identity: dict[str, Any] | None = None,
) -> TrainState:
    """Put the newest whole checkpoint into a prepared model and optimizer, and return where it stood.

    The main process reads and the others get theirs from it, so a shared file system is not needed. Raises
    RunFolderError on all of them where no checkpoint is whole, or it is of another model or of another run than
    `identity`. A checkpoint that records no run (older versions) is taken for this one's.
    """
    weights, moments, message = {}, {}, [None]
    parameters = named_parameters(accelerator, model)
    if accelerator.is_main_process:
        try:
            weights, moments, facts = _newest_whole(run, logger.log)
            if identity and facts.get("identity") and (differ := differences(facts["identity"], identity)):
                raise RunFolderError(
                    f"{run.checkpoints}: the newest checkpoint is of another run or other data: {'; '.join(differ)}; "
                    "give it what it was trained with, or start anew with --overwrite"
                )
            shapes = {name: weight.shape for name, weight in weights.items()}
            if shapes != {name: whole_shape(parameter) for name, parameter in parameters.items()}:
                raise RunFolderError(f"{run.checkpoints}: is of another model; was the recipe's model changed?")
            layout = {name: (moment.shape, moment.dtype) for name, moment in moments.items()}
            message = [(facts | {"has_best": run.best.is_dir()}, layout)]
        except RunFolderError as error:
            message = [error]
    broadcast_object_list(message, from_process=0)
    if isinstance(message[0], RunFolderError):
        raise message[0]
    facts, layout = message[0]

    set_weights(accelerator, model, weights)
    set_moments(accelerator, model, optimizer, moments, layout)
    scaler = facts.pop("scaler", None)
    if scaler is not None:
        set_scaler_state(accelerator, optimizer, scaler)
    evaluation = facts.pop("evaluation")
    if (
        not facts.pop("has_best") and facts["best_step"] is not None
    ):  # somebody removed it: the next evaluation makes a new one
        facts |= {"best_loss": None, "best_step": None, "evaluated_step": -1}
    facts["identity"] = identity or facts.get("identity")
    return TrainState(**facts, evaluation=evaluation and Evaluation(**evaluation))
