"""Bytes that a device sends per step in each kind of parallelism, from the sizes of the model."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from nanogpt_hf.distributed.context_parallel import heads_of, needs_ring
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
    copies, once. Tensor parallelism sums the output of attention and of the MLP in the forward
    pass, the gradients of their inputs in the backward pass (Megatron-LM, arXiv:1909.08053,
    section 3), the embedding's output and the gradient of the head's input. Context parallelism
    exchanges queries, keys, values and outputs (Ulysses, arXiv:2309.14509); its ring sends keys
    and values past the other devices in each pass (arXiv:2310.01889), and their gradients in
    float32 around to where they came from. A stage of a pipeline sends activations on and their
    gradients back.
    """
    config, value, stages = model.config, place.compute_bytes, stages_of(model, place)
    shares = [Counts.of(model, place.tp, stage) for stage in stages]
    counts = max(shares, key=lambda counts: counts.total)
    blocks = max(stage.blocks for stage in stages)
    # for a layer, per step
    values = micro_batch_size * block_size // place.cp * config.hidden_size * accumulation
    # a second forward pass of the blocks
    again = 1 / interval(place.checkpointing) if place.checkpointing else 0
    stages_apart = place.processes // place.pp
    found = []

    def add(name: str, size: float, group: int, stride: int, overlaps: str = "") -> None:
        """A group of devices whose ranks differ by `stride`."""
        neighbors = max(1, place.per_machine // stride) if group * stride > place.per_machine else 0
        if size:
            found.append(Transfer(name, size, neighbors, overlaps))

    if place.kind == "FSDP2":
        # Embeddings and head stay gathered between the passes. A pipeline keeps the blocks'
        # weights, too, from a backward to the next forward pass, and their whole gradients to the
        # end of the step.
        passes = 2 if place.reshard and place.pp == 1 else 1
        gathered = (
            value * (counts.outside + passes * (counts.total - counts.outside)) * accumulation
        )
        add(
            "gathers of weights",
            all_gather_bytes(gathered, place.shards),
            place.shards,
            place.tp,
            "computation",
        )
        scattered = 4 * counts.trainable * (accumulation if place.pp == 1 else 1)
        add(
            "reduce-scatters of gradients",
            all_gather_bytes(scattered, place.shards),
            place.shards,
            place.tp,
            "computation",
        )
    if place.kind in ("DDP", "FSDP2"):
        each = 2 if place.compresses else 4
        gradients = all_reduce_bytes(each * counts.trainable / place.shards, place.copies)
        add(
            "all-reduce of gradients",
            gradients,
            place.copies,
            place.shards * place.tp,
            "the last backward pass",
        )
    if place.tp > 1:
        sums = (4 + 2 * again) * blocks + 2
        add(
            "tensor-parallel all-reduces",
            all_reduce_bytes(sums * value * values, place.tp),
            place.tp,
            1,
        )
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
            add("gradients of the tied head", 4 * head.numel() / place.tp, place.pp, stages_apart)
    return found
