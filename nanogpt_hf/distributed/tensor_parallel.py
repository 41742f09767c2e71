"""Tensor parallelism: the matrices of a model are split over processes that work on the same
sequences.

In a block each process computes a part of the heads and of the MLP's width (Shoeybi et al. 2019,
Megatron-LM, arXiv:1909.08053, section 3). Two matrices in a row are split so that nothing has to
be sent between them. For the MLP on n processes, hidden (B, T, C) and width F:

    up    (F, C)  by outputs: process i has F/n rows  -> (B, T, F/n), a part of the width
    down  (C, F)  by inputs: process i has F/n columns -> (B, T, C), one summand of the output

So one all-reduce follows each `down`. Attention is split alike: queries, keys and values by
outputs, which are heads, and the output projection by inputs. A block costs one all-reduce after
attention and one after the MLP, and as many in the backward pass, for the gradients of the inputs.

Embedding and head are split by rows of the vocabulary; the cross-entropy is computed from parts of
the logits, which no process holds whole. All other parameters (norms, positions) are whole on
every process, and get equal gradients there.
"""

import logging
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from transformers import PreTrainedModel

from nanogpt_hf.distributed.pipeline_stages import own_blocks
from nanogpt_hf.model.architecture import Architecture, architecture_of
from nanogpt_hf.model.head_gpt import Head
from nanogpt_hf.model.loss_gpt import (
    IGNORED,
    cap_gradient,
    chunked_loss,
    head_logits,
    rows_of_a_chunk,
    subtract_one_at,
)
from nanogpt_hf.optim.state import local_part

# Ways to split a layer: each process computes a part of its outputs, or the sum over a part of its
# inputs for every output. A layer of heads has one weight for all heads, and each process has a
# part of the heads.
Split = Literal["outputs", "inputs", "heads"]
# The styles of transformers' plans.
_SPLITS: dict[str, Split] = {
    "colwise": "outputs",
    "rowwise": "inputs",
    "replicated_with_grad_allreduce": "heads",
}
# torch names them by the columns and rows of the transposed weight of `x @ W`.
_STYLES: dict[Split, ParallelStyle] = {
    "outputs": ColwiseParallel(),
    "inputs": RowwiseParallel(),
    # A layer on (batch, position, head, width), whose gradient is a sum over heads. Transformers'
    # own plan sums the accumulated gradient over processes after each micro-batch, so it counts the
    # earlier ones several times.
    "heads": SequenceParallel(sequence_dim=2, use_local_output=True),
}


def splits_of(architecture: Architecture, block: nn.Module) -> dict[str, Split]:
    """How tensor parallelism splits a block's layers, by name: the plan in the config class, as
    far as we can follow it.

    Raises ValueError with the reason if it has another kind of split, or none for a layer of
    attention or MLP.
    """
    tensor_plan = architecture.config_class.base_model_tp_plan or {}
    # layers.*.self_attn.q_proj -> self_attn.q_proj
    styles = {name.rpartition(".*.")[2]: style for name, style in tensor_plan.items()}
    plan: dict[str, Split] = {}
    for name in dict.fromkeys(name.rpartition(".")[0] for name, _ in block.named_parameters()):
        module = block.get_submodule(name)
        if not ("." in name or isinstance(module, nn.Linear) or any(module.children())):
            # A norm of the residual stream is the same on all processes.
            continue
        if styles.get(name) not in _SPLITS:
            raise ValueError(
                f"transformers has no plan that splits {architecture.name}'s {name} "
                f"({styles.get(name, 'not in it')})"
            )
        plan[name] = _SPLITS[styles[name]]
    for last in (list(part)[-1] for part in architecture.linear_layers(block)):
        if plan[last] != "inputs":
            raise ValueError(
                f"transformers' plan for {architecture.name} does not split {last} by its inputs"
            )
    return plan


def split_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the blocks of a model, equal on all processes of `mesh`, or of a stage of it, in
    place. Parameters keep their names.
    """
    architecture = architecture_of(model)
    for block in own_blocks(architecture.blocks(model)):
        frozen = [
            name for name, parameter in block.named_parameters() if not parameter.requires_grad
        ]
        splits = splits_of(architecture, block)
        plan = {name: _STYLES[split] for name, split in splits.items()}
        # The model is equal on all processes already: none has to send it (src_data_rank).
        parallelize_module(block, mesh, plan, src_data_rank=None)
        # The modules whose first layers are split by outputs: attention and MLP.
        first_layers = [name for name, split in splits.items() if split == "outputs"]
        for name in {name.rpartition(".")[0] for name in first_layers}:
            _share_input(block.get_submodule(name), mesh)
        # parallelize_module makes new parameters, which all require a gradient.
        for name in frozen:
            block.get_parameter(name).requires_grad_(False)
    # Under FSDP2 torch warns of each gather over both dimensions of the mesh, which only norms and
    # checkpoints need.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def _share_input(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give all layers of attention or MLP one input, so that its gradient is summed over
    processes once for all.

    Each of queries, keys and values gives a part of the input's gradient on each process. Without
    this hook each layer would make its own DTensor of the input, and sum its part by an all-reduce
    of its own: three where one is enough.
    """

    def replicated(hidden: torch.Tensor) -> DTensor:
        return DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (replicated(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": replicated(kwargs["hidden_states"])}

    module.register_forward_pre_hook(before, with_kwargs=True)


def splits_vocabulary(model: PreTrainedModel) -> bool:
    """Whether embedding and head compute no more than a lookup, scaled or not, and a product."""
    embedding = model.get_input_embeddings()
    is_lookup = type(embedding) is nn.Embedding or hasattr(embedding, "embed_scale")
    return is_lookup and isinstance(model.get_output_embeddings(), Head)


def split_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split embedding and head by rows, in place, if they can be."""
    if not splits_vocabulary(model):
        return
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    # By parameter and not by name, since a tied head is the embedding's matrix: it stays so.
    shards = {
        parameter: nn.Parameter(
            distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None),
            parameter.requires_grad,
        )
        for module in (embedding, head)
        for parameter in module.parameters()
    }
    for module in (embedding, head):
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, shards[parameter])
    vars(embedding)["forward"] = partial(_look_up, embedding, mesh)
    own: Any = VocabularyParallelHead.of(head, head.softcap)
    own.mesh = mesh
    model.set_output_embeddings(own)


def _look_up(embedding: nn.Embedding, mesh: DeviceMesh, ids: torch.Tensor) -> torch.Tensor:
    """Look up the embeddings of token ids, (B, T) -> (B, T, C), in the rows of all processes.

    Each process looks up the tokens that are its own and has zeros for all others; the sum over
    processes is the embedding. DTensor's own lookup gives each process the gradient of all rows.
    """
    rows = local_part(embedding.weight)
    # The vocabulary's rows are cut into parts of ceil(V / n): the last may have fewer.
    part_size = -(-len(embedding.weight) // mesh.size())
    index = ids - part_size * mesh.get_local_rank()
    mine = (index >= 0) & (index < len(rows))
    # Row 0 stands for the tokens of others, so that the lookup stays inside of the part.
    part = F.embedding(index.where(mine, 0), rows) * mine[..., None]
    part = DTensor.from_local(part, mesh, [Partial()], run_check=False)
    # The all-reduce; the gradient needs none, since it is whole on all. The copy: a view would
    # lose FSDP2's hook if the model changed it in place.
    hidden = part.redistribute(placements=[Replicate()]).to_local().clone()
    # Gemma multiplies its embeddings.
    scale = getattr(embedding, "embed_scale", None)
    return hidden if scale is None else hidden * scale.to(rows.dtype)


class VocabularyParallelHead(Head):
    """Head with a part of the vocabulary's rows on each process of `mesh`; logits and loss are of
    the whole.
    """

    mesh: DeviceMesh

    def forward(self, hidden, targets=None, vocab_size=0, row_loss=None):
        # A loss by rows needs all logits of a row; config/compatibility.py refuses it.
        assert row_loss is None
        mesh = self.mesh
        # hidden (N, C) is equal on all processes. Each computes a part of its gradient, from its
        # rows of the vocabulary; the parts are summed in the backward pass.
        hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        hidden = hidden.to_local(grad_placements=[Partial()])
        weight = local_part(self.weight)
        bias = None if self.bias is None else local_part(self.bias)
        if targets is None:
            # Generation and evaluations by logits: (B, T, V/n) on each process -> (B, T, V) on all.
            shape = torch.Size((*hidden.shape[:-1], self.weight.shape[0]))
            stride = torch.empty(shape, device="meta").stride()
            logits = F.linear(hidden, weight, bias)
            logits = DTensor.from_local(
                logits, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride
            )
            return logits.full_tensor()
        rows = -(-self.weight.shape[0] // mesh.size())
        first = rows * mesh.get_local_rank()
        gradient = partial(_loss_and_gradient, mesh.get_group(), first)
        if self.softcap is not None:
            gradient = partial(gradient, softcap=self.softcap)
        size = rows_of_a_chunk(len(hidden), rows, hidden.device.type)
        return chunked_loss(hidden, weight, bias, targets, vocab_size, size, gradient)


def _loss_and_gradient(
    group: dist.ProcessGroup,
    first: int,
    rows: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
):
    """Compute the summed cross-entropy of rows (R, C), and its gradient with respect to this
    process's logits (R, V/n), of the tokens from number `first` on.

    With the largest logit m of a row, s = Σ exp(logit - m) over the whole vocabulary and the
    target's logit t, the loss is log(s) - (t - m), and the gradient exp(logit - m) / s, minus 1 at
    the target. So three numbers per row are exchanged, m, s and t - m, and no logits (Megatron-LM's
    vocabulary-parallel cross-entropy). The loss is whole on all processes.
    """
    # Rows that pad the vocabulary have no logits.
    own_size = max(0, vocab_size - first)
    logits = head_logits(rows, weight, bias, own_size, softcap)
    largest = logits.amax(-1, keepdim=True).float()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    counts = targets != IGNORED
    # The target's column here, if this process has it; else 0, with a logit of 0 in the sum.
    index = targets.where(counts, 0) - first
    mine = (index >= 0) & (index < len(weight))
    index = index.where(mine, 0)[:, None]
    # In float32, since `largest` is.
    shifted = logits - largest
    target_logit = shifted.gather(1, index)[:, 0].where(mine, 0.0)
    gradient = shifted.exp_()
    # One all-reduce for both: (2, R)
    sums = torch.stack([gradient.sum(-1), target_logit])
    dist.all_reduce(sums, group=group)
    loss = (sums[0].log() - sums[1]).where(counts, 0.0).sum()
    gradient /= sums[0][:, None]
    subtract_one_at(gradient, index, mine[:, None].to(gradient.dtype))
    if softcap is not None:
        cap_gradient(gradient, logits, own_size, softcap)
    return loss, gradient.to(rows.dtype)
