"""Loss, perplexity and bits a byte of a model on text, each with its standard error, on any number of processes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator

from nanogpt_hf.data.tokens import TokenStream
from nanogpt_hf.evaluation.corpus import Corpus
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM
from nanogpt_hf.training.evaluate import Evaluation, evaluation_batch

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


def sliding_windows(length: int, block_size: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, tokens read, predictions left out) of windows that predict all but the first of `length` tokens once.

    A window starts `stride` tokens after the one before it and predicts what that one has not: a token has at least
    block_size - stride + 1 tokens of context, or all there are. With stride = block_size the windows lie end to end, as
    at an evaluation during training.
    """
    windows, predicted = [], 0
    for start in range(0, max(0, length - 1), stride):
        end = min(start + block_size, length - 1)
        windows.append((start, end - start, predicted - start))
        predicted = end
        if end == length - 1:
            break
    return windows


def window_batch(
    stream: TokenStream, windows: list[tuple[int, int, int]], block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and targets, int64 (windows, block_size); target -100 is not counted."""
    places = [(start, count) for start, count, _ in windows]
    inputs, targets = evaluation_batch(stream, places, len(windows), block_size)
    for row, (_, _, left_out) in enumerate(windows):
        targets[row, :left_out] = -100
    return inputs, targets


@torch.no_grad()
def evaluate_text(
    accelerator: Accelerator,
    model: GPTForCausalLM,
    corpus: Corpus,
    *,
    block_size: int,
    stride: int,
    batch_size: int,
    progress: Callable[[int], None] = lambda windows: None,
) -> TextEvaluation:
    """Measure `model`, whole on every process, on `corpus`. All processes call it and get the same answer.

    They take the batches in turn, and windows are added up in float64 at the end, so their number does not matter.
    `progress` is told how many windows were done.
    """
    windows = sliding_windows(len(corpus.stream), block_size, stride)
    nats = torch.zeros(len(windows), dtype=torch.float64)
    was_training = model.training
    model.eval()
    step = batch_size * accelerator.num_processes
    for first in range(accelerator.process_index * batch_size, len(windows), step):
        batch = windows[first : first + batch_size]
        inputs, targets = (x.to(accelerator.device) for x in window_batch(corpus.stream, batch, block_size))
        with accelerator.autocast():
            hidden = model.transformer(inputs, use_cache=False).last_hidden_state
            sums = torch.stack([model.summed_loss(*row) for row in zip(hidden, targets, strict=True)])
        nats[first : first + len(batch)] = sums.cpu()
        progress(min(step, len(windows) - first))
    model.train(was_training)
    if accelerator.num_processes > 1:
        nats = accelerator.reduce(nats.to(accelerator.device), "sum").cpu()
    counts = np.array([count - left_out for _, count, left_out in windows])
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
