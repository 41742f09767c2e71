"""Bytes that a model keeps: what autograd saves of a block, and a key-value cache. Blocks run on
tensors without values, which have sizes only.
"""

import copy
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.experts import shapes_only
from nanogpt_hf.model.head_gpt import CACHE
from nanogpt_hf.model.recompute import is_kept
from nanogpt_hf.model.written_out_attention import write_out_attention
from nanogpt_hf.planning.counts import one_rank_of


class GpuKernels(TorchFunctionMode):
    """Dropout and attention as a GPU's kernels do them, which a CPU has not: masks are bool, and
    dropout of attention keeps no matrix.
    """

    def __torch_function__(self, func, types, args=(), kwargs: Any = None):
        kwargs = kwargs or {}
        # The flash kernels draw dropout again in the backward pass.
        if func is F.scaled_dot_product_attention:
            kwargs = kwargs | {"dropout_p": 0.0}
        if func is F.dropout and kwargs["p"]:
            return torch.native_dropout(args[0], kwargs["p"], kwargs["training"])[0]
        return func(*args, **kwargs)


def block_bytes(model: PreTrainedModel, block_size: int, launch: Launch) -> tuple[float, float]:
    """Bytes per token that autograd saves of a block of a model on the meta device, and what
    selective checkpointing keeps in addition to its input. The mean if there are several kinds.

    The difference of two batches leaves out what does not grow with the batch: weights and their
    casts, tables of angles.
    """
    # What decides them, so that launches share a cached result.
    return _block_bytes(
        model,
        block_size,
        tp=launch.tp_size,
        autocast=launch.autocast,
        half=launch.residual_bytes == 2,
        written_out=launch.writes_out_attention,
        on_cpu=launch.on_cpu,
    )


@lru_cache(maxsize=16)
def _block_bytes(
    model: PreTrainedModel,
    block_size: int,
    *,
    tp: int,
    autocast: bool,
    half: bool,
    written_out: bool,
    on_cpu: bool,
) -> tuple[float, float]:
    model = _with_kinds_of_blocks(one_rank_of(model, tp)).train()
    if half:
        model.bfloat16()
    if written_out:
        write_out_attention(model)
    blocks = architecture_of(model).blocks(model)
    kernels = nullcontext() if on_cpu else GpuKernels()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), shapes_only(), kernels:
            model.to_empty(device="cpu")
            batches = [torch.zeros(rows, block_size, dtype=torch.long) for rows in (1, 2)]
            one, two = (_saved_bytes(model, blocks, tokens, autocast) for tokens in batches)
    except DataDependentOutputException as error:
        name = architecture_of(model).name
        raise UserError(f"model.architecture {name}: its sizes depend on data: {error}") from error
    saved, kept = ((b - a) / block_size / len(blocks) for a, b in zip(one, two, strict=True))
    return saved, kept


def cache_bytes(model: PreTrainedModel, launch: Launch, tokens: int) -> float:
    """Bytes of the keys and values of a text of `tokens` tokens."""
    return _cache_bytes(model, tokens, launch.autocast, launch.residual_bytes == 2)


@lru_cache(maxsize=64)
def _cache_bytes(model: PreTrainedModel, tokens: int, autocast: bool, half: bool) -> float:
    blocks = model.config.num_hidden_layers
    model = _with_kinds_of_blocks(model).eval()
    if half:
        model.bfloat16()
    with FakeTensorMode(allow_non_fake_inputs=True), shapes_only(), torch.no_grad():
        model.to_empty(device="cpu")
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        layers = out[CACHE].layers
        tensors = tree_leaves([(layer.keys, layer.values) for layer in layers])
        held = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
    # Blocks of one kind are as many times the one that was run.
    return held * blocks / len(architecture_of(model).blocks(model))


def _with_kinds_of_blocks(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model, with only the last of its blocks if they are of one kind. The others are
    not copied, which would take longer than all else of a deep model.
    """
    blocks = architecture_of(model).blocks(model)
    # Blocks are of one kind if their parameters have the same names and shapes.
    kinds = {tuple((name, p.shape) for name, p in block.named_parameters()) for block in blocks}
    copies: dict[int, Any] = {}
    if len(kinds | {*(getattr(model.config, "layer_types", None) or ())}) <= 2:
        copies[id(blocks)] = copy.deepcopy(blocks[-1:], copies)
    return copy.deepcopy(model, copies)


def _saved_bytes(
    model: PreTrainedModel, blocks: Iterable[nn.Module], tokens: torch.Tensor, autocast: bool
) -> tuple[int, int]:
    """Bytes of the storages that autograd saves while the blocks run, and of the results that
    selective checkpointing keeps.
    """
    # Storages are held, so that none is freed and its identity used again.
    saved: dict[int, torch.UntypedStorage] = {}
    kept: dict[int, torch.UntypedStorage] = {}
    inside = ExitStack()

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = func(*args, **(kwargs or {}))
            if is_kept(func, args):
                tensors = [t for t in tree_leaves(results) if isinstance(t, torch.Tensor)]
                kept.update({id(s): s for t in tensors for s in [t.untyped_storage()]})
            return results

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[id(storage)] = storage
        return tensor

    def begin(*_: Any) -> None:
        inside.enter_context(torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor))
        inside.enter_context(Noting())

    # Only what blocks save: embeddings and the loss are counted elsewhere. So the loss of one
    # position is enough: with a large vocabulary, that of all takes longer than the blocks.
    hooks = [block.register_forward_pre_hook(begin) for block in blocks]
    hooks += [block.register_forward_hook(lambda *_: inside.close()) for block in blocks]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(
            input_ids=tokens,
            shift_labels=tokens[:, -1:],
            num_items_in_batch=1,
            skip_logits=True,
            use_cache=False,
        )
    for hook in hooks:
        hook.remove()
    sizes = [sum(s.nbytes() for s in storages.values()) for storages in (saved, kept)]
    return sizes[0], sizes[1]
