"""Numbers of parameters of a model, or of the part of it that one device has."""

import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import PreTrainedModel

from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.pipeline_stages import head_in_blocks, split_blocks
from nanogpt_hf.distributed.tensor_parallel import splits_vocabulary
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.experts import experts_of


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
