"""The loss of a large vocabulary: cross-entropy that never holds all of its logits.

GPT-2's logits are 50,257 numbers a token, more than all else that a small GPT keeps for its backward pass. So they are
computed for a chunk of rows at a time, and each chunk's gradient is taken as soon as its loss is known, when the logits
are still there. Flat and self-contained on purpose (with its three neighbours): it may travel with a model.

Shapes in comments: N rows, R rows of a chunk, C n_embd, V rows of the head's matrix, padded ones included.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Logits are computed for at most this many (row, vocabulary) pairs at once: 256 MiB in float32.
LOGITS_PER_CHUNK = 2**26
IGNORED = -100  # a target that does not count


def rows_of_a_chunk(rows: int, vocab_size: int) -> int:
    """As many of `rows` as LOGITS_PER_CHUNK allows, or up to half as many where that divides them into equal chunks.

    Of equal chunks a compiled function sees one shape only.
    """
    most = max(1, LOGITS_PER_CHUNK // vocab_size)
    if rows <= most:
        return rows
    return next((size for size in range(most, most // 2, -1) if rows % size == 0), most)


def loss_and_gradient(rows: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int):
    """(R, C), (V, C), (R,) -> summed cross-entropy in float32, and its gradient by the logits (R, V) in rows' dtype.

    That gradient is softmax less one at the target. Rows whose target is IGNORED have theirs as if it were token 0.
    """
    logits = F.linear(rows, weight)
    logits[:, vocab_size:] = -torch.inf  # no copy, as leaving them out would be; their softmax is 0
    log_softmax = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    counts = targets != IGNORED
    index = targets.where(counts, 0)[:, None]
    loss = -log_softmax.gather(1, index)[:, 0].where(counts, 0.0).sum()
    gradient = log_softmax.exp_()
    gradient.scatter_add_(1, index, torch.full_like(index, -1.0, dtype=gradient.dtype))
    return loss, gradient.to(rows.dtype)


class Head(nn.Linear):
    """The last layer: hidden (..., C) -> logits (..., V), or where targets are given, the loss itself.

    The loss is taken in here since this is where the weight is sure to be whole: FSDP2 and ZeRO-3 gather it for a call.
    """

    loss_and_gradient = staticmethod(loss_and_gradient)  # whoever compiles the model may put a compiled one here

    def forward(self, hidden, targets=None, vocab_size=None):
        if targets is None:
            return super().forward(hidden)
        size = rows_of_a_chunk(len(hidden), vocab_size)
        if size < len(hidden) and torch.is_grad_enabled():
            return _LossWithGradients.apply(hidden, self.weight, targets, vocab_size, size, self.loss_and_gradient)
        return _loss_in_chunks(super().forward, hidden, targets, vocab_size)


def summed_loss(head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """(N, C), (N,) -> sum of the cross-entropies in float32. Logits from number `vocab_size` on are padding.

    A head that somebody has put in the place of ours (an adapter, a quantised one) does no more than logits.
    """
    if isinstance(head, Head):
        return head(hidden, targets, vocab_size)
    return _loss_in_chunks(head, hidden, targets, vocab_size)


def _loss_in_chunks(logits_of, hidden, targets, vocab_size):
    def loss_of(rows, row_targets):
        return F.cross_entropy(logits_of(rows)[:, :vocab_size].float(), row_targets, reduction="sum")

    size = rows_of_a_chunk(len(hidden), vocab_size)
    if size == len(hidden):
        return loss_of(hidden, targets)
    # Each chunk's logits are computed again in the backward pass instead of being kept for it.
    return sum(
        checkpoint(loss_of, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden.split(size), targets.split(size), strict=True)
    )


class _LossWithGradients(torch.autograd.Function):
    """The loss, with its gradients taken in the forward pass: they are scaled in the backward pass, no more.

    Logits computed again in the backward pass would cost one more of the head's three matrix products.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, vocab_size, size, gradient):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        # added up in float32, whatever the chunks' are
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        total = torch.zeros((), device=hidden.device)
        with torch.autocast(device, enabled=False):
            matrix = weight.to(dtype)
            for start in range(0, len(hidden), size):
                chunk = slice(start, start + size)
                rows, counts = hidden[chunk].to(dtype), (targets[chunk] != IGNORED)[:, None]
                loss, by_logits = gradient(rows, matrix, targets[chunk], vocab_size)
                total += loss
                if needs_hidden:
                    hidden_gradient[chunk] = (by_logits @ matrix) * counts
                if needs_weight and dtype == torch.float32:
                    weight_gradient.addmm_(by_logits.T, rows * counts)
                elif needs_weight:
                    weight_gradient += by_logits.T @ (rows * counts)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, by_total):
        hidden_gradient, weight_gradient = ctx.saved_tensors
        if hidden_gradient is not None:
            # in float32: a mean's divisor, rounded to bf16, would scale all that lies below by up to 0.4%
            hidden_gradient = (hidden_gradient.float() * by_total).to(hidden_gradient.dtype)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.mul_(by_total).to(ctx.weight_dtype)
        return hidden_gradient, weight_gradient, None, None, None, None
