"""A loss of rows from their logits, which is computed for a slice of the rows at a time.

A loss with a teacher's distribution or an entropy takes up to 56 bytes for each logit until its
gradient is there. So the gradient of a slice is computed directly after its loss: only logits and
their gradient are as large as a chunk of the head (model/loss_gpt.py).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from nanogpt_hf.model.loss_gpt import RowLoss, rows_of_a_chunk

# A slice has at most this part of the largest chunk's logits.
SLICES_PER_CHUNK = 8


def rows_of_a_slice(rows: int, vocab_size: int, device_type: str) -> int:
    """Rows of a slice: all of them if they have few logits."""
    return rows_of_a_chunk(rows, SLICES_PER_CHUNK * vocab_size, device_type)


def sum_of_slices(loss_of: RowLoss, chunk: slice, logits: Tensor, targets: Tensor) -> Any:
    """Sum `loss_of` over slices of a chunk of rows, with their logits (R, V) and targets (R,)."""
    count, vocab_size = logits.shape
    size = rows_of_a_slice(count, vocab_size, logits.device.type)
    if size == count:
        return loss_of(chunk, logits, targets)
    first = chunk.start or 0

    def loss_at(start: int, part: Tensor) -> Tensor:
        rows = slice(first + start, first + start + len(part))
        return loss_of(rows, part, targets[start : start + len(part)])

    if torch.is_grad_enabled() and logits.requires_grad:
        return _SlicedLoss.apply(logits, loss_at, size)
    return sum(loss_at(n * size, part) for n, part in enumerate(logits.split(size)))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


class _SlicedLoss(torch.autograd.Function):
    """Summed loss with its gradient by the logits. The backward pass only scales it."""

    @staticmethod
    def forward(ctx, logits, loss_at, size):  # pyright: ignore[reportIncompatibleMethodOverride]
        gradient = torch.empty_like(logits)
        total = torch.zeros((), device=logits.device)
        for start in range(0, len(logits), size):
            part = logits[start : start + size].detach().requires_grad_()
            # Hooks that keep nothing else: under those of a checkpoint, as of `recomputed_loss`,
            # the gradient of each slice would compute the whole chunk again.
            with torch.enable_grad(), saved_tensors_hooks(_unchanged, _unchanged):
                loss = loss_at(start, part)
                (gradient[start : start + size],) = torch.autograd.grad(loss, part)
            total += loss.detach()
        ctx.save_for_backward(gradient)
        ctx.size = size
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, by_total):  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        # In float32, since a divisor rounded to bf16 would scale all gradients by up to 0.4%.
        for part in gradient.split(ctx.size):
            part.copy_(part.float().mul_(by_total))
        return gradient, None, None
