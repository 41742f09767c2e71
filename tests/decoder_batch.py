"""A micro-batch for the tiny models of docs/decoder_types.py, and the gradients of a loss."""

import torch
from decoder_types import VOCAB


def batch(rows: int = 3, length: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(2))
    labels = ids.roll(-1, 1)
    labels[:, -3:] = -100
    return {"input_ids": ids, "shift_labels": labels}


def gradients(model, loss) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
