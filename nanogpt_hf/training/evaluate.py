"""Loss on fixed validation tokens: the same windows at every evaluation, on any number of processes."""

from collections.abc import Callable

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.runs.state import Evaluation
from nanogpt_hf.training.objective import Objective


def evaluation_indices(blocks: Blocks, tokens: int | str) -> np.ndarray:
    """Indices of the blocks that an evaluation on `tokens` tokens, or "all", reads: spread evenly, at least one."""
    wanted = len(blocks) if tokens == "all" else min(len(blocks), max(1, tokens // blocks.block_size))
    return np.linspace(0, len(blocks) - 1, wanted).round().astype(np.int64)


def pad_batch(batch: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """The batch with `rows` rows; the added ones have no targets."""
    return {
        name: F.pad(tensor, (0, 0, 0, rows - len(tensor)), value=-100 if name == "shift_labels" else 0)
        for name, tensor in batch.items()
    }


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    mesh: Mesh,
    model: torch.nn.Module,
    objective: Objective,
    blocks: Blocks,
    *,
    micro_batch_size: int,
    tokens: int | str,
    bytes_per_token: float,
    stopping: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """The token-weighted loss of `model` on `blocks`; of conversations, on their answers.

    All processes call it and get the same number. `stopping` is called after every batch; if it returns true (on all
    processes), the evaluation ends and returns None.
    """
    indices = evaluation_indices(blocks, tokens)
    per_round = micro_batch_size * mesh.dp_size
    exact = torch.float32 if accelerator.device.type == "mps" else torch.float64  # MPS has no float64
    total = torch.zeros((), dtype=exact, device=accelerator.device)
    counted = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    was_training = model.training
    model.eval()
    for first in range(0, len(indices), per_round):  # every process runs every round, if only on padding
        mine = indices[first + mesh.dp_rank * micro_batch_size :][:micro_batch_size]
        batch = pad_batch(blocks.batch(mine), micro_batch_size)
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        total += objective(model, batch)[0].to(exact)
        counted += (batch["shift_labels"] != -100).sum()
        if stopping():
            model.train(was_training)
            return None
    model.train(was_training)
    total, counted = (accelerator.reduce(part, "sum").item() for part in (total, counted))
    return Evaluation(total / counted, counted, bytes_per_token)
