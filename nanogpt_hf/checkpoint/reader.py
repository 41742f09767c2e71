"""Read checkpoints: find the newest intact one, and load it on any number of processes and under
any sharding.
"""

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast, broadcast_object_list, gather_object

from nanogpt_hf.checkpoint.files import CHECKSUMS, MODEL, OPTIMIZER, STATE, files_of
from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed.full_state import FullState, SavedTensors
from nanogpt_hf.distributed.mesh import mesh_of
from nanogpt_hf.errors import DamagedFileError, RunFolderError, UserError
from nanogpt_hf.own_files import as_type, file_sha256, read_json, reading
from nanogpt_hf.place import remove_folder
from nanogpt_hf.runs.folder import VERSION, RunFolder, step_of
from nanogpt_hf.runs.origin import check_start_folder
from nanogpt_hf.runs.state import TrainState, differences, read_state
from nanogpt_hf.runs.tensor_files import Box, Layout, TensorFiles, layout_digest, layout_lines

logger = logging.getLogger(__name__)
_Scaler = dict[str, float] | None
# Fields of the run state that older checkpoints lack; they have a default.
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
    # The state of fp16's loss scaler; None in any other precision.
    scaler: dict[str, float] | None


class SentTensors(NamedTuple):
    """Tensors of a checkpoint whose folder only the main process sees.

    `read` is a collective: the main process reads one whole tensor and sends it to all, so no
    process needs memory for more than one in addition to its own model.
    """

    accelerator: Accelerator
    layout: Layout
    files: Any

    def read(self, name: str, box: Box) -> torch.Tensor:
        shape, dtype = self.layout[name]
        whole = torch.empty(shape, dtype=dtype) if self.files is None else self.files[name]
        return cast(torch.Tensor, broadcast(whole.to(self.accelerator.device), from_process=0))


def read_checkpoint(folder: Path, index: int = 0, count: int = 1) -> Checkpoint:
    """Open a checkpoint, and verify that its files are as they were written.

    Files with tensors are large: processes that all see them verify one of `count` shares each.
    Raises DamagedError, and OtherFormatError for another version or fields.
    """
    try:
        with reading(folder):
            return _open(folder, index, count)
    except DamagedFileError as error:
        reason = str(error).removeprefix(f"{folder}: ").removeprefix(f"{folder}/")
        raise DamagedError(f"{folder}: damaged checkpoint: {reason}") from None


def _open(folder: Path, index: int, count: int) -> Checkpoint:
    files = _verified_files(folder, index, count)
    state, scaler, tensors = _read_state(folder)
    weights = TensorFiles([folder / name for name in files[MODEL]])
    optimizer_state = TensorFiles([folder / name for name in files[OPTIMIZER]])
    # Checksums prove that each file is as it was written. The digest proves that together they
    # hold the tensors of this run state.
    lines = layout_lines(MODEL, weights.layout)
    lines |= layout_lines(OPTIMIZER, optimizer_state.layout)
    if layout_digest(lines) != tensors:
        raise ValueError("names, shapes or dtypes of its tensors are not those written")
    return Checkpoint(weights, optimizer_state, folder, state, scaler)


def _verified_files(folder: Path, index: int, count: int) -> dict[str, list[str]]:
    """Verify the checksums; return the names of the files with tensors by kind."""
    checksums = read_json(folder / CHECKSUMS, dict[str, str])
    with reading(folder / CHECKSUMS):
        files = {kind: files_of(kind, checksums) for kind in (MODEL, OPTIMIZER)}
        names = sorted(itertools.chain(*files.values()))
        if others := sorted({path.name for path in folder.glob("*.safetensors")}.difference(names)):
            raise ValueError(f"it does not name {others[0]}")
    for name in (STATE, *names[index::count]):
        with reading(folder / name):
            if file_sha256(folder / name) != checksums.get(name):
                raise DamagedFileError(f"{folder / name} was changed after it was written")
    return files


def _read_state(folder: Path) -> tuple[TrainState, _Scaler, Any]:
    """Read the run state, the loss scaler's state, and the digest of the tensors' layout."""
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
    return state, scaler, tensors


def identity_of(saved: Checkpoint) -> dict[str, Any]:
    """Identity of a checkpoint's run. Raises DamagedError if it has none."""
    if saved.state.identity is None:
        raise DamagedError(f"{saved.folder}: damaged checkpoint: {STATE} has no identity")
    return saved.state.identity


def recovery_advice(run: RunFolder, state: TrainState) -> str:
    """Advise what to do after the weights of `state` diverged, as a phrase; for the main process.

    All gradients since `last_finite_step` were not finite, so weights have not changed since
    then. If an older checkpoint is intact, the later ones are removed: --resume loads the newest.
    """
    folders = run.checkpoint_folders()
    # Newer ones hold weights that led to the divergence: only an older one is a way back.
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
    """Find the newest intact checkpoint, in one process. Raises RunFolderError if there is none."""
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


def check_recorded_start(run: RunFolder, config: Config) -> None:
    """Raises RunFolderError if the run started from a model in a folder, as its newest readable
    checkpoint states, that is not here.
    """
    check_start_folder(run, config.finetune.model, newest_identity(run).get("origin", {}))


def newest_identity(run: RunFolder) -> dict[str, Any]:
    """Identity of the run, as its newest checkpoint states whose state can be read; empty without
    one.
    """
    for folder in reversed(run.checkpoint_folders()):
        # Not the tensors, whose checksums take long.
        with contextlib.suppress(UserError):
            state, _, _ = _read_state(folder)
            if state.identity is not None:
                return state.identity
    return {}


def check_identity(run: RunFolder, state: TrainState, identity: dict[str, Any]) -> None:
    """Raises RunFolderError if a checkpoint is of another run than `identity`."""
    if differ := differences(state.identity or {}, identity):
        raise RunFolderError(
            f"{run.checkpoints}: the newest checkpoint is of another run or other data: "
            f"{'; '.join(differ)}; use the recipe, the data and the start model it was trained "
            "with, start another run with another --run-dir, or start again with --overwrite"
        )


def find_checkpoint(
    accelerator: Accelerator, run: RunFolder, identity: dict[str, Any] | None = None
) -> Checkpoint:
    """Find the newest intact checkpoint; a collective.

    Processes of a sharded model verify a share of the files each, and read their parts. Else the
    main process reads and sends all, so the others need not see the folder. Raises
    RunFolderError on all processes if no checkpoint is intact, or it is of another version, or
    of another run than `identity`.
    """
    saved, folder = _newest_intact(accelerator, run, must_have_identity=bool(identity))
    # A process of a sharded model has opened the files itself, and reads its parts from them.
    # Processes that have read nothing get the small parts from the main process: the run state
    # and the names, shapes and dtypes of all tensors.
    layouts = saved and [files.layout for files in saved[:2]]
    head: list[Any] = [saved and (saved.state, saved.scaler, layouts, run.best.is_dir())]
    state, scaler, layouts, has_best = broadcast_object_list(head, from_process=0)[0]
    if identity:
        check_identity(run, state, identity)
    if not has_best and state.best_step is not None:
        # best/ was removed. Without the record of its loss the next evaluation writes a new one.
        state = dataclasses.replace(state, best_loss=None, best_step=None, evaluated_step=-1)
    logger.info(f"resuming from {folder}")
    tensors: Any = saved[:2] if saved else (None, None)
    mesh = mesh_of(accelerator)
    if not mesh.is_sharded and mesh.world_size > 1:
        tensors = [
            SentTensors(accelerator, layout, files)
            for layout, files in zip(layouts, tensors, strict=True)
        ]
    weights, optimizer_state = tensors
    return Checkpoint(weights, optimizer_state, folder, state, scaler)


def _newest_intact(
    accelerator: Accelerator, run: RunFolder, *, must_have_identity: bool
) -> tuple[Checkpoint | None, Path]:
    """Find the newest intact checkpoint and its folder; a collective.

    Processes that do not read have the folder's name only.
    """
    is_main = accelerator.is_main_process
    sharded = mesh_of(accelerator).is_sharded
    share = (accelerator.process_index, accelerator.num_processes) if sharded else (0, 1)
    # The main process alone decides which folders there are: on a network file system others may
    # see a new folder later, and would then try another one.
    folders = [run.checkpoint_folders() if is_main else []]
    for folder in reversed(broadcast_object_list(folders, from_process=0)[0]):
        saved = None
        try:
            with _errors_of_all():
                if is_main or sharded:
                    saved = read_checkpoint(folder, *share)
                    if must_have_identity:
                        identity_of(saved)
        except DamagedError as error:
            if is_main:
                logger.warning(f"{error}; trying an older one")
        else:
            return saved, folder
    raise _all_damaged(run)


@contextlib.contextmanager
def _errors_of_all() -> Iterator[None]:
    """Context that raises RunFolderError on all processes if one does; a collective at its end.

    Without it the processes that have no error would wait in the next collective for the one that
    has left, until a time limit.
    """
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
    # Optimizers make their state at the first step. It has to be there to be filled.
    model_state.make_optimizer_state()
    # All names, shapes and dtypes are compared before the first value is changed.
    mismatch = model_state.first_mismatch(saved.weights.layout, saved.optimizer_state.layout)
    with _errors_of_all():
        if mismatch:
            raise RunFolderError(
                f"{saved.folder}: is of another model: {mismatch}; use the recipe, the start model "
                "and the code that it was trained with, or start again with --overwrite"
            )
    model_state.set_weights(saved.weights)
    model_state.set_optimizer_state(saved.optimizer_state)
    # fp16 multiplies the loss by a scale that it adapts. At another scale other steps would be
    # skipped for an overflow.
    if accelerator.scaler and saved.scaler:
        accelerator.scaler.load_state_dict(saved.scaler)
    return dataclasses.replace(saved.state)
