"""Estimate the memory of a training step: bytes per tensor kind, in the four phases that can be the
peak.

The sums follow from the model, its loss and training/step.py: what autograd saves of a block and
of the loss, and when gradients are allocated and freed. tests/planning/test_footprint.py
compares them with torch's allocator.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from transformers import PreTrainedModel

from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.tensor_parallel import splits_vocabulary
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.loss_gpt import rows_of_a_chunk
from nanogpt_hf.model.recompute import SELECTIVE, interval
from nanogpt_hf.optim.optimizer import kind_of
from nanogpt_hf.planning.counts import Counts, StageShare, block_bytes, one_rank_of, stages_of

CHECKPOINT = "checkpoint"  # the copy that is written in the background, kept from one to the next
PARTS = ("weights", "optimizer", "gradients", "copies", "activations", "logits", CHECKPOINT)
LOSS, TOP, BOTTOM, EMBEDDING = (
    "the loss",
    "the top block",
    "the bottom block",
    "the embedding's gradient",
)
UPDATE = "update"  # a phase of optimizers that need buffers for it

# parameters that DeepSpeed keeps gathered: the default of stage3_max_live_parameters
_ZERO_3_LIVE = 1e9
_ZERO_BUCKET = 5e8  # gradients that DeepSpeed reduces at once: the default of reduce_bucket_size


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device by part, in each phase of a step that can be the peak."""

    phases: dict[str, dict[str, float]]
    host_copy: float  # bytes per machine with GPUs, in host memory, for the copy of a checkpoint

    @property
    def peak_phase(self) -> str:
        """The phase with the most bytes."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> float:
        return sum(self.phases[self.peak_phase].values())


def footprint(
    model: PreTrainedModel,
    launch: Launch,
    *,
    micro_batch_size: int,
    block_size: int,
    accumulation: int,
    optim: OptimSection | None = None,
) -> Footprint:
    """The footprint of a training step; `model` may be on the meta device.

    With accumulation, gradients stay allocated after the first micro-batch. `optim`: that of the
    recipe; without it AdamW with float32 state. Of a pipeline it is the stage with the highest
    peak, of other kinds of parallelism any device.
    """
    step = micro_batch_size, block_size, accumulation, optim or OptimSection()
    footprints = [_footprint(model, launch, stage, *step) for stage in stages_of(model, launch)]
    return max(footprints, key=lambda estimated: estimated.peak)


def useless_checkpointing(model: PreTrainedModel, launch: Launch, **step: Any) -> str | None:
    """A line if activation checkpointing does not lower the peak of a step, else nothing."""
    if not launch.checkpointing:
        return None
    ours, plain = (
        footprint(model, each, **step) for each in (launch, replace(launch, checkpointing=""))
    )
    if ours.peak < plain.peak:
        return None
    return (
        f"fsdp_activation_checkpointing {launch.checkpointing} saves no memory here: "
        f"{ours.peak_phase} needs the most, and no less with it"
    )


def _footprint(
    model: PreTrainedModel,
    launch: Launch,
    stage: StageShare,
    micro_batch_size: int,
    block_size: int,
    accumulation: int,
    optim: OptimSection,
) -> Footprint:
    config, value = model.config, launch.compute_bytes
    counts = Counts.of(model, launch.tp_size, stage, launch.ep_size)
    # what is sharded or held: FSDP2 shards the copies of experts
    ep = 1 if launch.sharding == "fsdp" else launch.ep_size
    held = Counts.of(model, launch.tp_size, stage, ep)
    rows = micro_batch_size * block_size // launch.cp_size
    residual = launch.residual_bytes * rows * config.hidden_size
    full_block = rows * block_bytes(model, block_size, launch)[0]
    kept_block = rows * _kept_bytes(model, block_size, launch)  # of a block computed again
    frozen = config.num_hidden_layers - counts.backward_blocks if launch.pp_size == 1 else 0

    def again(blocks: int) -> int:
        """How many of the lowest blocks that have a backward pass are computed again."""
        every = interval(launch.checkpointing)
        return -((-frozen - blocks) // every) + -frozen // every if launch.checkpointing else 0

    def saved(blocks: int) -> float:
        """Bytes of activations held of them."""
        return again(blocks) * kept_block + (blocks - again(blocks)) * full_block

    # in a backward pass: the gradients of the residual stream and of the MLP's last layer
    architecture = architecture_of(model)
    block = architecture.blocks(model)[-1]
    last = list(architecture.linear_layers(block)[1].values())[-1:]
    # an adapter has a gradient of its own
    copies_of_input = 1 + any(hasattr(layer, "lora_A") for layer in last)
    inner = architecture.inner_width(block, config)
    passing = residual + value * rows * (inner // launch.tp_size * copies_of_input)
    rank = one_rank_of(model, launch.tp_size, ep)
    share = held.trainable / Counts.of(rank).trainable
    optimizer, checkpoint = (
        share * _optimizer_bytes(rank, launch.shards, optim.name, state)
        for state in (optim.state, "float32")
    )
    state = _state(held, launch, optimizer)
    checkpoint += 4 * held.total / launch.shards
    # processes of a machine: of copies one is saved
    savers = min(launch.local_world_size, max(launch.ep_size, launch.world_size // launch.copies))
    whole = 4 * Counts.of(model).total + _optimizer_bytes(model, 1, optim.name, "float32")
    host_copy = 0 if launch.on_cpu else min(savers * checkpoint, whole)
    state[CHECKPOINT] = checkpoint if launch.on_cpu else 0.0
    gradients = state.pop("gradients")
    accumulated = gradients if accumulation > 1 else 0
    head = 0  # a gradient of the head, not yet reduced
    if counts.head_is_trainable:
        head = counts.head * (value if launch.sharding == "fsdp" else 4)
    is_tied = config.tie_word_embeddings
    logits, head_gradient, row_gradients = (
        _loss(model, counts, launch, rows) if stage.has_head else (0.0, 0.0, 0.0)
    )
    # activations and cast weights of other micro-batches
    left = counts.backward_blocks
    cast = 2 * launch.autocast * counts.block * (left - again(left))
    waiting = (stage.in_flight - 1) * (saved(left) + cast)
    # torch receives each micro-batch of a step into a buffer of its own: the input of a stage, for
    # which it also keeps the gradient, and the gradient of its output
    waiting += residual * accumulation * (2 * (not stage.has_embedding) + (not stage.has_head))

    def in_block(done: int) -> dict[str, float]:
        """The backward pass of a block, after `done` blocks above it."""
        left = counts.backward_blocks - done
        is_again = again(left) - again(left - 1)  # whether this block is
        return {
            "gradients": (accumulated or gradients * done * held.block / held.total) + head,
            "activations": waiting
            + saved(left)
            + is_again * (residual + full_block - kept_block)
            + passing,
            "copies": _copies(counts, launch, left - again(left) + is_again, done),
        }

    phases = {
        LOSS: {
            "gradients": accumulated + head_gradient,
            # with input and output of the last LayerNorm
            "activations": waiting + saved(counts.backward_blocks) + 2 * residual + row_gradients,
            "logits": logits,
            "copies": _copies(counts, launch, left - again(left)),
        },
        TOP: in_block(0),
        BOTTOM: in_block(counts.backward_blocks - 1),
        # a tied head has its gradient, the embedding's, and their sum; and one more from earlier
        # micro-batches
        EMBEDDING: {
            "gradients": gradients + head * ((2 if is_tied else 0) + (accumulation > 1)),
            "activations": waiting + 2 * residual,
            "copies": _copies(counts, launch, 0, left),
        },
    }
    if kind_of(optim).update_bytes:
        shards = launch.shards * Counts.of(model).trainable / held.trainable
        kind = optim.name, optim.state
        copies = _update_bytes(model, launch.on_cpu, shards, launch.world_size, *kind)
        phases[UPDATE] = {"gradients": gradients, "copies": copies}
    phases = {name: dict.fromkeys(PARTS, 0.0) | state | parts for name, parts in phases.items()}
    return Footprint(phases, host_copy)


def _loss(
    model: PreTrainedModel, counts: Counts, launch: Launch, rows: int
) -> tuple[float, float, float]:
    """Bytes of the logits and tensors of their size, and of the loss's gradients of the head and of
    its input rows.

    If all logits are computed at once, both gradients are allocated when the activations are freed.
    """
    vocabulary, value = model.config.vocab_size, launch.compute_bytes
    if is_split := launch.tp_size > 1 and splits_vocabulary(model):  # always as chunks
        vocabulary = -(-vocabulary // launch.tp_size)
    chunk = rows_of_a_chunk(rows, vocabulary, "cpu" if launch.on_cpu else "cuda")
    logits = chunk * vocabulary
    if chunk == rows and not is_split:  # log-softmax, with a gradient before and after it
        return 3 * 4 * logits, 0.0, 0.0
    bytes_per_logit = value + 4  # logits, and their log-softmax in float32
    product = value * logits
    trainable_head = counts.head if counts.head_is_trainable else 0
    if value < 4:
        bytes_per_logit += value if is_split else 4  # torch casts bf16 before it
        product += value * trainable_head  # a chunk's gradient of the head
    return (
        max(bytes_per_logit * logits, product),
        4.0 * trainable_head,
        float(launch.residual_bytes * rows * model.config.hidden_size),
    )


def _kept_bytes(model: PreTrainedModel, block_size: int, launch: Launch) -> float:
    """Bytes per token that are held of a block whose activations are computed again: its input, and
    selected results.
    """
    width = model.config.hidden_size
    if launch.checkpointing != SELECTIVE:
        return launch.residual_bytes * width
    return launch.residual_bytes * width + block_bytes(model, block_size, launch)[1]


@lru_cache(maxsize=256)  # layouts share them
def _optimizer_bytes(model: PreTrainedModel, shards: int, name: str, state: Any) -> float:
    """Bytes of the optimizer state of a whole model, on one of N shards."""
    return kind_of(OptimSection(name=name, state=state)).state_bytes(model, shards)


@lru_cache(maxsize=256)  # micro-batches share them
def _update_bytes(
    model: PreTrainedModel, on_cpu: bool, shards: float, processes: int, name: str, state: Any
) -> float:
    """Bytes of the buffers of an optimizer that needs some for its update."""
    update_bytes = kind_of(OptimSection(name=name, state=state)).update_bytes
    return update_bytes(model, on_cpu, shards, processes) if update_bytes else 0.0


def _state(counts: Counts, launch: Launch, optimizer_bytes: float) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer state on a device."""
    state = {
        "weights": 4 * counts.total / launch.shards,
        "gradients": 4 * counts.trainable / launch.shards,
        "optimizer": optimizer_bytes,
    }
    if launch.sharding == "zero":
        # weights in the compute precision, and a float32 copy in the optimizer
        state["weights"] = (
            launch.compute_bytes * counts.total / (launch.shards if launch.kind == "ZeRO-3" else 1)
        )
        state["optimizer"] += 4 * counts.trainable / launch.shards
    if launch.pp_size > 1:
        # torch's pipelines reduce them after the last backward pass of a step
        state["gradients"] *= launch.shards
    return state


def _copies(counts: Counts, launch: Launch, blocks: int, done: int | None = None) -> float:
    """Bytes of temporary weights and gradients: cast, gathered, or in communication buckets.

    `blocks`: the number of blocks whose 16-bit weights the autograd graph holds. `done`: that of
    blocks that had their backward pass; None before it.
    """
    value = launch.compute_bytes
    if launch.sharding == "fsdp":  # this block and the next; gradients in 16 bits and float32
        gathered = counts.total - counts.outside
        if launch.reshards:  # torch's pipelines keep them from a backward to the next forward pass
            kept = (done or 0) * (launch.pp_size > 1)
            gathered = min(gathered, (2 + kept) * counts.block)
        gradients = 0 if done is None else (value + 4) * counts.block
        return value * (counts.outside - counts.gathered_alone + gathered) + gradients
    if launch.sharding == "zero":
        live = min(counts.total, _ZERO_3_LIVE) if launch.kind == "ZeRO-3" else 0
        bucket = 0 if done is None else min(counts.trainable, _ZERO_BUCKET)
        return value * (live + bucket)
    cast = 2 * (counts.head + counts.block * blocks) if launch.autocast else 0
    has_buckets = launch.kind == "DDP" and launch.pp_size == 1
    return cast + has_buckets * 4 * (counts.trainable - counts.trainable_experts)
