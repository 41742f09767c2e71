"""Read checkpoints: find the newest intact one, and load it on any number of processes and under
any sharding.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast, broadcast_object_list, gather_object

from nanogpt_hf.distributed.accelerator import is_sharded
from nanogpt_hf.distributed.full_state import FullState, SavedTensors
from nanogpt_hf.errors import DamagedFileError, RunFolderError
from nanogpt_hf.own_files import as_type, read_json, reading
from nanogpt_hf.place import remove_folder
from nanogpt_hf.runs.folder import VERSION, RunFolder, step_of
from nanogpt_hf.runs.state import TrainState, differences, read_state
from nanogpt_hf.runs.tensor_files import (
    Box,
    Layout,
    TensorFiles,
    layout_digest,
    layout_lines,
)

logger = logging.getLogger(__name__)
MODEL, OPTIMIZER, STATE, CHECKSUMS = "model", "optimizer", "state.json", "checksums.json"
_Scaler = dict[str, float] | None
# older checkpoints lack these fields of the state, which have a default
_NEW_FIELDS = {"score"}


class DamagedError(RunFolderError):
    """A file of a checkpoint is missing, or is not as it was written."""


class OtherFormatError(RunFolderError):
    """A checkpoint was written by other code."""


class Checkpoint(NamedTuple):
    """A checkpoint on disk; its tensors are read when they are asked for."""

    weights: SavedTensors
    optimizer_state: SavedTensors
    folder: Path
    state: TrainState
    scaler: dict[str, float] | None  # the state of fp16's loss scaler


class SentTensors(NamedTuple):
    """Tensors that only the main process finds; `read` is a collective, which sends one to all."""

    accelerator: Accelerator
    layout: Layout
    files: Any

    def read(self, name: str, box: Box) -> torch.Tensor:
        shape, dtype = self.layout[name]
        whole = torch.empty(shape, dtype=dtype) if self.files is None else self.files[name]
        return cast(torch.Tensor, broadcast(whole.to(self.accelerator.device), from_process=0))


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_checkpoint(folder: Path, index: int = 0, count: int = 1) -> Checkpoint:
    """Open a checkpoint whose files are as written; of those with tensors, the `index`th of `count`
    shares is verified. Raises DamagedError, and OtherFormatError for another version or fields.
    """
    try:
        with reading(folder):
            return _open(folder, index, count)
    except DamagedFileError as error:
        reason = str(error).removeprefix(f"{folder}: ").removeprefix(f"{folder}/")
        raise DamagedError(f"{folder}: damaged checkpoint: {reason}") from None


def _open(folder: Path, index: int, count: int) -> Checkpoint:
    checksums = read_json(folder / CHECKSUMS, dict[str, str])
    with reading(folder / CHECKSUMS):
        files = {kind: _files_of(kind, checksums) for kind in (MODEL, OPTIMIZER)}
        names = sorted(itertools.chain(*files.values()))
        if others := sorted({path.name for path in folder.glob("*.safetensors")}.difference(names)):
            raise ValueError(f"it does not name {others[0]}")
    for name in (STATE, *names[index::count]):
        with reading(folder / name):
            if file_digest(folder / name) != checksums.get(name):
                raise DamagedFileError(f"{folder / name} was changed after it was written")
    facts = read_json(folder / STATE, dict[str, Any])
    fields = {field.name for field in dataclasses.fields(TrainState)}
    with reading(folder / STATE):
        if "version" not in facts:
            raise ValueError("version: is missing")
        version = facts.pop("version")
        scaler = as_type(facts.pop("scaler", None), _Scaler, "scaler")
        tensors = facts.pop("tensors", None)
        if version != VERSION or facts.keys() | _NEW_FIELDS != fields:
            raise OtherFormatError(
                f"{folder}: was written by other code: version {version} of the run folder's "
                f"format and {len(facts)} fields, here {VERSION} and {len(fields)}; continue with "
                "the code that wrote it, or start again with --overwrite"
            )
        state = read_state(facts)
        if state.step != step_of(folder):
            raise ValueError(f"it is of step {state.step:,}")
    weights, optimizer_state = (
        TensorFiles([folder / name for name in files[kind]]) for kind in (MODEL, OPTIMIZER)
    )
    lines = layout_lines(MODEL, weights.layout)
    lines |= layout_lines(OPTIMIZER, optimizer_state.layout)
    if layout_digest(lines) != tensors:
        raise ValueError("names, shapes or dtypes of its tensors are not those written")
    return Checkpoint(weights, optimizer_state, folder, state, scaler)


def identity_of(saved: Checkpoint) -> dict[str, Any]:
    """The identity of a checkpoint's run. Raises DamagedError if it has none."""
    if saved.state.identity is None:
        raise DamagedError(f"{saved.folder}: damaged checkpoint: {STATE} has no identity")
    return saved.state.identity


def _files_of(kind: str, checksums: dict[str, str]) -> list[str]:
    """The names of the files with tensors of a kind. Raises ValueError if one has no checksum."""
    parts = sorted(name for name in checksums if name.startswith(f"{kind}-"))
    names = file_names(kind, max(1, len(parts)))
    if missing := sorted(set(names) - checksums.keys()):
        raise ValueError(f"it has no {missing[0]}")
    return names


def file_names(kind: str, count: int) -> list[str]:
    """The files with tensors of a kind that `count` processes write, named as the Hub does."""
    if count == 1:
        return [f"{kind}.safetensors"]
    return [f"{kind}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def recovery_advice(run: RunFolder, state: TrainState) -> str:
    """What to do after the weights of `state` diverged, as a phrase; for the main process.

    All gradients since `last_finite_step` were not finite, so weights have not changed since
    then. If an older checkpoint is intact, the later ones are removed: --resume loads the newest.
    """
    folders = run.checkpoint_folders()
    for folder in reversed([f for f in folders if step_of(f) < state.last_finite_step]):
        with contextlib.suppress(RunFolderError, OSError):
            read_checkpoint(folder)
            diverged = [later for later in folders if step_of(later) >= state.last_finite_step]
            for later in diverged:
                remove_folder(later)
            removed = ", ".join(later.name for later in diverged)
            note = f" (removed, since diverged: {removed})" if removed else ""
            return f"continue with --resume from {folder}{note}"
    return "start again with --overwrite: no checkpoint is older than the divergence"


def newest_checkpoint(run: RunFolder) -> Checkpoint:
    """The newest intact checkpoint, in one process. Raises RunFolderError if there is none."""
    for folder in reversed(run.checkpoint_folders()):
        try:
            return read_checkpoint(folder)
        except DamagedError as error:
            logger.warning(f"{error}; trying an older one")
    raise _all_damaged(run)


def _all_damaged(run: RunFolder) -> RunFolderError:
    return RunFolderError(
        f"{run.checkpoints}: all checkpoints are damaged; start again with --overwrite"
    )


def check_identity(run: RunFolder, state: TrainState, identity: dict[str, Any]) -> None:
    """Raises RunFolderError if a checkpoint is of another run than `identity`."""
    if differ := differences(state.identity or {}, identity):
        raise RunFolderError(
            f"{run.checkpoints}: the newest checkpoint is of another run or other data: "
            f"{'; '.join(differ)}; use the recipe, the data and the start model it was trained "
            "with, or start again with --overwrite"
        )


def find_checkpoint(
    accelerator: Accelerator, run: RunFolder, identity: dict[str, Any] | None = None
) -> Checkpoint:
    """The newest intact checkpoint; a collective.

    Processes of a sharded model verify a share of the files each, and read their parts. Else the
    main process reads and sends all, so the others need not see the folder. Raises
    RunFolderError on all processes if no checkpoint is intact, or it is of another version, or
    of another run than `identity`.
    """
    is_main, sharded = accelerator.is_main_process, is_sharded(accelerator)
    share = (accelerator.process_index, accelerator.num_processes) if sharded else (0, 1)
    folders = [run.checkpoint_folders() if is_main else []]
    for folder in reversed(broadcast_object_list(folders, from_process=0)[0]):
        saved = None
        try:
            with _errors_of_all():
                if is_main or sharded:
                    saved = read_checkpoint(folder, *share)
                    if identity:
                        identity_of(saved)
            break
        except DamagedError as error:
            if is_main:
                logger.warning(f"{error}; trying an older one")
    else:
        raise _all_damaged(run)
    layouts = saved and [files.layout for files in saved[:2]]
    head: list[Any] = [saved and (saved.state, saved.scaler, layouts, run.best.is_dir())]
    state, scaler, layouts, has_best = broadcast_object_list(head, from_process=0)[0]
    if identity:
        check_identity(run, state, identity)
    if not has_best and state.best_step is not None:
        # best/ was removed: the next evaluation writes a new one
        state = dataclasses.replace(state, best_loss=None, best_step=None, evaluated_step=-1)
    logger.info(f"resuming from {folder}")
    tensors: Any = saved[:2] if saved else (None, None)
    if not sharded and accelerator.num_processes > 1:
        tensors = (SentTensors(accelerator, *pair) for pair in zip(layouts, tensors, strict=True))
    weights, optimizer_state = tensors
    return Checkpoint(weights, optimizer_state, folder, state, scaler)


@contextlib.contextmanager
def _errors_of_all() -> Iterator[None]:
    """Context that raises RunFolderError on all processes if one does; a collective at its end."""
    errors = []
    try:
        yield
    except RunFolderError as error:
        errors.append(error)
    for error in gather_object(errors):
        raise error


def load_checkpoint(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    saved: Checkpoint,
) -> TrainState:
    """Load a checkpoint of the same run into a prepared model and optimizer, and return its run
    state.

    Raises RunFolderError on all processes, and changes nothing, if it is of another model.
    """
    model_state = FullState(accelerator, model, optimizer)
    model_state.make_optimizer_state()
    mismatch = model_state.first_mismatch(saved.weights.layout, saved.optimizer_state.layout)
    with _errors_of_all():
        if mismatch:
            raise RunFolderError(
                f"{saved.folder}: is of another model: {mismatch}; use the recipe, the start model "
                "and the code that it was trained with, or start again with --overwrite"
            )
    model_state.set_weights(saved.weights)
    model_state.set_optimizer_state(saved.optimizer_state)
    if accelerator.scaler and saved.scaler:
        accelerator.scaler.load_state_dict(saved.scaler)
    return dataclasses.replace(saved.state)
