"""Atomic checkpoints with the full training state, resumable on any number of processes."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nanogpt_hf.distributed.full_state import (
    first_mismatch,
    full_optimizer_state,
    full_weights,
    scaler_state,
    set_optimizer_state,
    set_scaler_state,
    set_weights,
)
from nanogpt_hf.errors import DivergedError, RunFolderError
from nanogpt_hf.runs.folder import RunFolder, step_of
from nanogpt_hf.runs.identity import differences
from nanogpt_hf.runs.replace import remove_folder, replaced_folder
from nanogpt_hf.runs.state import Evaluation, TrainState

logger = logging.getLogger(__name__)
_MODEL, _OPTIMIZER, _STATE, _CHECKSUMS = "model.safetensors", "optimizer.safetensors", "state.json", "checksums.json"


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _not_finite(*groups: dict[str, torch.Tensor]) -> str | None:
    """The name of the first tensor with an infinite or NaN value."""
    for name, tensor in (item for group in groups for item in group.items()):
        if tensor.is_floating_point() and tensor.element_size() > 1 and not tensor.isfinite().all():
            return name
    return None


def save_checkpoint(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    state: TrainState,
    run: RunFolder,
    keep: int,
) -> None:
    """Write a checkpoint atomically, then remove all but the `keep` newest.

    Raises RunFolderError if it cannot be written, and DivergedError if a weight or a value of the optimizer state is
    not finite; older checkpoints are not changed.
    """
    weights = full_weights(accelerator, model)
    optimizer_state = full_optimizer_state(accelerator, model, optimizer)
    if accelerator.is_main_process and state.step > 0 and not optimizer_state:
        raise RuntimeError("there is no optimizer state to save")
    if accelerator.is_main_process:
        if name := _not_finite(weights, optimizer_state):
            raise DivergedError(
                f"step {state.step:,}: {name} is not finite, so no checkpoint was written; lower optim.learning_rate "
                f"and {recovery_advice(run, state)}"
            )
        facts = dataclasses.asdict(state) | {"scaler": scaler_state(accelerator, optimizer)}
        target = run.checkpoint(state.step)
        try:
            with replaced_folder(target) as partial:
                save_file(weights, partial / _MODEL)
                save_file(optimizer_state, partial / _OPTIMIZER)
                (partial / _STATE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
                checksums = {path.name: file_digest(path) for path in sorted(partial.iterdir())}
                (partial / _CHECKSUMS).write_text(json.dumps(checksums, indent=2) + "\n", encoding="utf-8")
            logger.debug(f"step {state.step:,}: saved {target}")
            run.checkpoint_written(state.step, state.last_finite_step, keep)
        except (OSError, SafetensorError) as error:
            raise RunFolderError(
                f"{target}: the checkpoint cannot be written, older ones are intact: {error}"
            ) from None
    accelerator.wait_for_everyone()


def recovery_advice(run: RunFolder, state: TrainState) -> str:
    """What to do after the weights of `state` diverged, as a phrase; only the main process calls it.

    All gradients since `last_finite_step` were not finite, so weights have not changed since then. If an older
    checkpoint is intact, the later ones are removed: --resume loads the newest.
    """
    folders = run.checkpoint_folders()
    for folder in reversed([folder for folder in folders if step_of(folder) < state.last_finite_step]):
        with contextlib.suppress(RunFolderError):
            read_checkpoint(folder)
            diverged = [later for later in folders if step_of(later) >= state.last_finite_step]
            for later in diverged:
                remove_folder(later)
            removed = ", ".join(later.name for later in diverged)
            return f"continue with --resume from {folder}{removed and f' (removed, since diverged: {removed})'}"
    return "start again with --overwrite: no checkpoint is older than the divergence"


def read_checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]:
    """Read weights, optimizer state and run state of a checkpoint.

    Raises RunFolderError if a byte has changed, a field has another type, or a value is not finite.
    """
    try:
        for name in (_MODEL, _OPTIMIZER, _STATE, _CHECKSUMS):
            if not (folder / name).is_file():  # reading a pipe or a device may never end
                raise ValueError(f"{name} is {'not a regular file' if (folder / name).exists() else 'missing'}")
        checksums = json.loads((folder / _CHECKSUMS).read_text(encoding="utf-8"))
        for name in (_MODEL, _OPTIMIZER, _STATE):
            if file_digest(folder / name) != checksums[name]:
                raise ValueError(f"{name} was changed after it was written")
        facts = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        _check_facts(facts, step_of(folder))
        weights, optimizer_state = load_file(folder / _MODEL), load_file(folder / _OPTIMIZER)
        if name := _not_finite(weights, optimizer_state):
            raise ValueError(f"{name} is not finite: the run had diverged")
        return weights, optimizer_state, facts
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunFolderError(f"{folder}: damaged checkpoint: {error}") from None


def _check_facts(facts: Any, step: int) -> None:
    """Raises ValueError if this is not the run state of `step`'s checkpoint. Sets fields that older versions lack."""
    if not isinstance(facts, dict):
        raise ValueError(f"{_STATE} is not a mapping")
    facts.setdefault("last_finite_step", step)
    facts.setdefault("scaler", None)
    facts.setdefault("identity", None)
    _check_fields(TrainState, {name: value for name, value in facts.items() if name != "scaler"})
    if facts["evaluation"] is not None:
        _check_fields(Evaluation, facts["evaluation"])
    scaler = facts["scaler"]
    if scaler is not None and not (isinstance(scaler, dict) and all(type(v) in (int, float) for v in scaler.values())):
        raise ValueError(f"{_STATE}: scaler is {scaler!r:.80}")
    if facts["step"] != step:
        raise ValueError(f"{_STATE} is of step {facts['step']:,}")


def _check_fields(kind: type, values: Any) -> None:
    fields = {field.name: typing.get_args(field.type) or (field.type,) for field in dataclasses.fields(kind)}
    if not isinstance(values, dict) or values.keys() != fields.keys():
        raise ValueError(f"{_STATE} does not have the fields {', '.join(fields)}")
    for name, types in fields.items():
        types = [dict if t is Evaluation else typing.get_origin(t) or t for t in types] + (
            [int] if float in types else []
        )
        value, low = values[name], -1 if name == "evaluated_step" else 0
        if type(value) not in types or (type(value) is int and not low <= value < 2**63):
            raise ValueError(f"{_STATE}: {name} is {value!r:.80}")


def _newest_intact(run: RunFolder, log: Callable[[int, str], None]) -> tuple[dict, dict, dict]:
    for folder in reversed(run.checkpoint_folders()):
        try:
            read = read_checkpoint(folder)
        except RunFolderError as error:
            log(logging.WARNING, f"{error}; trying an older one")
            continue
        log(logging.INFO, f"resuming from {folder}")
        return read
    raise RunFolderError(f"{run.checkpoints}: all checkpoints are damaged; start again with --overwrite")


def newest_step(accelerator: Accelerator, run: RunFolder) -> int:
    """The step of the newest intact checkpoint, or 0; the same on all processes."""
    step = [0]
    if accelerator.is_main_process:
        with contextlib.suppress(RunFolderError):
            step = [_newest_intact(run, lambda level, line: None)[2]["step"]]
    return broadcast_object_list(step, from_process=0)[0]


def load_checkpoint(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    run: RunFolder,
    identity: dict[str, Any] | None = None,
) -> TrainState:
    """Load the newest intact checkpoint into a prepared model and optimizer, and return its run state.

    The main process reads it and sends it to the others, so a shared file system is not needed. Raises RunFolderError
    on all of them, and changes nothing, if no checkpoint is intact, or it belongs to another model, or to another run
    than `identity`. A checkpoint without an identity (older versions) is accepted.
    """
    weights, optimizer_state = {}, {}
    message: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            weights, optimizer_state, facts = _newest_intact(run, logger.log)
            if identity and facts.get("identity") and (differ := differences(facts["identity"], identity)):
                raise RunFolderError(
                    f"{run.checkpoints}: the newest checkpoint is of another run or other data: {'; '.join(differ)}; "
                    "use the recipe and data it was trained with, or start again with --overwrite"
                )
            if difference := first_mismatch(accelerator, model, optimizer, weights, optimizer_state):
                raise RunFolderError(
                    f"{run.checkpoint(facts['step'])}: is of another model: {difference}; has the recipe's model "
                    "changed?"
                )
            layout = {name: (tensor.shape, tensor.dtype) for name, tensor in optimizer_state.items()}
            message = [(facts | {"has_best": run.best.is_dir()}, layout)]
        except RunFolderError as error:
            message = [error]
    broadcast_object_list(message, from_process=0)
    if isinstance(message[0], RunFolderError):
        raise message[0]
    facts: dict[str, Any] = message[0][0]
    layout: dict[str, tuple[torch.Size, torch.dtype]] = message[0][1]

    set_weights(accelerator, model, weights)
    set_optimizer_state(accelerator, model, optimizer, optimizer_state, layout)
    scaler = facts.pop("scaler")
    if scaler is not None:
        set_scaler_state(accelerator, optimizer, scaler)
    evaluation = facts.pop("evaluation")
    if (
        not facts.pop("has_best") and facts["best_step"] is not None
    ):  # best/ was removed: the next evaluation writes a new one
        facts |= {"best_loss": None, "best_step": None, "evaluated_step": -1}
    facts["identity"] = identity or facts.get("identity")
    return TrainState(**facts, evaluation=evaluation and Evaluation(**evaluation))
