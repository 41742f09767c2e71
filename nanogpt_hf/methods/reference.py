"""Log-probabilities of answers under the model before training, kept in the run folder.

Most preference losses compare with them. They are computed once: at step 0 by the model of the run,
later, if the file was lost, by the model that the run started from.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.distributed.accelerator import sum_over_ranks
from nanogpt_hf.errors import DamagedFileError, UserError
from nanogpt_hf.evaluation.loss import eval_mode, rank_batches
from nanogpt_hf.methods.preference_losses import Batch, needs_reference, pair_log_probs
from nanogpt_hf.methods.run import Run, start_model_of
from nanogpt_hf.own_files import reading, warn_once
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.origin import START_WEIGHTS, changes_of_origin, weights_of
from nanogpt_hf.runs.state import TrainState

logger = logging.getLogger(__name__)


def batches_of(run: Run, blocks: Blocks, indices: np.ndarray) -> Iterator[tuple[np.ndarray, Batch]]:
    """Make this process's batches of the blocks at `indices`; all processes have equally many."""
    size = run.batches.micro_batch_size
    return rank_batches(run.accelerator, blocks, indices, size, pad=True)


def read_reference(path: Path, splits: dict[str, Any]) -> Batch:
    """Read the log-probabilities of each split; {} if there is no file, and, with a warning, if it
    is damaged, was changed after it was written, or has other rows.
    """
    if not path.is_file():
        return {}
    try:
        with reading(path):
            saved = load_file(path)
            with safe_open(path, "pt") as file:
                recorded = (file.metadata() or {}).get("sha256")
            for name, blocks in splits.items():
                if name not in saved or saved[name].shape != (len(blocks), 2):
                    raise ValueError(f"it has not the {len(blocks):,} rows of {name}")
                is_whole = saved[name].dtype == torch.float32 and saved[name].isfinite().all()
                if not is_whole or not saved[name].any():
                    raise ValueError(f"{name} holds no log-probabilities")
            # A run would train on wrong but plausible values without a sign of it.
            if recorded != _digest(saved):
                raise ValueError(
                    "it was changed after it was written" if recorded else "it has no checksum"
                )
    except DamagedFileError as error:
        warn_once(f"{error}; its log-probabilities are computed again")
        return {}
    return saved


def reference_content(tensors: Batch) -> bytes:
    """Write a file of log-probabilities, with their checksum, as bytes."""
    return save(tensors, {"sha256": _digest(tensors)})


def _digest(tensors: Batch) -> str:
    # Names, shapes and types, too: the same bytes may be other rows.
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def lost_reference(
    config: Config, folder: RunFolder, data: PreparedData, state: TrainState
) -> str | None:
    """Explain in a line if a run cannot resume because it has lost its log-probabilities, and the
    model to compute them again is not the one that it started from; else None.

    Only the main process calls it.
    """
    splits = {"train": data.train, "validation": data.validation}
    if not needs_reference(config) or not state.step or read_reference(folder.reference, splits):
        return None
    return _start_model_problem(config, folder, state)


def _start_model_problem(config: Config, folder: RunFolder, state: TrainState) -> str | None:
    recorded = (state.identity or {}).get("origin", {})
    name = str(config.finetune.model)
    try:
        now = weights_of(name)
    except UserError as error:
        return f"{folder.reference}: is lost or damaged, and so is the start model: {error}"
    # A run records the hashes of the weights that it starts from: compare with what is there now.
    changes = changes_of_origin(recorded, now)
    if START_WEIGHTS in recorded and not now:
        changes = [f"{name}: no such folder"]
    if not changes:
        return None
    return (
        f"{folder.reference}: is lost or damaged, and the model whose log-probabilities it had is "
        f"another one: {changes[0]}; bring one of them back, or start again with --overwrite"
    )


def raise_on_all_ranks(problem: str | None) -> None:
    """Raises UserError on all processes if the main process has a problem; a collective."""
    problems: list[str | None] = broadcast_object_list([problem], from_process=0)
    if problems[0]:
        raise UserError(problems[0])


@torch.no_grad()
def fill_reference(run: Run, stopping: Callable[[], bool]) -> bool:
    """Give all rows their log-probabilities under the model before training; the first call in a
    process computes or reads them.

    Returns whether they are there: they are not if `stopping()` has ended the computation.
    """
    splits: dict[str, Any] = {"train": run.data.train, "validation": run.data.validation}
    if not needs_reference(run.config) or splits["train"].reference.any():
        return True
    saved: Batch = {}
    if run.mesh.is_main:
        saved = read_reference(run.folder.reference, splits)
    # The other processes may not see the main process's folder.
    (is_saved,) = broadcast_object_list([bool(saved)], from_process=0)
    if not is_saved and run.state.step:
        problem = None
        if run.mesh.is_main:
            problem = _start_model_problem(run.config, run.folder, run.state)
        raise_on_all_ranks(problem)
    filled = {}
    for name, blocks in splits.items():
        # Only the main process has what was saved. Others have zeros, so the sum is the same.
        found: Tensor | None = saved.get(name, torch.zeros(len(blocks), 2))
        if not is_saved:
            logger.info(f"log-probabilities of {len(blocks):,} {name} rows before training ...")
            found = _own_log_probs(run, blocks, stopping)
            if found is None:
                return False
        filled[name] = sum_over_ranks(run.accelerator, found.to(run.accelerator.device)).cpu()
    # The model that the run started from is not needed again: free its memory.
    run.start_model = None
    if run.mesh.is_main and not is_saved:
        with written_whole(run.folder.reference) as partial:
            partial.write_bytes(reference_content(filled))
    for name, reference in filled.items():
        splits[name].reference = reference
    return True


def _own_log_probs(run: Run, blocks: Blocks, stopping: Callable[[], bool]) -> Tensor | None:
    """Compute the log-probabilities (rows, 2) of this process's rows, 0 for the others; None if
    `stopping()` has ended it.
    """
    found = torch.zeros(len(blocks), 2, device=run.accelerator.device)
    # At step 0 the run's own model is the one before training.
    model = run.model if run.state.step == 0 else start_model_of(run)
    with eval_mode(model):
        for rows, batch in batches_of(run, blocks, np.arange(len(blocks))):
            with run.accelerator.autocast():
                sums, _ = pair_log_probs(model, batch["input_ids"], batch["shift_labels"])
            # The batch was padded to the size of a micro-batch: rows beyond these are none.
            found[torch.from_numpy(rows).to(found.device)] = sums[: len(rows)].float()
            if stopping():
                return None
    return found
