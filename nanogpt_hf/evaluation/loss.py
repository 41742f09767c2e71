"""Loss of a model: on blocks of validation data, and on text with standard errors; on any number
of processes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator

from nanogpt_hf.data.blocks import Blocks, TokenBlocks
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.distributed.accelerator import sum_over_ranks
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.evaluation.base import Subject
from nanogpt_hf.evaluation.corpus import Corpus
from nanogpt_hf.model.architecture import Objective
from nanogpt_hf.runs.state import MeasuredLoss

_RESAMPLES = 1000
_SEED = 1337


@dataclass(frozen=True)
class MeasuredTextLoss(MeasuredLoss):
    """Loss, perplexity and bits per byte over `tokens` predicted tokens, with bootstrapped
    standard errors.
    """

    loss_error: float  # nan if there is too little text
    windows: int

    def figures(self) -> dict[str, float | int | None]:
        """All values by name, for JSON; null if unknown."""
        figures = {
            "loss": self.loss,
            "loss_standard_error": self.loss_error,
            "perplexity": self.perplexity,
            "perplexity_standard_error": self.perplexity_error,
            "bits_per_byte": self.bits_per_byte,
            "bits_per_byte_standard_error": self.bits_per_byte_error,
            "tokens_predicted": self.tokens,
            "windows": self.windows,
        }
        return {name: value if math.isfinite(value) else None for name, value in figures.items()}

    @property
    def perplexity_error(self) -> float:
        return self.perplexity * self.loss_error  # first order: d exp(x) = exp(x) dx

    @property
    def bits_per_byte_error(self) -> float:
        return self.loss_error / math.log(2) / self.bytes_per_token


@torch.no_grad()
def evaluate_blocks(
    accelerator: Accelerator,
    mesh: Mesh,
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
    # MPS has no float64
    exact = torch.float32 if accelerator.device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=exact, device=accelerator.device)
    with eval_mode(model):
        for _, batch in rank_batches(
            accelerator, mesh, blocks, indices, micro_batch_size, pad=True
        ):
            total += objective(model, batch)[0].to(exact)
            if stopping():
                return None
    loss, count = sum_over_ranks(accelerator, mesh, total).item(), blocks.num_targets(indices)
    return MeasuredLoss(loss / count, count, bytes_per_token)


def evaluate_data(
    accelerator: Accelerator,
    mesh: Mesh,
    model: torch.nn.Module,
    objective: Objective,
    data: PreparedData,
    *,
    micro_batch_size: int,
    tokens: int | Literal["all"],
    stopping: Callable[[], bool] = lambda: False,
) -> tuple[MeasuredLoss, dict[str, MeasuredLoss]] | None:
    """The loss on the validation split by `evaluate_blocks`; of a mixture also that of each source,
    by name.

    The loss of a mixture is the mean of its sources' losses, each weighted by its share of the
    training sequences; its bytes per token are weighted alike. Each source is measured on the
    same number of tokens, `tokens` in all.
    """
    evaluate = partial(
        evaluate_blocks,
        accelerator,
        mesh,
        model,
        objective,
        micro_batch_size=micro_batch_size,
        stopping=stopping,
    )
    blocks, manifest = data.validation, data.manifest
    if not manifest.sources:
        whole = evaluate(blocks, tokens=tokens, bytes_per_token=manifest.validation.bytes_per_token)
        return whole and (whole, {})
    each = tokens if tokens == "all" else tokens // len(manifest.sources)
    parts: dict[str, MeasuredLoss] = {}
    mean, period = MeasuredLoss(0.0, 0, 0.0), sum(source.weight for source in manifest.sources)
    for source, part in zip(manifest.sources, blocks.parts, strict=True):
        bytes_per_token = source.manifest.validation.bytes_per_token
        found = evaluate(part, tokens=each, bytes_per_token=bytes_per_token)
        if found is None:
            return None
        parts[source.name], share = found, source.weight / period
        mean = MeasuredLoss(
            mean.loss + share * found.loss,
            mean.tokens + found.tokens,
            mean.bytes_per_token + share * bytes_per_token,
        )
    return mean, parts


@torch.no_grad()
def evaluate_text(
    subject: Subject,
    corpus: Corpus,
    *,
    block_size: int,
    stride: int,
    progress: Callable[[int], object] = lambda windows: None,
) -> MeasuredTextLoss:
    """Measure a model, whole on every process, on `corpus`. All processes call it and get the same
    numbers.

    A window starts `stride` tokens after the previous one and predicts only tokens that the
    previous one did not: each token has at least block_size - stride + 1 tokens of context, or
    all there are. With stride = block_size the loss is that of evaluate_blocks on all tokens.
    The windows' losses are summed in float64 at the end, so the number of processes does not
    change the result. `progress` is called with the number of windows done.
    """
    accelerator, mesh, model = subject.accelerator, subject.mesh, subject.model
    blocks = TokenBlocks(corpus.stream, block_size, stride=stride, partial=True)
    windows = np.arange(len(blocks))
    already_predicted = np.where(windows > 0, block_size - stride, 0)
    nats = torch.zeros(len(windows), dtype=torch.float64)
    with eval_mode(model):
        size = subject.batch_size
        for rows, batch in rank_batches(accelerator, mesh, blocks, windows, size, pad=False):
            for row, count in enumerate(already_predicted[rows].tolist()):
                batch["shift_labels"][row, :count] = -100
            with accelerator.autocast():
                losses = model.row_losses(batch["input_ids"], batch["shift_labels"])
            nats[rows] = losses.cpu().double()
            progress(min(size * mesh.dp_cp_size, len(windows) - rows[0]))
    if mesh.world_size > 1:
        nats = sum_over_ranks(accelerator, mesh, nats.to(accelerator.device)).cpu()
    counts = blocks.targets_of(windows) - already_predicted
    total = int(counts.sum())
    error = bootstrap_error(nats.numpy(), counts, windows_at_once=-(-block_size // stride))
    return MeasuredTextLoss(
        nats.sum().item() / total, total, corpus.bytes / len(corpus.stream), error, len(windows)
    )


def evaluation_indices(blocks: Blocks, tokens: int | Literal["all"]) -> np.ndarray:
    """Indices of the blocks that an evaluation on `tokens` tokens, or "all", reads: spread
    evenly, at least one.
    """
    count = (
        len(blocks) if tokens == "all" else min(len(blocks), max(1, tokens // blocks.block_size))
    )
    return np.linspace(0, len(blocks) - 1, count).round().astype(np.int64)


def rank_batches(
    accelerator: Accelerator,
    mesh: Mesh,
    blocks: Blocks,
    indices: np.ndarray,
    batch_size: int,
    *,
    pad: bool,
) -> Iterator[tuple[np.ndarray, dict[str, torch.Tensor]]]:
    """Batches of this rank's blocks, on the device, each with its positions in `indices`; ranks
    alternate by batch.

    With `pad` every rank gets the same number of batches, each with `batch_size` rows: the
    forward pass of a sharded model is a collective.
    """
    positions = np.arange(len(indices))
    for first in range(0, len(indices), batch_size * mesh.dp_cp_size):
        rows = positions[first + mesh.dp_cp_rank * batch_size :][:batch_size]
        if pad or len(rows):
            batch = blocks.batch(indices[rows])
            batch = pad_batch(batch, batch_size) if pad else batch
            yield rows, {name: tensor.to(accelerator.device) for name, tensor in batch.items()}


def pad_batch(batch: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """The batch with `rows` rows; the added ones have no targets."""
    padded = {}
    for name, tensor in batch.items():
        added = tensor.new_full((rows - len(tensor), *tensor.shape[1:]), 0)
        padded[name] = torch.cat([tensor, added.fill_(-100) if name == "shift_labels" else added])
    return padded


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Context in which `model` is in evaluation mode; its mode is restored on exit."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def bootstrap_error(nats: np.ndarray, counts: np.ndarray, windows_at_once: int = 1) -> float:
    """The standard error of sum(nats) / sum(counts): its standard deviation over 1,000 resamples of
    the windows.

    Resampled are runs of `windows_at_once` windows, since overlapping windows are not
    independent. nan for fewer than two runs.
    """
    starts = np.arange(0, len(nats), windows_at_once)
    if len(starts) < 2:
        return math.nan
    nats, counts = np.add.reduceat(nats, starts), np.add.reduceat(counts, starts)
    bits = np.random.Philox(key=_SEED)  # raw bits: no version of NumPy changes them
    means = np.empty(_RESAMPLES)
    for i in range(_RESAMPLES):
        resample = bits.random_raw(len(starts)) % np.uint64(len(starts))
        means[i] = nats[resample].sum() / counts[resample].sum()
    return float(means.std(ddof=1))
