"""Count what autograd saves of a block of any architecture, on fake tensors: nothing is
allocated or computed.
"""

import copy
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.experts import shapes_only
from nanogpt_hf.model.written_out import write_out_attention


@lru_cache(maxsize=16)
def saved_block_bytes(
    model: PreTrainedModel, block_size: int, *, autocast: bool, half: bool, written_out: bool
) -> float:
    """Bytes per token that autograd saves of the top block of a model on the meta device.

    `autocast`: products in bfloat16; `half`: weights in bfloat16, too; `written_out`: attention
    of model/written_out.py. As the CPU's kernels do it. The difference of two batches leaves out
    what does not grow with the batch: weights and their casts, tables of angles.
    """
    model = copy.deepcopy(model).train()
    if half:
        model.bfloat16()
    if written_out:
        write_out_attention(model)
    blocks = architecture_of(model).blocks(model)
    if len(set(getattr(model.config, "layer_types", None) or ())) <= 1:
        del blocks[:-1]  # the top block has no other kind of attention: faster
    with FakeTensorMode(allow_non_fake_inputs=True), shapes_only():
        model.to_empty(device="cpu")
        batches = [torch.zeros(rows, block_size, dtype=torch.long) for rows in (1, 2)]
        one, two = (_saved_bytes(model, blocks[-1], tokens, autocast) for tokens in batches)
    return (two - one) / block_size


@lru_cache(maxsize=16)
def narrower(model: PreTrainedModel, tp: int) -> PreTrainedModel:
    """A model whose blocks are as wide as those of one of `tp` tensor-parallel ranks, on the meta
    device.

    The residual stream keeps its width, heads and MLP are divided.
    """
    if tp == 1:
        return model
    config = copy.deepcopy(model.config)
    config.head_dim = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(config, name, getattr(config, name) // tp)
    with torch.device("meta"):
        return type(model)(config)


def _saved_bytes(
    model: PreTrainedModel, block: nn.Module, tokens: torch.Tensor, autocast: bool
) -> int:
    """Bytes of the storages that autograd saves while `block` runs."""
    # kept, so that no storage is freed and its place used again
    saved: dict[int, torch.UntypedStorage] = {}
    is_inside = False

    def switch(*_: Any) -> None:
        nonlocal is_inside
        is_inside = not is_inside

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if is_inside:
            storage = tensor.untyped_storage()
            saved[id(storage)] = storage
        return tensor

    hooks = block.register_forward_pre_hook(switch), block.register_forward_hook(switch)
    noting = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with noting, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(
            input_ids=tokens,
            shift_labels=tokens,
            num_items_in_batch=1,
            skip_logits=True,
            use_cache=False,
        )
    for hook in hooks:
        hook.remove()
    return sum(storage.nbytes() for storage in saved.values())
