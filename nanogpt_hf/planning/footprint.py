"""Bytes that a training step needs on a device: its tensors by name, in the four phases that can be the peak.

Everything follows from the model, its loss and training/loop.py: what autograd keeps of a block and of the loss, and
when gradients come and go. tests/planning/test_footprint.py compares it with what the allocator gave out.
"""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from nanogpt_hf.model.architecture import Architecture, architecture_of
from nanogpt_hf.model.loss_gpt import rows_of_a_chunk
from nanogpt_hf.optim.adamw_8bit import bytes_in_8_bits
from nanogpt_hf.planning.placement import Placement

PARTS = ("weights", "optimizer", "gradients", "copies", "activations", "logits")
LOSS, TOP, BOTTOM, EMBEDDING = "the loss", "the top block", "the bottom block", "the embedding's gradient"

_ZERO_3_LIVE = 1e9  # parameters that DeepSpeed leaves gathered: its stage3_max_live_parameters
_ZERO_BUCKET = 5e8  # gradients that it reduces at once: its reduce_bucket_size


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device by part, in each phase of a step that can be the peak."""

    phases: dict[str, dict[str, float]]
    offloaded: float  # bytes that each process keeps in the machine's memory instead

    @property
    def peak_phase(self) -> str:
        """The phase with the most bytes."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> float:
        return sum(self.phases[self.peak_phase].values())


@dataclass(frozen=True)
class Counts:
    """Parameters of a model: what there is, what of it trains, and where."""

    held: int
    trained: int
    block: int  # in one block
    root: int  # outside the blocks
    head: int  # in the embedding, whose matrix is the head's too
    head_trains: bool
    kept_blocks: int  # from the lowest that trains up: those below leave nothing for a backward pass

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Counts":
        """Those of `model`, which may be on the meta device."""
        architecture = architecture_of(model)
        blocks, embedding = architecture.blocks(model), model.get_input_embeddings().weight
        trains = [any(p.requires_grad for p in block.parameters()) for block in blocks]
        from_the_bottom = any(p.requires_grad for m in architecture.embeddings(model) for p in m.parameters())
        held, inside = model.num_parameters(), sum(p.numel() for p in blocks.parameters())
        return cls(
            held=held,
            trained=model.num_parameters(only_trainable=True),
            block=inside // len(blocks),
            root=held - inside,
            head=embedding.numel(),
            head_trains=embedding.requires_grad,
            kept_blocks=len(blocks) - (0 if from_the_bottom or True not in trains else trains.index(True)),
        )


def footprint(
    model: PreTrainedModel,
    place: Placement,
    *,
    micro_batch_size: int,
    block_size: int,
    accumulates: bool,
    optimizer_state: str = "float32",
) -> Footprint:
    """The footprint of a step whose micro-batches have that many sequences; `model` may be on the meta device.

    `accumulates`: whether a step has several of them, so that gradients lie there from the first one on.
    `optimizer_state`: of the recipe's optim.state.
    """
    config, n, value = model.config, Counts.of(model), place.compute_bytes
    rows = micro_batch_size * block_size
    residual = 4 * rows * config.hidden_size  # float32
    whole_block = rows * _whole_block(model, block_size, place)
    kept_block = rows * kept_by_a_block(model, block_size, place)
    state, offloaded = _state(n, place, optimizer_state_of(model, optimizer_state, place.shards))
    gradients = state.pop("gradients")
    standing = gradients * accumulates
    head = n.head * n.head_trains * (value if place.kind == "FSDP2" else 4)  # a gradient of the head, not yet reduced
    logits, gradient_of_head, gradient_of_rows = _loss(model, n, place, rows)

    def in_block(done: int) -> dict[str, float]:
        """In a block's backward pass, with `done` blocks above it: the gradients of its residual and its MLP pass."""
        passing = residual + value * rows * _mlp_gradients(model)
        return {
            "gradients": (standing or gradients * done * n.block / n.held) + head,
            "activations": (n.kept_blocks - done) * kept_block + whole_block * place.checkpointing + passing,
            "copies": _copies(n, place, blocks=1 if place.checkpointing else n.kept_blocks - done, backward=True),
        }

    phases = {
        LOSS: {
            "gradients": standing + gradient_of_head,
            # with what the last LayerNorm takes in and gives
            "activations": n.kept_blocks * kept_block + 2 * residual + gradient_of_rows,
            "logits": logits,
            "copies": _copies(n, place, blocks=0 if place.checkpointing else n.kept_blocks, backward=False),
        },
        TOP: in_block(0),
        BOTTOM: in_block(n.kept_blocks - 1),
        # the head's gradient, the embedding's and their sum; what came of earlier micro-batches is one more
        EMBEDDING: {
            "gradients": gradients + head * (2 + accumulates),
            "activations": 2 * residual,
            "copies": _copies(n, place, blocks=0, backward=True),
        },
    }
    nothing = dict.fromkeys(PARTS, 0.0)
    return Footprint({name: nothing | state | parts for name, parts in phases.items()}, offloaded)


def _loss(model: PreTrainedModel, n: Counts, place: Placement, rows: int) -> tuple[float, float, float]:
    """Bytes of the logits and all that is made of them, and of what the loss has of the head's gradient and its rows'.

    Where all logits are there at once, both gradients come when the activations go.
    """
    chunk, value = rows_of_a_chunk(rows, model.config.vocab_size), place.compute_bytes
    logits = chunk * model.config.vocab_size
    if chunk == rows:  # log-softmax, and a gradient on each side of it
        return 3 * 4 * logits, 0.0, 0.0
    # logits, their log-softmax in float32, and where the one's type is another a copy in it: before, or of the gradient
    made = value + 4 + (value < 4) * (4 if place.on_cpu else value)
    product = value * logits + n.head * n.head_trains * (value < 4) * value  # a chunk's gradient of the head
    return max(made * logits, product), 4.0 * n.head * n.head_trains, 4.0 * rows * model.config.hidden_size


def kept_by_a_block(model: PreTrainedModel, block_size: int, place: Placement) -> float:
    """Bytes that autograd keeps of a block for its backward pass, for each token of a micro-batch.

    Of the top block, where some are frozen. Without dropout and adapters 64 for each of n_embd values in float32, 40
    under autocast, and 4, its input alone, where activations are checkpointed.
    """
    return 4 * model.config.hidden_size if place.checkpointing else _whole_block(model, block_size, place)


def _whole_block(model: PreTrainedModel, block_size: int, place: Placement) -> float:
    """Bytes for each token as long as nothing is computed again."""
    config, architecture, value = model.config, architecture_of(model), place.compute_bytes
    block = architecture.blocks(model)[-1]
    written_out = config.dropout > 0 and place.on_cpu  # attention: no fused kernel of the CPU draws dropout
    values = architecture.block_activations(config)
    kept = place.residual_bytes * values.residual
    kept += (4 if written_out else value) * values.attention
    kept += value * values.other
    if config.dropout:  # on what attention and MLP give: a bool on a GPU, a factor on a CPU
        kept += 2 * (value if place.on_cpu else 1) * config.hidden_size
    if written_out:  # the softmax, its dropout's factors, their product
        kept += 3 * 4 * config.num_attention_heads * block_size
    return kept + _inputs_of_linears(architecture, block, place)


def _inputs_of_linears(architecture: Architecture, block: torch.nn.Module, place: Placement) -> float:
    """Bytes a row of what goes into the linear layers that train, where no other name counts it."""
    value, kept = place.compute_bytes, 0.0
    query, key, values, output = architecture.attention_layers(block)
    for layer in (query, key, values, output, *architecture.mlp_layers(block)):
        adapter = getattr(layer, "lora_A", None)
        if adapter is None and not layer.weight.requires_grad:
            continue
        dropout = adapter is not None and getattr(layer.lora_dropout["default"], "p", 0) > 0
        # Autocast makes a 16-bit copy for each layer; in float32 q, k and v share one tensor.
        shared = not place.autocast and layer in (key, values)
        shared |= layer is output and not (place.autocast and adapter is not None)  # what attention gives
        kept += layer.in_features * value * (dropout or not shared)
        if adapter is not None:
            kept += adapter["default"].out_features * value
            kept += layer.in_features * dropout * (4 if place.on_cpu else 1)
    return kept


def _mlp_gradients(model: PreTrainedModel) -> int:
    """Values a row of the gradient that goes into the MLP's last layer; an adapter has its own beside it."""
    architecture = architecture_of(model)
    proj = architecture.mlp_layers(architecture.blocks(model)[-1])[-1]
    return proj.in_features * (2 if hasattr(proj, "lora_A") else 1)


def optimizer_state_of(model: PreTrainedModel, kind: str, shards: int = 1) -> float:
    """Bytes of AdamW's two moments of what trains, on one of the processes that share them.

    What torchao's step holds besides, both moments of one tensor in float32, is less than the gradients that the
    embedding has at the worst, and then is gone.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "float32":
        return 8 * sum(p.numel() for p in trained) / shards
    # cut by rows: the first process's share, which is the largest
    return sum(bytes_in_8_bits(math.ceil(len(p) / shards) * math.prod(p.shape[1:])) for p in trained)


def _state(n: Counts, place: Placement, moments: float) -> tuple[dict[str, float], float]:
    """Bytes of what a step begins with on a device, gradients included, and of what the machine's memory has of it."""
    state = {
        "weights": 4 * n.held / place.shards,
        "gradients": 4 * n.trained / place.shards,
        "optimizer": moments,
    }
    if place.zero:  # the model in the precision it computes in, and float32 weights beside it
        state["weights"] = place.compute_bytes * n.held / (place.shards if place.kind == "ZeRO-3" else 1)
        state["optimizer"] += 4 * n.trained / place.shards
    away = ["gradients", "optimizer"] * (place.offloads_optimizer or place.offloads_weights)
    away += ["weights"] * place.offloads_weights
    offloaded = sum(state[part] for part in away)
    return state | dict.fromkeys(away, 0.0), offloaded


def _copies(n: Counts, place: Placement, *, blocks: int, backward: bool) -> float:
    """Bytes of weights and gradients in another shape: cast, gathered, or in buckets for the network.

    `blocks` are those whose 16-bit weights the graph still holds.
    """
    value = place.compute_bytes
    if place.kind == "FSDP2":  # a block at work and the next one; its gradients before and after they are float32
        gathered = 2 * n.block if place.reshard else n.held - n.root
        return value * (n.root + gathered) + backward * (value + 4) * n.block
    if place.zero:
        live = min(n.held, _ZERO_3_LIVE) if place.kind == "ZeRO-3" else 0
        return value * live + value * backward * min(n.trained, _ZERO_BUCKET)
    cast = 2 * (n.head + n.block * blocks) if place.autocast else 0
    return cast + 4 * n.trained * (place.kind == "DDP")
