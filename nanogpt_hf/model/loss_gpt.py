"""Chunked cross-entropy for a large vocabulary, which never holds all logits in memory.

GPT-2 has 50,257 logits per token, more than all other activations of a small GPT: 12 rows of 1,024
tokens have 2.5 GB of logits in float32, and their gradient is as large. So logits are computed for
a chunk of rows at a time, and each chunk's gradient directly after its loss, while its logits
exist. At most LOGITS_PER_CHUNK logits are in memory, however large the batch is.

`whole_loss` computes all logits at once, `chunked_loss` gradients in the forward pass, and
`recomputed_loss` logits again in the backward pass; head_gpt.py chooses. On a CPU torch 2.13's own
`F.linear_cross_entropy` took 6.7 times as long. Imports nothing of the package, so that these pages
can be read and copied alone.

Shapes in comments: N rows, R rows of a chunk, C n_embd, V rows of the head's matrix, padded ones
included.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Logits are computed for at most this many (row, vocabulary) pairs at once: 256 MiB in float32.
LOGITS_PER_CHUNK = 2**26
# A GPU gets larger chunks: each one starts kernels and adds a whole gradient of the head. A
# compiled loss holds no logits in float32, so its chunks are larger still. The size depends on the
# kind of device and on compilation, never on free memory, which would change the rounding.
CHUNKS_OF_A_GPU = 4
CHUNKS_OF_A_COMPILED_GPU = 16
IGNORED = -100  # a target that is not counted
# Another loss than the cross-entropy: (which of the N rows, their logits (R, V), targets (R,)) ->
# the summed loss, to which rows with an IGNORED target add nothing. Only `token_losses` returns the
# loss of each row, (R,). If it has `first_pass`, that is called in the same way for all N rows
# before it, without a gradient: for a loss of a row that depends on other rows.
RowLoss = Callable[[slice, torch.Tensor, torch.Tensor], torch.Tensor]


def rows_of_a_chunk(
    rows: int, vocab_size: int, device_type: str = "cpu", *, is_compiled: bool = False
) -> int:
    """Rows of a chunk: as many as LOGITS_PER_CHUNK allows, or down to half as many if all chunks
    are then equal. Another device than a CPU gets CHUNKS_OF_A_GPU times as many, and
    CHUNKS_OF_A_COMPILED_GPU times if the loss is compiled.
    """
    logits = LOGITS_PER_CHUNK
    if device_type != "cpu":
        logits *= CHUNKS_OF_A_COMPILED_GPU if is_compiled else CHUNKS_OF_A_GPU
    limit = max(1, logits // vocab_size)
    if rows <= limit:
        return rows
    # With equal chunks a compiled function sees one shape only.
    for size in range(limit, limit // 2, -1):
        if rows % size == 0:
            return size
    return limit


def cap_logits(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Final logit soft-capping: softcap * tanh(logits / softcap), as in Gemma 2
    (arXiv:2408.00118).
    """
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def head_logits(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    vocab_size: int,
    softcap: float | None,
) -> torch.Tensor:
    """(R, C), (V, C) -> logits (R, V), capped, -inf from number `vocab_size` on."""
    logits = F.linear(rows, weight, bias)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    logits[:, vocab_size:] = -torch.inf  # softmax 0; slicing instead would copy
    return logits


def cap_gradient(
    gradient: torch.Tensor, logits: torch.Tensor, vocab_size: int, softcap: float
) -> None:
    """Multiply the gradient by capped logits with the derivative of the cap, 1 - tanh²;
    overwrites the logits.
    """
    # d/dx [softcap · tanh(x / softcap)] = 1 - tanh²(x / softcap), and the capped logits divided by
    # softcap are that tanh.
    gradient[:, :vocab_size] *= logits[:, :vocab_size].div_(softcap).square_().neg_().add_(1)


def subtract_one_at(gradient: torch.Tensor, index: torch.Tensor, amount: torch.Tensor) -> None:
    """Subtract `amount` (R, 1) from column `index` (R, 1) of each row of `gradient` (R, V), in
    place.

    On a GPU and in compiled code all columns are compared with the index: that fuses with the
    exponential before it, and needs no atomic addition, whose deterministic form sorts. Without a
    compiler, a CPU would read and write the gradient twice more for it.
    """
    if torch.compiler.is_compiling() or gradient.is_cuda:
        columns = torch.arange(gradient.shape[1], device=gradient.device)
        gradient -= (columns == index).to(gradient.dtype) * amount
    else:
        gradient.scatter_add_(1, index, -amount)


def chunk_loss(
    rows: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
):
    """(R, C), (V, C), (R,) -> summed cross-entropy in float32, and its gradient by the logits (R,
    V) in rows' dtype.

    The gradient is softmax minus one at the target, times the derivative of the cap. A row with an
    IGNORED target gets the gradient of token 0, which the caller leaves out.
    """
    logits = head_logits(rows, weight, bias, vocab_size, softcap)  # (R, V)
    # In float32 also under bf16, whose 8 bits would round away small differences of the loss.
    log_softmax = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    counts = targets != IGNORED  # (R,)
    index = targets.where(counts, 0)[:, None]  # (R, 1)
    # The cross-entropy of a row is -log p(target).
    loss = -log_softmax.gather(1, index)[:, 0].where(counts, 0.0).sum()
    # Its derivative by logit v is p(v) - [v is the target]. exp_ makes p of log p in place.
    gradient = log_softmax.exp_()
    subtract_one_at(gradient, index, torch.ones_like(index, dtype=gradient.dtype))
    if softcap is not None:
        cap_gradient(gradient, logits, vocab_size, softcap)
    return loss, gradient.to(rows.dtype)


def whole_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    vocab_size: int,
    softcap: float | None,
    row_loss: RowLoss | None,
) -> torch.Tensor:
    """(N, C), (V, C), (V,), (N,) -> summed cross-entropy, or `row_loss`, of all logits at once.

    Compiled it is one graph. The host starts about 20 small operations less than around a chunk.
    """
    logits = cap_logits(F.linear(hidden, weight, bias)[:, :vocab_size], softcap)
    return (row_loss or cross_entropy)(slice(None), logits, targets)


def chunk_row_loss(
    rows: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    *,
    row_loss: Any,
):
    """Do the same as `chunk_loss` for a loss `row_loss`, whose gradient autograd computes."""
    # Autograd begins at the logits and ends at the loss: it holds one chunk's graph, no more.
    logits = F.linear(rows, weight, bias).requires_grad_()
    with torch.enable_grad():
        loss = row_loss(cap_logits(logits[:, :vocab_size], softcap), targets)
        (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), gradient


def cross_entropy(chunk, logits, targets):
    """Cross-entropy as a RowLoss, in float32: the loss of a model that is given no other."""
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def token_losses(chunk, logits, targets):
    """The cross-entropy of each row (R,), in float32; 0 for rows with an IGNORED target.

    As the `row_loss` of a model, the loss of its output has one value per target, (N,).
    """
    return F.cross_entropy(logits.float(), targets, reduction="none")


def recomputed_loss(logits_of, hidden, targets, vocab_size, softcap=None, row_loss=None) -> Any:
    """Summed loss of rows (N, C), or `token_losses` (N,), chunk by chunk, for any function from
    rows to logits.

    Each chunk's logits are computed again in the backward pass instead of being kept for it. That
    costs a fourth product with the head, and works for any head that returns logits.
    """

    def loss_of(chunk, rows, row_targets):
        logits = cap_logits(logits_of(rows)[:, :vocab_size], softcap)
        return (row_loss or cross_entropy)(chunk, logits, row_targets)

    size = rows_of_a_chunk(len(hidden), vocab_size, hidden.device.type)
    if size == len(hidden):
        return loss_of(slice(None), hidden, targets)
    losses = []
    for start in range(0, len(hidden), size):
        chunk = slice(start, start + size)
        loss = checkpoint(
            loss_of,
            chunk,
            hidden[chunk],
            targets[chunk],
            use_reentrant=False,
            preserve_rng_state=False,  # the head draws no numbers
        )
        losses.append(loss)
    return torch.cat(losses) if row_loss is token_losses else sum(losses)


def chunked_loss(hidden, weight, bias, targets, vocab_size, size, loss_of, row_loss=None):
    """Summed loss whose gradients are computed in the forward pass; the backward pass only scales
    them.

    `loss_of` is called for each chunk of `size` rows: `chunk_loss`, or another function that gives
    the loss and its gradient by the logits. With `row_loss` it is `chunk_row_loss`.

    The head takes part in three products of (N, C) with (C, V): logits, the gradient of the rows,
    and the gradient of the weight. Recomputing logits in the backward pass would be a fourth.
    """
    is_training = torch.is_grad_enabled()
    hidden = hidden if is_training else hidden.detach()
    needs_weight = is_training and weight.requires_grad
    needs_bias = is_training and bias is not None and bias.requires_grad
    bias_value = None if bias is None else bias.detach()
    # Autograd gives the hidden states their gradient by `_ChunkedLoss`, weight and bias by `_Zero`.
    loss, *gradients = _ChunkedLoss.apply(
        hidden,
        weight.detach(),
        bias_value,
        targets,
        vocab_size,
        size,
        loss_of,
        row_loss,
        (needs_weight, needs_bias),
    )
    if needs_weight or needs_bias:
        loss = loss + _Zero.apply(weight, bias, *gradients)
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """Summed loss with its gradient by the hidden states. Also returns the gradients of weight and
    bias that are `needed`.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, vocab_size, size, loss_of, row_loss, needed):
        device = hidden.device.type
        dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        )
        needs_weight, needs_bias = needed
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed in float32, whatever the dtype of the chunks: in bf16 the small gradients of later
        # chunks would be lost in a large sum.
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        total = torch.zeros((), device=hidden.device)
        with torch.autocast(device, enabled=False):
            matrix = weight.to(dtype)
            if bias is not None:
                loss_of = partial(loss_of, bias=bias.to(dtype))
            for start in range(0, len(hidden), size):
                chunk = slice(start, start + size)
                rows = hidden[chunk].to(dtype)  # (R, C)
                counts = (targets[chunk] != IGNORED)[:, None]  # (R, 1)
                own = {"row_loss": partial(row_loss, chunk)} if row_loss else {}
                loss, by_logits = loss_of(rows, matrix, targets[chunk], vocab_size, **own)
                total += loss
                # logits = rows @ matrix.T, so the chain rule gives (R, V) @ (V, C) for the rows,
                # and (V, R) @ (R, C) for the matrix. Rows without a target have no gradient.
                if hidden_gradient is not None:
                    hidden_gradient[chunk] = (by_logits @ matrix) * counts
                if weight_gradient is not None:
                    _add_product(weight_gradient, by_logits.T, rows * counts)
                if bias_gradient is not None:
                    bias_gradient += (by_logits * counts).sum(0)
                # Else it would stay in memory while the next chunk's logits are computed.
                del by_logits
        ctx.save_for_backward(hidden_gradient)
        ctx.mark_non_differentiable(
            *(tensor for tensor in (weight_gradient, bias_gradient) if tensor is not None)
        )
        ctx.set_materialize_grads(False)  # no zeros as the gradients of these two
        return total, weight_gradient, bias_gradient

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, by_total, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        (hidden_gradient,) = ctx.saved_tensors
        # In float32: a divisor rounded to bf16 would scale the gradients of all lower layers by up
        # to 0.4%.
        hidden_gradient = (hidden_gradient.float() * by_total).to(hidden_gradient.dtype)
        return hidden_gradient, *[None] * 8


def _add_product(total, left, right):
    """Add `left` (V, R) times `right` (R, C) to `total` (V, C), which is in float32, in place."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif total.is_cuda:
        # One product that adds in float32: no chunk's gradient is rounded or stored.
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


class _Zero(torch.autograd.Function):
    """Zero, whose derivatives by weight and bias are the given gradients.

    It scales them in place, which saves a copy of the head's matrix. A zero-bubble pipeline runs
    the backward pass in two parts. If `_ChunkedLoss` scaled these gradients too, the second part
    would find what the first has changed.
    """

    @staticmethod
    def forward(ctx, weight, bias, weight_gradient, bias_gradient):
        ctx.save_for_backward(weight_gradient, bias_gradient)
        ctx.dtype = weight.dtype
        return torch.zeros((), device=weight.device)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, by_zero):  # pyright: ignore[reportIncompatibleMethodOverride]
        weight_gradient, bias_gradient = ctx.saved_tensors
        if weight_gradient is not None:
            weight_gradient = weight_gradient.mul_(by_zero).to(ctx.dtype)
        if bias_gradient is not None:
            bias_gradient = (bias_gradient * by_zero).to(ctx.dtype)
        return weight_gradient, bias_gradient, None, None
