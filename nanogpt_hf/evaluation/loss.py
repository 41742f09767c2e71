"""Loss of a model on blocks of validation data, on any number of processes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from transformers import PreTrainedTokenizerBase

from nanogpt_hf.data.blocks import Blocks, TokenStream
from nanogpt_hf.data.hf_tokenizer import bytes_of_tokens
from nanogpt_hf.data.manifest import Manifest
from nanogpt_hf.data.mixture import as_mixture
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.distributed.accelerator import sum_over_ranks
from nanogpt_hf.distributed.mesh import mesh_of
from nanogpt_hf.model.architecture import Objective
from nanogpt_hf.runs.state import MeasuredLoss

# Blocks of labels that are read at once to count their bytes: a few megabytes.
_BLOCKS_AT_ONCE = 256


@torch.no_grad()
def evaluate_blocks(
    accelerator: Accelerator,
    model: torch.nn.Module,
    objective: Objective,
    blocks: Blocks,
    *,
    micro_batch_size: int,
    tokens: int | Literal["all"],
    bytes_per_token: float,
    stopping: Callable[[], bool] = lambda: False,
) -> MeasuredLoss | None:
    """The token-weighted loss of a prepared, perhaps sharded `model` on the same blocks at every
    evaluation.

    All processes call it and get the same number. `stopping` is called after every batch; if it
    returns true (on all processes), the evaluation ends and returns None.
    """
    indices = evaluation_indices(blocks, tokens)
    # A sum over thousands of batches in float32 would lose digits. Apple's GPUs have no float64.
    exact = torch.float32 if accelerator.device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=exact, device=accelerator.device)
    # Padded batches: a rank without rows of its own still takes part in the forward pass.
    with eval_mode(model):
        for _, batch in rank_batches(accelerator, blocks, indices, micro_batch_size, pad=True):
            total += objective(model, batch)[0].to(exact)
            if stopping():
                return None
    # The objective sums over targets, so one division at the end weights every token alike,
    # however many of them a batch has.
    loss = sum_over_ranks(accelerator, total).item()
    count = blocks.num_targets(indices)
    return MeasuredLoss(loss / count, count, bytes_per_token)


def evaluate_data(
    evaluate: Callable[..., MeasuredLoss | None], data: PreparedData, tokens: int | Literal["all"]
) -> tuple[MeasuredLoss, dict[str, MeasuredLoss]] | None:
    """Measure the loss on the validation split by `evaluate`, which is `evaluate_blocks` of a
    model. For a mixture, return the loss on each source, too, by its name.

    The loss of a mixture is the mean of its sources' losses, each weighted by its share of the
    training sequences; its bytes per token are weighted alike. Each source is measured on the
    same number of tokens, `tokens` in all.
    """
    blocks = data.validation
    manifest = data.manifest
    if not manifest.sources:
        bytes_per_token = bytes_per_target(blocks, tokens, manifest, data.tokenizer)
        whole = evaluate(blocks, tokens=tokens, bytes_per_token=bytes_per_token)
        return whole and (whole, {})
    each = tokens if tokens == "all" else tokens // len(manifest.sources)
    parts: dict[str, MeasuredLoss] = {}
    mean = MeasuredLoss(0.0, 0, 0.0)
    # A period of the mixture has `weight` sequences of each source.
    period = sum(source.weight for source in manifest.sources)
    for source, part in zip(manifest.sources, as_mixture(blocks).parts, strict=True):
        bytes_per_token = bytes_per_target(part, each, source.manifest, data.tokenizer)
        found = evaluate(part, tokens=each, bytes_per_token=bytes_per_token)
        # The run is to stop. The mean of some of the sources is no mean of the mixture.
        if found is None:
            return None
        parts[source.name] = found
        share = source.weight / period
        mean = MeasuredLoss(
            mean.loss + share * found.loss,
            mean.tokens + found.tokens,
            mean.bytes_per_token + share * bytes_per_token,
        )
    return mean, parts


def bytes_per_target(
    blocks: Blocks,
    tokens: int | Literal["all"],
    manifest: Manifest,
    tokenizer: PreTrainedTokenizerBase,
) -> float:
    """Bytes of text per target in the blocks that an evaluation on `tokens` tokens reads.

    Tokens that are not predicted, such as the first one, do not count. A token that begins or ends
    a document is predicted and has no bytes. For conversations, the mean over the split is taken.
    """
    facts = manifest.validation
    # Only the assistant's tokens are targets, and the manifest counts their bytes.
    if facts.assistant_tokens is not None:
        return facts.bytes_per_token
    name = str(manifest.recipe.get("tokenizer"))
    share = _share_of_bytes(blocks, tokens, tokenizer, name)
    return facts.bytes_per_token if share is None else facts.bytes * share


# It is the same at every evaluation of a run; a mixture has one for each source.
@lru_cache(maxsize=8)
def _share_of_bytes(
    blocks: Any, tokens: int | Literal["all"], tokenizer: PreTrainedTokenizerBase, name: str
) -> float | None:
    """The share of the split's bytes in a target, on average; None if its tokens have no text.

    It is a share since some tokenizers change the text (they lower its case, say), and then the
    bytes of their tokens do not add up to the bytes of the text.
    """
    sizes = bytes_of_tokens(tokenizer, name)
    indices = evaluation_indices(blocks, tokens)
    predicted = 0
    for first in range(0, len(indices), _BLOCKS_AT_ONCE):
        # (blocks, T); -100 where there is no target
        labels = blocks.batch(indices[first : first + _BLOCKS_AT_ONCE])["shift_labels"].numpy()
        predicted += int(sizes[labels[labels >= 0]].sum())
    whole = bytes_of_stream(blocks.stream, sizes)
    if not whole:
        return None
    return predicted / whole / blocks.num_targets(indices)


def bytes_of_stream(stream: TokenStream, sizes: np.ndarray) -> int:
    """The bytes of all tokens, by the `sizes` of bytes_of_tokens."""
    return sum(int(np.take(sizes, chunk, mode="clip").sum()) for chunk in stream.chunks)


def evaluation_indices(blocks: Blocks, tokens: int | Literal["all"]) -> np.ndarray:
    """Indices of the blocks that an evaluation on `tokens` tokens, or "all", reads: spread
    evenly, at least one.
    """
    count = len(blocks)
    if tokens != "all":
        count = min(count, max(1, tokens // blocks.block_size))
    # From the first block to the last: the start of a text need not be like its end.
    return np.linspace(0, len(blocks) - 1, count).round().astype(np.int64)


def rank_batches(
    accelerator: Accelerator,
    blocks: Blocks,
    indices: np.ndarray,
    batch_size: int,
    *,
    pad: bool,
) -> Iterator[tuple[np.ndarray, dict[str, torch.Tensor]]]:
    """Yield batches of this rank's blocks, on the device, each with its positions in `indices`.
    Ranks take turns, a batch each.

    With `pad` every rank gets the same number of batches, each with `batch_size` rows: the
    forward pass of a sharded model is a collective.
    """
    mesh = mesh_of(accelerator)
    positions = np.arange(len(indices))
    for first in range(0, len(indices), batch_size * mesh.dp_cp_size):
        # At the end of the data, a rank may have a short batch or none.
        rows = positions[first + mesh.dp_cp_rank * batch_size :][:batch_size]
        if pad or len(rows):
            batch = blocks.batch(indices[rows])
            batch = pad_batch(batch, batch_size) if pad else batch
            batch: Any = send_to_device(batch, accelerator.device)
            yield rows, batch


def pad_batch(batch: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """Add rows without targets, up to `rows` rows."""
    # A name is a column of the batch, such as input_ids, with a row for each block.
    padded = {}
    for name, tensor in batch.items():
        # -100 is the label that cross-entropy ignores
        filling = -100 if name == "shift_labels" else 0
        added = tensor.new_full((rows - len(tensor), *tensor.shape[1:]), filling)
        padded[name] = torch.cat([tensor, added])
    return padded


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Context in which `model` is in evaluation mode; its mode is restored on exit."""
    # Dropout, among others, is off in evaluation mode.
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
