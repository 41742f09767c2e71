"""Activation checkpointing: which blocks the backward pass computes again, and what they keep.

A block then keeps its input alone instead of all activations, and costs a second forward pass
(Chen et al. 2016, arXiv:1604.06174). Levels are values of fsdp_activation_checkpointing: `true` for
all blocks, a number n for one block of n, `selective` for all blocks, which keep the results of
matrix products and attention.
"""

import functools
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import plural
from nanogpt_hf.model.architecture import architecture_of

SELECTIVE = "selective"
# Matrix products and attention take most of the time of a forward pass, and their results a part of
# the memory. All else is cheap to compute again.
_KEPT = ("mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu")
_KEPT += tuple(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))
_PACKETS = [getattr(torch.ops.aten, name) for name in _KEPT]


def interval(level: str) -> int:
    """One block of how many is computed again."""
    return int(level) if level.isdecimal() else 1


def check_level(level: str, blocks: int) -> None:
    """Raises UserError if a model of `blocks` blocks cannot have this level."""
    if interval(level) > blocks:
        raise UserError(
            f"fsdp_activation_checkpointing {level}: the model has {plural(blocks, 'block')}; set "
            "true, or a smaller number"
        )


def is_kept(operation: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether a selective block keeps the result of an operation.

    Attention with dropout is computed again: its mask has to be drawn again, or all later masks
    would be others. Its probability is the only number among the arguments.
    """
    draws = any(isinstance(argument, float) and argument for argument in arguments)
    # Flex attention is no such operation and has no overloads.
    return getattr(operation, "overloadpacket", None) in _PACKETS and not draws


def recompute_blocks(model: PreTrainedModel, level: str) -> None:
    """Make blocks of a model compute their activations again in the backward pass, in place.

    Their forward pass is replaced, so that the hooks of FSDP2 and DDP run once.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if level == SELECTIVE:

        def policy(context: Any, operation: Any, *arguments: Any, **_: Any) -> CheckpointPolicy:
            if is_kept(operation, arguments):
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        # PyTorch's selective checkpointing asks the policy at each operation of the forward pass.
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    for block in architecture_of(model).blocks(model)[:: interval(level)]:
        # In the module's own dict, which is looked up before its class: names of parameters stay.
        forward = functools.partial(checkpoint, block.forward, **options)
        vars(block)["forward"] = functools.update_wrapper(forward, block.forward)
