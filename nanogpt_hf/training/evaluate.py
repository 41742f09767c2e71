"""Loss on fixed validation tokens: the same windows at every evaluation, on any number of processes."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from nanogpt_hf.data.examples import Examples
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


def fill_up(batch: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """The batch with `rows` rows; in those that are added nothing is counted."""
    return {
        name: F.pad(tensor, (0, 0, 0, rows - len(tensor)), value=-100 if name == "shift_labels" else 0)
        for name, tensor in batch.items()
    }


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: torch.nn.Module,
    stream: TokenStream | Examples,
    *,
    block_size: int,
    micro_batch_size: int,
    tokens: int | str,
    bytes_per_token: float,
    stopping: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """The token-weighted loss of `model` on `stream`; of conversations, on their answers.

    All processes call it and get the same number. `stopping` is asked after every batch; where it says yes (on all
    processes), there is no answer but None.
    """
    windows = evaluation_windows(stream.positions + 1, block_size, tokens)
    starts = np.array([start for start, _ in windows], dtype=np.int64)
    per_round = micro_batch_size * accelerator.num_processes
    exact = torch.float32 if accelerator.device.type == "mps" else torch.float64  # MPS has no float64
    total = torch.zeros((), dtype=exact, device=accelerator.device)
    counted = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    was_training = model.training
    model.eval()
    for first in range(0, len(starts), per_round):  # every process runs every round, if only on padding
        mine = starts[first + accelerator.process_index * micro_batch_size :][:micro_batch_size]
        batch = fill_up(stream.batch(mine, block_size), micro_batch_size)
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        total += model(**batch, num_items_in_batch=1, skip_logits=True, use_cache=False).loss.to(exact)
        counted += (batch["shift_labels"] != -100).sum()
        if stopping():
            model.train(was_training)
            return None
    model.train(was_training)
    total, counted = (accelerator.reduce(part, "sum").item() for part in (total, counted))
    return Evaluation(total / counted, counted, bytes_per_token)
