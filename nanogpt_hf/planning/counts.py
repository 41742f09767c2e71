"""Numbers of parameters of a model, or of the part of it that one device has; bytes that autograd
keeps of a block, and of a key-value cache.
"""

import copy
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
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
from nanogpt_hf.distributed.pipeline_stages import head_in_blocks, split_blocks
from nanogpt_hf.distributed.tensor_parallel import splits_vocabulary
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.experts import experts_of, shapes_only
from nanogpt_hf.model.recompute import is_kept
from nanogpt_hf.model.written_out_attention import write_out_attention


@dataclass(frozen=True)
class StageShare:
    """Share of the model that one pipeline stage holds; without pipeline parallelism the whole
    model.
    """

    blocks: int
    has_embedding: bool = True
    has_head: bool = True
    # Micro-batches whose activations are held.
    in_flight: int = 1


def stages_of(model: PreTrainedModel, launch: Launch) -> list[StageShare]:
    """Return the first, one of the largest in the middle, and the last stage, if there are as many.

    Under 1F1B the first holds the most activations, and the last the loss.
    1F1B (arXiv:2104.04473, section 2.2): a stage has as many micro-batches in flight as there
    are stages from it on.
    """
    # Stages in the middle are alike, so one of them stands for all.
    blocks = model.config.num_hidden_layers
    if launch.pp_size == 1:
        return [StageShare(blocks)]
    split = [len(part) for part in split_blocks(blocks, head_in_blocks(model), launch.pp_size)]
    in_middle = launch.pp_size - 1
    middle = StageShare(split[-2], has_embedding=False, has_head=False, in_flight=in_middle)
    first = StageShare(split[0], has_head=False, in_flight=launch.pp_size)
    return [first, *[middle] * (launch.pp_size > 2), StageShare(split[-1], has_embedding=False)]


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of a model, or of its share on one device."""

    total: int
    trainable: int
    # In one block, and outside of the blocks.
    block: int
    outside: int
    # Outside, and gathered by FSDP2 only while it computes: an embedding that is not tied.
    gathered_alone: int
    # In the embedding, which is usually tied to the head.
    head: int
    # In experts that data-parallel processes share.
    experts: int
    trainable_experts: int
    head_is_trainable: bool
    # Blocks from the lowest trainable one up. Those below have no backward pass.
    backward_blocks: int

    @classmethod
    @lru_cache(maxsize=256)  # layouts share them
    def of(
        cls, model: PreTrainedModel, tp: int = 1, stage: StageShare | None = None, ep: int = 1
    ) -> "Counts":
        """Count the parameters of `model`, which may be on the meta device; with tensor or expert
        parallelism those of one rank.

        Tensor parallelism splits the matrices of the blocks, the embedding of tokens and the
        head. A stage of a pipeline has some of the blocks; the first has the embeddings, the
        last the head, which may be a copy.
        """
        model = one_rank_of(model, tp, ep)
        sizes = _walk(model)
        # Without a pipeline the stage is the whole model.
        stage = stage or StageShare(sizes.blocks)
        block = sizes.in_blocks // sizes.blocks
        outside = sizes.below_only * stage.has_embedding + sizes.above * stage.has_head
        outside += sizes.below_and_above * (stage.has_embedding or stage.has_head)
        is_whole = stage.blocks == sizes.blocks
        total = outside + (sizes.in_blocks if is_whole else block * stage.blocks)
        trainable = sizes.trainable
        if total != sizes.whole:
            # A part of the model is taken to have the same share of trainable parameters.
            trainable = round(total * sizes.trainable / sizes.whole)
        return cls(
            total=total,
            trainable=trainable,
            block=block,
            outside=outside,
            gathered_alone=sizes.head if stage.has_embedding and not sizes.is_tied else 0,
            head=sizes.head if stage.has_head else 0,
            experts=sizes.experts * (ep > 1),
            trainable_experts=sizes.trainable_experts * (ep > 1),
            head_is_trainable=sizes.head_is_trainable,
            backward_blocks=min(stage.blocks, sizes.blocks - sizes.frozen_below),
        )


@dataclass(frozen=True)
class _Walk:
    """Numbers of parameters that one walk through a model finds, for all stages of a pipeline."""

    # Numbers of blocks: all, and the lowest that have no backward pass.
    blocks: int
    frozen_below: int
    in_blocks: int
    # Outside of the blocks: in embeddings alone, in an embedding that is the head too, and in all
    # else, such as the head and adapters.
    below_only: int
    below_and_above: int
    above: int
    head: int
    is_tied: bool
    head_is_trainable: bool
    experts: int
    trainable_experts: int
    whole: int
    trainable: int


@lru_cache(maxsize=16)
def _walk(model: PreTrainedModel) -> _Walk:
    experts = [p for part in experts_of(model) for p in part.parameters()]
    architecture = architecture_of(model)
    blocks = architecture.blocks(model)
    embedding = next(model.get_input_embeddings().parameters())
    trainable = [any(p.requires_grad for p in block.parameters()) for block in blocks]
    embeddings = [p for module in architecture.embeddings(model) for p in module.parameters()]
    # A gradient of an embedding passes through all blocks, trainable or not.
    frozen_below = 0
    if any(trainable) and not any(p.requires_grad for p in embeddings):
        frozen_below = trainable.index(True)
    # By identity, since a tied head and its embedding are one parameter.
    inside = {id(p) for p in blocks.parameters()}
    below = {id(p) for p in embeddings}
    top = architecture.final_norm(model), _head(model)
    above = {id(p) for layer in top for p in layer.parameters()}
    outside = {id(p): p.numel() for p in model.parameters() if id(p) not in inside}

    def size_of(keys: set[int]) -> int:
        return sum(outside[key] for key in keys)

    return _Walk(
        blocks=len(blocks),
        frozen_below=frozen_below,
        in_blocks=sum(p.numel() for p in blocks.parameters()),
        below_only=size_of(below - above),
        below_and_above=size_of(below & above),
        above=size_of(outside.keys() - below),
        head=embedding.numel(),
        is_tied=_head(model).weight is embedding,
        head_is_trainable=embedding.requires_grad,
        experts=sum(p.numel() for p in experts),
        trainable_experts=sum(p.numel() for p in experts if p.requires_grad),
        whole=model.num_parameters(),
        trainable=model.num_parameters(only_trainable=True),
    )


def _head(model: PreTrainedModel) -> Any:
    return model.get_output_embeddings() or model.get_input_embeddings()


@lru_cache(maxsize=16)
def one_rank_of(model: PreTrainedModel, tp: int, ep: int = 1) -> PreTrainedModel:
    """A model on the meta device with what one of `tp` tensor-parallel ranks has of its matrices,
    or one of `ep` of its experts; biases of layers that tensor parallelism sums stay whole.
    """
    if tp * ep == 1:
        return model
    model = copy.deepcopy(model)
    # Experts are cut in their first dimension, (E, rows, columns).
    if tp == 1:
        for parameter in (p for part in experts_of(model) for p in part.parameters()):
            parameter.data = parameter.data.chunk(ep)[0]
        return model
    architecture = architecture_of(model)
    blocks = map(architecture.linear_layers, architecture.blocks(model))
    layers = [[*part.values()] for block in blocks for part in block]
    ends: Any = {model.get_input_embeddings(), _head(model)} if splits_vocabulary(model) else set()
    columns = {p for *split, _ in layers for layer in split for p in layer.parameters()}
    # Column-parallel layers give a part of the outputs, row-parallel ones read a part of the
    # inputs.
    for parameter in columns | {p for layer in ends for p in layer.parameters()}:
        parameter.data = parameter.data.chunk(tp)[0]
    for *_, rows in layers:
        rows.weight.data = rows.weight.data.chunk(tp, dim=1)[0]
    return model


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
    selective checkpointing keeps beside the block's input. The mean if there are several kinds.

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
    """Bytes of the keys and values of a text of so many tokens."""
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
            cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        layers = cache.layers
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

    # Only what blocks save: embeddings and the loss are counted elsewhere.
    hooks = [block.register_forward_pre_hook(begin) for block in blocks]
    hooks += [block.register_forward_hook(lambda *_: inside.close()) for block in blocks]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(
            input_ids=tokens,
            shift_labels=tokens,
            num_items_in_batch=1,
            skip_logits=True,
            use_cache=False,
        )
    for hook in hooks:
        hook.remove()
    sizes = [sum(s.nbytes() for s in storages.values()) for storages in (saved, kept)]
    return sizes[0], sizes[1]
