"""Read checkpoints: find the newest intact one, and load it on any number of processes and under any sharding."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import typing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast, broadcast_object_list, gather_object
from safetensors import SafetensorError, safe_open

from nanogpt_hf.distributed.full_state import (
    Fetch,
    Layout,
    first_mismatch,
    make_optimizer_state,
    set_optimizer_state,
    set_scaler_state,
    set_weights,
)
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.runs.folder import RunFolder, step_of
from nanogpt_hf.runs.identity import differences
from nanogpt_hf.runs.replace import remove_folder
from nanogpt_hf.runs.state import Evaluation, TrainState
from nanogpt_hf.runs.tensor_files import Box, TensorFiles, is_finite

logger = logging.getLogger(__name__)
MODEL, OPTIMIZER, STATE, CHECKSUMS = "model", "optimizer", "state.json", "checksums.json"


def tensor_file(kind: str, number: int, count: int) -> str:
    """The name of file `number` of `count` with tensors of a kind, as the Hub names them."""
    return f"{kind}.safetensors" if count == 1 else f"{kind}-{number:05d}-of-{count:05d}.safetensors"


class Checkpoint(NamedTuple):
    """A checkpoint on disk."""

    weights: TensorFiles
    optimizer_state: TensorFiles
    facts: dict[str, Any]  # the run state and the loss scaler


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
            removed = ", ".join(later.name for later in diverged)
            try:
                for later in diverged:
                    remove_folder(later)
            except OSError as error:
                return f"remove {removed} (it could not be: {error}), then continue with --resume from {folder}"
            return f"continue with --resume from {folder}{removed and f' (removed, since diverged: {removed})'}"
    return "start again with --overwrite: no checkpoint is older than the divergence"


@contextlib.contextmanager
def _damage_named(folder: Path) -> typing.Iterator[None]:
    """Context that turns an error of a damaged file into RunFolderError."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunFolderError(f"{folder}: damaged checkpoint: {error}") from None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint after verifying its files; the tensors are read when they are asked for.

    Raises RunFolderError if a file is missing, a field has another type, a byte has changed, or a value is not finite.
    """
    facts, _ = _read_facts(folder)
    _verify_tensors(folder)
    return _open(folder, facts)


def _read_facts(folder: Path) -> tuple[dict[str, Any], str]:
    """The run state, and the digest of the checksums. Raises RunFolderError if one is damaged or a file is missing."""
    with _damage_named(folder):
        for name in (STATE, CHECKSUMS):
            _check_file(folder / name)
        for name in _tensor_files(folder):
            _check_file(folder / name)
        if file_digest(folder / STATE) != _checksums(folder)[STATE]:
            raise ValueError(f"{STATE} was changed after it was written")
        facts = json.loads((folder / STATE).read_text(encoding="utf-8"))
        _check_facts(facts, step_of(folder))
        return facts, file_digest(folder / CHECKSUMS)


def _verify_tensors(folder: Path, index: int = 0, count: int = 1) -> None:
    """Verify the checksums of the files with tensors, and that values are finite: the `index`th of `count` shares."""
    with _damage_named(folder):
        checksums = _checksums(folder)
        for name in _tensor_files(folder)[index::count]:
            if file_digest(folder / name) != checksums[name]:
                raise ValueError(f"{name} was changed after it was written")
            with safe_open(folder / name, "pt") as file:
                for tensor in file.keys():  # noqa: SIM118  (not a mapping)
                    if not is_finite(file.get_tensor(tensor)):
                        raise ValueError(f"{tensor} is not finite: the run had diverged")


def _open(folder: Path, facts: dict[str, Any]) -> Checkpoint:
    with _damage_named(folder):
        names = _tensor_files(folder)
        files = [[folder / n for n in names if n.startswith(kind)] for kind in (MODEL, OPTIMIZER)]
        return Checkpoint(TensorFiles(files[0]), TensorFiles(files[1]), facts)


def _checksums(folder: Path) -> dict[str, str]:
    return json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))


def _tensor_files(folder: Path) -> list[str]:
    """The files with tensors.

    Raises ValueError if the checksums list others than a save writes, or not all of them.
    """
    listed = _checksums(folder).keys() - {STATE}
    count = max(1, len(listed) // 2)
    written = {tensor_file(kind, n, count) for kind in (MODEL, OPTIMIZER) for n in range(1, count + 1)}
    found = {path.name for path in folder.glob("[!.]*.safetensors")}
    if odd := (listed ^ written) | (found - listed):
        raise ValueError(f"{CHECKSUMS} and the files do not agree on {min(odd):.80}")
    return sorted(listed)


def _check_file(path: Path) -> None:
    if not path.is_file():  # reading a pipe or a device may never end
        raise ValueError(f"{path.name} is {'not a regular file' if path.exists() else 'missing'}")


def _check_facts(facts: Any, step: int) -> None:
    """Raises ValueError if this is not the run state of `step`'s checkpoint. Sets fields that older versions lack."""
    if not isinstance(facts, dict):
        raise ValueError(f"{STATE} is not a mapping")
    older = {"last_finite_step": step, "reported_step": step, "clipped_steps": 0, "not_finite_steps": 0}
    for name, value in (older | {"scaler": None, "identity": None}).items():
        facts.setdefault(name, value)
    _check_fields(TrainState, {name: value for name, value in facts.items() if name != "scaler"})
    if facts["evaluation"] is not None:
        _check_fields(Evaluation, facts["evaluation"])
    scaler = facts["scaler"]
    if scaler is not None and not (isinstance(scaler, dict) and all(type(v) in (int, float) for v in scaler.values())):
        raise ValueError(f"{STATE}: scaler is {scaler!r:.80}")
    if facts["step"] != step:
        raise ValueError(f"{STATE} is of step {facts['step']:,}")


def _check_fields(kind: type, values: Any) -> None:
    fields = {field.name: typing.get_args(field.type) or (field.type,) for field in dataclasses.fields(kind)}
    if not isinstance(values, dict) or values.keys() != fields.keys():
        raise ValueError(f"{STATE} does not have the fields {', '.join(fields)}")
    for name, types in fields.items():
        types = [dict if t is Evaluation else typing.get_origin(t) or t for t in types] + (
            [int] if float in types else []
        )
        value, low = values[name], -1 if name == "evaluated_step" else 0
        if type(value) not in types or (type(value) is int and not low <= value < 2**63):
            raise ValueError(f"{STATE}: {name} is {value!r:.80}")


def newest_step(accelerator: Accelerator, run: RunFolder) -> int:
    """The step of the newest intact checkpoint, or 0; the same on all processes."""
    with contextlib.suppress(RunFolderError):
        return step_of(_newest_intact(accelerator, run, log=False)[0])
    return 0


def _newest_intact(
    accelerator: Accelerator, run: RunFolder, *, log: bool = True
) -> tuple[Path, dict[str, Any], Checkpoint | None]:
    """The newest intact checkpoint: its folder, its facts, and its files if this process finds them; a collective.

    The processes that find them verify a share each. Raises RunFolderError on all processes if no checkpoint is intact.
    """
    rank, log = accelerator.process_index, log and accelerator.is_main_process
    folders = [run.checkpoint_folders() if accelerator.is_main_process else []]
    for folder in reversed(broadcast_object_list(folders, from_process=0)[0]):
        try:
            head: list[Any] = [None]
            with _errors_of_all():
                head = [_read_facts(folder) if accelerator.is_main_process else None]
            facts, digest = broadcast_object_list(head, from_process=0)[0]
            files = gather_object([_file_seen(folder, digest)])
            readers = [reader for reader, file in enumerate(files) if file is not None and file == files[0]]
            with _errors_of_all():
                if rank in readers:
                    _verify_tensors(folder, readers.index(rank), len(readers))
            with _errors_of_all():
                saved = _open(folder, facts) if rank in readers else None
        except RunFolderError as error:
            if log:
                logger.warning(f"{error}; trying an older one")
            continue
        if log:
            logger.info(f"resuming from {folder}")
        return folder, facts, saved
    raise RunFolderError(f"{run.checkpoints}: all checkpoints are damaged; start again with --overwrite")


@contextlib.contextmanager
def _errors_of_all() -> typing.Iterator[None]:
    """Context that raises RunFolderError on all processes if it is raised on one; a collective at the end."""
    error = None
    try:
        yield
    except RunFolderError as caught:
        error = caught
    if errors := [error for error in gather_object([error]) if error is not None]:
        raise errors[0]


def _file_seen(folder: Path, digest: str) -> tuple[int, int] | None:
    """Which file with the checksums `digest` this process sees; a copy on another host is not the same."""
    with contextlib.suppress(OSError):
        if file_digest(folder / CHECKSUMS) == digest:
            status = (folder / CHECKSUMS).stat()
            return status.st_ino, status.st_ctime_ns
    return None


def load_checkpoint(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    run: RunFolder,
    identity: dict[str, Any] | None = None,
) -> TrainState:
    """Load the newest intact checkpoint into a prepared model and optimizer, and return its run state.

    The main process chooses it. Each process reads its parts if all of them find its files; else the main process
    reads them and sends one tensor after another, so a shared file system is not needed. Raises RunFolderError on all
    of them, and changes nothing, if no checkpoint is intact, or it belongs to another model, or to another run than
    `identity`. A checkpoint without an identity (older versions) is accepted.
    """
    folder, facts, saved = _newest_intact(accelerator, run)
    head: list[Any] = [None]
    with _errors_of_all():
        if saved and accelerator.is_main_process:
            if identity and facts.get("identity") and (differ := differences(facts["identity"], identity)):
                raise RunFolderError(
                    f"{run.checkpoints}: the newest checkpoint is of another run or other data: {'; '.join(differ)}; "
                    "use the recipe and data it was trained with, or start again with --overwrite"
                )
            head = [((saved.weights.layout, saved.optimizer_state.layout), run.best.is_dir())]
    layouts, has_best = broadcast_object_list(head, from_process=0)[0]
    make_optimizer_state(accelerator, optimizer)
    with _errors_of_all():
        if difference := first_mismatch(accelerator, model, optimizer, *layouts):
            raise RunFolderError(f"{folder}: is of another model: {difference}; has the recipe's model changed?")

    readable = all(gather_object([saved is not None]))  # by all processes
    files = saved[:2] if saved and (readable or accelerator.is_main_process) else (None, None)
    weights, optimizer_state = (
        _read_by_all(part) if part is not None and readable else _sent_by_main(accelerator, part, layout)
        for part, layout in zip(files, layouts, strict=True)
    )
    set_weights(accelerator, model, layouts[0], weights)
    set_optimizer_state(accelerator, model, optimizer, layouts[1], optimizer_state)
    scaler = facts.pop("scaler")
    if scaler is not None:
        set_scaler_state(accelerator, optimizer, scaler)
    evaluation = facts.pop("evaluation")
    if not has_best and facts["best_step"] is not None:  # best/ was removed: the next evaluation writes a new one
        facts |= {"best_loss": None, "best_step": None, "evaluated_step": -1}
    facts["identity"] = identity or facts.get("identity")
    return TrainState(**facts, evaluation=evaluation and Evaluation(**evaluation))


def _read_by_all(files: TensorFiles) -> Fetch:
    return lambda name, box: None if box is None else files.read(name, box)


def _sent_by_main(accelerator: Accelerator, files: TensorFiles | None, layout: Layout) -> Fetch:
    """Fetch by a collective: the main process reads each tensor and sends it, of which the others keep their part."""

    def fetch(name: str, box: Box | None) -> torch.Tensor | None:
        shape, dtype = layout[name]
        whole = torch.empty(shape, dtype=dtype) if files is None else files[name]
        whole = typing.cast(torch.Tensor, broadcast(whole.to(accelerator.device), from_process=0))
        if box is None:
            return None
        return whole[tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))].clone(
            memory_format=torch.contiguous_format
        )

    return fetch
