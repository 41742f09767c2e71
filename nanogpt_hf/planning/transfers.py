"""Bytes that a device sends per step in each kind of parallelism, from the sizes of the model."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from nanogpt_hf.distributed.context_parallel import heads_of, needs_ring
from nanogpt_hf.model.config_fields import active_experts
from nanogpt_hf.model.experts import experts_of
from nanogpt_hf.model.recompute import interval
from nanogpt_hf.planning.counts import Counts, stages_of
from nanogpt_hf.planning.placement import Placement


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
    overlaps: str  # what it runs beside: "" (nothing), "computation", or "the last backward pass"


def transfers(
    model: PreTrainedModel,
    place: Placement,
    *,
    micro_batch_size: int,
    block_size: int,
    accumulation: int,
) -> list[Transfer]:
    """What one device sends per step; of a pipeline one of the middle, with as many parameters as
    the largest stage.

    DDP all-reduces gradients once, in float32 unless it compresses them. FSDP2 gathers the
    weights of each micro-batch in the compute precision, for the forward and the backward pass,
    and reduce-scatters its gradients in float32; HSDP also all-reduces their shards over the
    copies, once. Expert parallelism sends hidden states to the processes of their experts and
    back, in both passes, as if all experts had equal work. Tensor parallelism sums the output of
    attention and of the MLP in the forward pass, the gradients of their inputs in the backward
    pass (Megatron-LM, arXiv:1909.08053, section 3), the embedding's output and the gradient of
    the head's input. Context parallelism
    exchanges queries, keys, values and outputs (Ulysses, arXiv:2309.14509); its ring sends keys
    and values past the other devices in each pass (arXiv:2310.01889), and their gradients in
    float32 around to where they came from. A stage of a pipeline sends activations on and their
    gradients back.
    """
    config, value, stages = model.config, place.compute_bytes, stages_of(model, place)
    shares = [Counts.of(model, place.tp, stage, place.ep) for stage in stages]
    counts = max(shares, key=lambda counts: counts.total)
    blocks = max(stage.blocks for stage in stages)
    # for a layer, per step
    values = micro_batch_size * block_size // place.cp * config.hidden_size * accumulation
    # a second forward pass of the blocks
    again = 1 / interval(place.checkpointing) if place.checkpointing else 0
    stages_apart = place.processes // place.pp
    copies = place.dp // place.ep  # of experts
    others, trainable = counts.total - counts.experts, counts.trainable - counts.trainable_experts
    found = []

    def add(name: str, size: float, group: int, stride: int, overlaps: str = "") -> None:
        """A group of devices whose ranks differ by `stride`."""
        neighbors = max(1, place.per_machine // stride) if group * stride > place.per_machine else 0
        if size:
            found.append(Transfer(name, size, neighbors, overlaps))

    if place.kind == "FSDP2":
        # The head, and a tied embedding, stay gathered between the passes. A pipeline gathers them
        # once per step, keeps the blocks' weights from a backward to the next forward pass, and
        # their whole gradients to the end of the step.
        once = counts.outside - counts.gathered_alone
        times, passes = accumulation, accumulation * (1 + place.reshard)
        if place.pp > 1:
            once, times, passes = counts.outside, 1, 1 + place.reshard * accumulation
        for whose, gathered, scattered, shards, stride in (
            ("", passes * (others - once) + times * once, trainable, place.shards, place.tp),
            (" of experts", passes * counts.experts, counts.trainable_experts, copies, place.ep),
        ):
            size = all_gather_bytes(value * gathered, shards)
            add(f"gathers of weights{whose}", size, shards, stride, "computation")
            size = all_gather_bytes(4 * scattered * times, shards)
            add(f"reduce-scatters of gradients{whose}", size, shards, stride, "computation")
    if place.kind in ("DDP", "FSDP2"):
        each = 2 if place.compresses else 4
        gradients = all_reduce_bytes(each * trainable / place.shards, place.copies)
        stride = place.shards * place.tp
        overlaps = "the last backward pass"
        add("all-reduce of gradients", gradients, place.copies, stride, overlaps)
    if place.kind == "DDP":
        size = all_reduce_bytes(4 * counts.trainable_experts, copies)
        add("all-reduce of experts' gradients", size, copies, place.ep)
    if place.ep > 1:
        rows = len(experts_of(model)) * active_experts(config) * value * values
        size = all_gather_bytes((4 + 2 * again) * rows, place.ep)
        add("exchanges with experts", size, place.ep, 1)
    if place.tp > 1:
        ends = 2 if place.pp == 1 else 1  # embedding and head
        # gradients of a norm's output, which autocast leaves in float32, and the embedding's output
        sums = (2 + 2 * again) * blocks * value + (2 * blocks + ends) * place.residual_bytes
        size = all_reduce_bytes(sums * values, place.tp)
        add("tensor-parallel all-reduces", size, place.tp, 1)
    if place.cp > 1:
        heads, kv_heads = heads_of(config)
        if needs_ring(config, place.tp * place.cp):
            around = (2 + again) * (place.cp - 1) * value + place.cp * 4
            size = blocks * 2 * kv_heads / heads / place.tp * values * around
        else:
            exchanged = (
                (2 + again) * blocks * 2 * (heads + kv_heads) / heads / place.tp * value * values
            )
            size = all_gather_bytes(exchanged, place.cp)
        add("context-parallel exchanges", size, place.cp, place.tp)
    if place.pp > 1:
        add(
            "activations between stages",
            min(2, place.pp - 1) * place.residual_bytes * values,
            place.pp,
            stages_apart,
        )
        if config.tie_word_embeddings:
            head = next(model.get_input_embeddings().parameters())
            size = 4 * head.numel() / place.tp / place.shards
            add("gradients of the tied head", size, place.pp, stages_apart)
    return found
