"""Bytes that a device sends per step in each kind of parallelism, from the sizes of the model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel

from nanogpt_hf.distributed.context_parallel import heads_of, needs_ring
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.model.config_fields import active_experts
from nanogpt_hf.model.experts import experts_of
from nanogpt_hf.model.recompute import interval
from nanogpt_hf.planning.counts import Counts, stages_of


def all_reduce_bytes(whole: float, size: int) -> float:
    """Bytes that each of `size` devices sends to sum `whole` bytes in a ring: 2 (size - 1) / size
    of them.

    A reduce-scatter and an all-gather; no algorithm needs fewer (Patarasuk and Yuan 2009;
    nccl-tests' PERFORMANCE.md).
    """
    return 2 * all_gather_bytes(whole, size)


def all_gather_bytes(whole: float, size: int) -> float:
    """Bytes that each of `size` devices sends to gather `whole` bytes, to reduce-scatter or to
    exchange them.
    """
    return (size - 1) / size * whole


@dataclass(frozen=True)
class Transfer:
    """Bytes that one device sends per step for one purpose.

    A group that spans machines runs a ring for each of its devices in a machine, each over a
    network adapter of its own, as NCCL does: one of `neighbors` parts of the bytes crosses the
    network.
    """

    name: str
    size: float  # bytes
    neighbors: int  # devices of its group in each machine; 0 if the whole group is in one
    overlaps: str  # what it runs at the same time as: "", COMPUTATION or LAST_BACKWARD


COMPUTATION = "computation"
LAST_BACKWARD = "the last backward pass"


@dataclass(frozen=True)
class Step:
    """A training step of a launch: sizes that several kinds of parallelism need."""

    model: PreTrainedModel
    launch: Launch
    micro_batch_size: int
    block_size: int
    accumulation: int

    @cached_property
    def counts(self) -> Counts:
        """Return the parameters of the largest pipeline stage, on one device."""
        launch = self.launch
        stages = stages_of(self.model, launch)
        shares = [Counts.of(self.model, launch.tp_size, each, launch.ep_size) for each in stages]
        return max(shares, key=lambda counts: counts.total)

    @cached_property
    def blocks(self) -> int:
        return max(stage.blocks for stage in stages_of(self.model, self.launch))

    @property
    def values(self) -> int:
        """Values of the residual stream that a device has in a step: (tokens, hidden_size)."""
        tokens = self.micro_batch_size * self.block_size // self.launch.cp_size
        return tokens * self.model.config.hidden_size * self.accumulation

    @property
    def again(self) -> float:
        """Second forward passes of the blocks, by activation checkpointing."""
        level = self.launch.checkpointing
        return 1 / interval(level) if level else 0

    def transfer(
        self, name: str, size: float, group: int, stride: int, overlaps: str = ""
    ) -> Transfer:
        """A transfer in a group of devices whose ranks differ by `stride`."""
        local = self.launch.local_world_size
        neighbors = max(1, local // stride) if group * stride > local else 0
        return Transfer(name, size, neighbors, overlaps)


def sharding(step: Step) -> Iterator[Transfer]:
    """FSDP2 gathers the weights of each micro-batch in the compute precision, for the forward and
    the backward pass, and reduce-scatters its gradients in float32.
    """
    launch = step.launch
    counts = step.counts
    if launch.sharding != "fsdp":
        return
    # The head, and a tied embedding, stay gathered between the passes.
    once = counts.outside - counts.gathered_alone
    times = step.accumulation
    passes = step.accumulation * (1 + launch.reshards)
    if launch.pp_size > 1:
        # A pipeline gathers them once per step, keeps the blocks' weights from a backward to the
        # next forward pass, and their whole gradients to the end of the step.
        once = counts.outside
        times = 1
        passes = 1 + launch.reshards * step.accumulation
    others = counts.total - counts.experts
    trainable = counts.trainable - counts.trainable_experts
    copies = launch.dp_size // launch.ep_size
    for whose, gathered, scattered, shards, stride in (
        ("", passes * (others - once) + times * once, trainable, launch.shards, launch.tp_size),
        (
            " of experts",
            passes * counts.experts,
            counts.trainable_experts,
            copies,
            launch.ep_size,
        ),
    ):
        size = all_gather_bytes(launch.compute_bytes * gathered, shards)
        yield step.transfer(f"gathers of weights{whose}", size, shards, stride, COMPUTATION)
        size = all_gather_bytes(4 * scattered * times, shards)
        name = f"reduce-scatters of gradients{whose}"
        yield step.transfer(name, size, shards, stride, COMPUTATION)


def data_parallelism(step: Step) -> Iterator[Transfer]:
    """DDP all-reduces gradients once per step, in float32 unless it compresses them; HSDP
    all-reduces their shards over the copies.
    """
    launch = step.launch
    counts = step.counts
    if launch.kind not in ("DDP", "FSDP2"):
        return
    each = 2 if launch.compression != "no" else 4
    trainable = counts.trainable - counts.trainable_experts
    size = all_reduce_bytes(each * trainable / launch.shards, launch.copies)
    stride = launch.shards * launch.tp_size
    name = "all-reduce of gradients"
    yield step.transfer(name, size, launch.copies, stride, LAST_BACKWARD)
    if launch.kind == "DDP":
        # Processes that have the same experts sum their gradients apart.
        copies = launch.dp_size // launch.ep_size
        size = all_reduce_bytes(4 * counts.trainable_experts, copies)
        yield step.transfer("all-reduce of experts' gradients", size, copies, launch.ep_size)


def expert_parallelism(step: Step) -> Iterator[Transfer]:
    """Hidden states go to the processes of their experts and back, in both passes, as if all
    experts had equal work.
    """
    launch = step.launch
    if launch.ep_size == 1:
        return
    layers = len(experts_of(step.model))
    # A token goes to each of its active experts.
    rows = layers * active_experts(step.model.config) * launch.compute_bytes * step.values
    # To and back in both passes, and twice more if the forward pass is repeated.
    size = all_gather_bytes((4 + 2 * step.again) * rows, launch.ep_size)
    yield step.transfer("exchanges with experts", size, launch.ep_size, 1)


def tensor_parallelism(step: Step) -> Iterator[Transfer]:
    """Sums of the outputs of attention and of the MLP in the forward pass, and of the gradients of
    their inputs in the backward pass (Megatron-LM, arXiv:1909.08053, section 3); of the
    embedding's output, and of the gradient of the head's input.
    """
    launch = step.launch
    if launch.tp_size == 1:
        return
    ends = 2 if launch.pp_size == 1 else 1
    forward = (2 + 2 * step.again) * step.blocks * launch.compute_bytes
    # Autocast leaves the gradients of a norm's output, and the embedding's output, in float32.
    sums = forward + (2 * step.blocks + ends) * launch.residual_bytes
    size = all_reduce_bytes(sums * step.values, launch.tp_size)
    yield step.transfer("tensor-parallel all-reduces", size, launch.tp_size, 1)


def context_parallelism(step: Step) -> Iterator[Transfer]:
    """Exchanges of queries, keys, values and outputs (Ulysses, arXiv:2309.14509). A ring sends
    keys and values past the other devices in each pass (arXiv:2310.01889), and their gradients in
    float32 around to where they came from.
    """
    launch = step.launch
    if launch.cp_size == 1:
        return
    config = step.model.config
    tp = launch.tp_size
    cp = launch.cp_size
    value = launch.compute_bytes
    heads, kv_heads = heads_of(config)
    # Forward and backward, and the forward pass that checkpointing repeats.
    passes = 2 + step.again
    if needs_ring(config, tp * cp):
        # Keys and values go past cp - 1 devices, their float32 gradients all the way around.
        around = passes * (cp - 1) * value + cp * 4
        size = step.blocks * 2 * kv_heads / heads / tp * step.values * around
    else:
        # Queries and outputs have `heads`, keys and values `kv_heads`.
        exchanged = passes * step.blocks * 2 * (heads + kv_heads) / heads / tp
        size = all_gather_bytes(exchanged * value * step.values, cp)
    yield step.transfer("context-parallel exchanges", size, cp, tp)


def pipeline_parallelism(step: Step) -> Iterator[Transfer]:
    """A stage sends activations on and their gradients back. Two stages have a tied head, and sum
    its gradients.
    """
    launch = step.launch
    model = step.model
    if launch.pp_size == 1:
        return
    stride = launch.world_size // launch.pp_size
    # A stage in the middle sends in both directions.
    size = min(2, launch.pp_size - 1) * launch.residual_bytes * step.values
    yield step.transfer("activations between stages", size, launch.pp_size, stride)
    if model.config.tie_word_embeddings:
        head = next(model.get_input_embeddings().parameters())
        size = 4 * head.numel() / launch.tp_size / launch.shards
        yield step.transfer("gradients of the tied head", size, launch.pp_size, stride)


KINDS: tuple[Callable[[Step], Iterator[Transfer]], ...] = (
    sharding,
    data_parallelism,
    expert_parallelism,
    tensor_parallelism,
    context_parallelism,
    pipeline_parallelism,
)


def transfers(
    model: PreTrainedModel,
    launch: Launch,
    *,
    micro_batch_size: int,
    block_size: int,
    accumulation: int,
) -> list[Transfer]:
    """List what one device sends per step. In a pipeline it is a stage in the middle with as many
    parameters as the largest.
    """
    step = Step(model, launch, micro_batch_size, block_size, accumulation)
    return [sent for kind in KINDS for sent in kind(step) if sent.size]
