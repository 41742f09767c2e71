"""Estimate the memory of a loss: logits, and gradients of the head and of its input rows."""

from transformers import PreTrainedModel

from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.tensor_parallel import splits_vocabulary
from nanogpt_hf.methods.slices import rows_of_a_slice
from nanogpt_hf.model.loss_gpt import rows_of_a_chunk
from nanogpt_hf.planning.counts import Counts
from nanogpt_hf.planning.teacher import Teacher


def loss_bytes(
    model: PreTrainedModel,
    counts: Counts,
    launch: Launch,
    rows: int,
    row_loss: str,
    teacher: Teacher | None,
) -> tuple[float, float, float]:
    """Bytes of the logits and tensors of their size, and of the loss's gradients of the head and of
    its input rows.

    If all logits are computed at once, both gradients are allocated when the activations are freed.
    """
    value = launch.compute_bytes
    vocabulary = model.config.vocab_size
    # The logits of a vocabulary that processes share are always computed in chunks.
    is_split = launch.tp_size > 1 and splits_vocabulary(model)
    if is_split:
        vocabulary = -(-vocabulary // launch.tp_size)
    device = "cpu" if launch.on_cpu else "cuda"
    is_compiled = launch.compiles and not is_split and not row_loss
    chunk = rows_of_a_chunk(rows, vocabulary, device, is_compiled=is_compiled)
    logits = chunk * vocabulary
    # Log-softmax in float32, with a gradient before and after it.
    by_autograd = 3.0 * 4 * logits
    if row_loss == "sum":
        # Logits, in float32, their log-softmax, and two for the entropy; autograd needs no more.
        each = teacher.bytes_per_logit if teacher else value % 4 + 16.0
        by_autograd = each * logits
        of_a_slice = rows_of_a_slice(chunk, vocabulary, device) * vocabulary
        if of_a_slice < logits:
            # All logits and their gradient. In float32 the logits of a slice are no copy.
            each -= 4.0 * (value == 4)
            by_autograd = 2.0 * value * logits + each * of_a_slice
    if chunk == rows and not is_split and not is_compiled:
        return by_autograd, 0.0, 0.0
    trainable_head = counts.head if counts.head_is_trainable else 0
    # Autograd adds the chunks' gradients in the precision of the product.
    each = value if row_loss == "tokens" else 4
    gradients = (
        float(each * trainable_head),
        float(launch.residual_bytes * rows * model.config.hidden_size),
    )
    if row_loss:
        # Of "tokens" a chunk is computed again in its backward pass.
        return by_autograd, *gradients
    if is_compiled:
        # Logits and their gradient: one kernel computes it from them without a tensor in float32.
        return 2.0 * value * logits, *gradients
    # Logits, and their log-softmax in float32.
    bytes_per_logit = value + 4
    # The products of the backward pass: with the gradient of the logits.
    product = value * logits
    if value < 4:
        # torch casts bf16 logits before the log-softmax, and a chunk's gradient of the head is
        # in bf16 before it is added.
        bytes_per_logit += value if is_split else 4
        product += value * trainable_head
    return max(bytes_per_logit * logits, product), *gradients
