"""Loss on fixed validation tokens: the same windows at every evaluation, on any number of processes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator

from nanogpt_hf.data.tokens import TokenStream


@dataclass(frozen=True)
class Evaluation:
    loss: float  # mean over the tokens, in nats
    tokens: int
    bytes_per_token: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers: nats a token -> bits a byte of the split's text."""
        return self.loss / math.log(2) / self.bytes_per_token


def evaluation_windows(length: int, block_size: int, tokens: int | str) -> list[tuple[int, int]]:
    """(start, predicted tokens) of the windows that predict `tokens` of a stream of `length`, or all of it.

    Windows lie end to end; where not all are wanted, they are spread evenly over the stream.
    """
    starts = np.arange(0, length - 1, block_size)
    wanted = len(starts) if tokens == "all" else min(len(starts), max(1, tokens // block_size))
    chosen = starts[np.linspace(0, len(starts) - 1, wanted).round().astype(int)]
    return [(int(start), min(block_size, length - 1 - int(start))) for start in chosen]


def evaluation_batch(
    stream: TokenStream, windows: list[tuple[int, int]], rows: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """input_ids and targets, int64 (rows, block_size); what no window fills has target -100 and is not counted."""
    inputs = torch.zeros(rows, block_size, dtype=torch.int64)
    targets = torch.full((rows, block_size), -100, dtype=torch.int64)
    for row, (start, count) in enumerate(windows):
        window = torch.from_numpy(stream.windows(np.array([start]), count + 1)[0])
        inputs[row, :count], targets[row, :count] = window[:-1], window[1:]
    return inputs, targets


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: torch.nn.Module,
    stream: TokenStream,
    *,
    block_size: int,
    micro_batch_size: int,
    tokens: int | str,
    bytes_per_token: float,
    stopping: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """The token-weighted loss of `model` on `stream`. All processes call it and get the same answer.

    `stopping` is asked after every batch; where it says yes (on all processes), there is no answer but None.
    """
    windows = evaluation_windows(len(stream), block_size, tokens)
    per_round = micro_batch_size * accelerator.num_processes
    exact = torch.float32 if accelerator.device.type == "mps" else torch.float64  # MPS has no float64
    total = torch.zeros((), dtype=exact, device=accelerator.device)
    was_training = model.training
    model.eval()
    for first in range(0, len(windows), per_round):  # every process runs every round, if only on padding
        mine = windows[first + accelerator.process_index * micro_batch_size :][:micro_batch_size]
        inputs, targets = evaluation_batch(stream, mine, micro_batch_size, block_size)
        out = model(
            input_ids=inputs.to(accelerator.device),
            shift_labels=targets.to(accelerator.device),
            num_items_in_batch=1,
            skip_logits=True,
            use_cache=False,
        )
        total += out.loss.to(exact)
        if stopping():
            model.train(was_training)
            return None
    model.train(was_training)
    counted = sum(count for _, count in windows)
    return Evaluation(accelerator.reduce(total, "sum").item() / counted, counted, bytes_per_token)
