"""Loss, perplexity and bits a byte of a model on text, each with its standard error, on any number of processes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator

from nanogpt_hf.data.blocks import TokenBlocks
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.evaluation.corpus import Corpus
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM
from nanogpt_hf.runs.state import Evaluation

_RESAMPLES = 1000
_SEED = 1337


@dataclass(frozen=True)
class TextEvaluation(Evaluation):
    """The loss and its like over `tokens` predicted tokens. The standard errors are bootstrapped."""

    loss_error: float  # nan where there is too little text to tell
    windows: int

    def figures(self) -> dict[str, float | int | None]:
        """All of it by name, as JSON has it: what is not known is null."""
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
def evaluate_text(
    accelerator: Accelerator,
    mesh: Mesh,
    model: GPTForCausalLM,
    corpus: Corpus,
    *,
    block_size: int,
    stride: int,
    batch_size: int,
    progress: Callable[[int], None] = lambda windows: None,
) -> TextEvaluation:
    """Measure `model`, whole on every process, on `corpus`. All processes call it and get the same answer.

    A window starts `stride` tokens after the one before it and predicts only tokens that the one before did not: a
    token has at least block_size - stride + 1 tokens of context, or all there are. With stride = block_size the windows
    lie end to end, as in an evaluation during training. Processes take the batches in turn, and windows are added up in
    float64 at the end, so their number does not matter. `progress` is called with the number of windows done.
    """
    blocks = TokenBlocks(corpus.stream, block_size, stride=stride, partial=True)
    windows = np.arange(len(blocks))
    already_predicted = np.where(windows > 0, block_size - stride, 0)
    nats = torch.zeros(len(windows), dtype=torch.float64)
    was_training = model.training
    model.eval()
    step = batch_size * mesh.dp_size
    for first in range(mesh.dp_rank * batch_size, len(windows), step):
        some = windows[first : first + batch_size]
        inputs, targets = (tensor.to(accelerator.device) for tensor in blocks.batch(some).values())
        for row, count in enumerate(already_predicted[some].tolist()):
            targets[row, :count] = -100
        with accelerator.autocast():
            hidden = model.transformer(inputs, use_cache=False).last_hidden_state
            sums = torch.stack([model.summed_loss(*row) for row in zip(hidden, targets, strict=True)])
        nats[some] = sums.cpu().double()
        progress(min(step, len(windows) - first))
    model.train(was_training)
    if mesh.world_size > 1:
        nats = accelerator.reduce(nats.to(accelerator.device), "sum").cpu()
    counts = blocks.targets_of(windows) - already_predicted
    total = int(counts.sum())
    error = bootstrap_error(nats.numpy(), counts, windows_at_once=-(-block_size // stride))
    return TextEvaluation(nats.sum().item() / total, total, corpus.bytes / len(corpus.stream), error, len(windows))


def bootstrap_error(nats: np.ndarray, counts: np.ndarray, windows_at_once: int = 1) -> float:
    """The standard error of sum(nats) / sum(counts): its standard deviation over 1,000 resamples of the windows.

    What is drawn are runs of `windows_at_once` windows, since windows that overlap are far from independent. nan where
    there are fewer than two runs.
    """
    starts = np.arange(0, len(nats), windows_at_once)
    if len(starts) < 2:
        return math.nan
    nats, counts = np.add.reduceat(nats, starts), np.add.reduceat(counts, starts)
    bits = np.random.Philox(key=_SEED)  # raw bits: no version of NumPy changes them
    means = np.empty(_RESAMPLES)
    for i in range(_RESAMPLES):
        drawn = bits.random_raw(len(starts)) % np.uint64(len(starts))
        means[i] = nats[drawn].sum() / counts[drawn].sum()
    return float(means.std(ddof=1))
