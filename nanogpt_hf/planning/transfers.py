"""Bytes that a device sends per step in each kind of parallelism, from the sizes of the model."""

from dataclasses import dataclass

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
    overlaps: str  # what it runs beside: "" (nothing), "computation", or "the last backward pass"


def transfers(
    model: PreTrainedModel,
    launch: Launch,
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
    config, value, stages = model.config, launch.compute_bytes, stages_of(model, launch)
    shares = [Counts.of(model, launch.tp_size, stage, launch.ep_size) for stage in stages]
    counts = max(shares, key=lambda counts: counts.total)
    blocks = max(stage.blocks for stage in stages)
    # for a layer, per step
    values = micro_batch_size * block_size // launch.cp_size * config.hidden_size * accumulation
    # a second forward pass of the blocks
    again = 1 / interval(launch.checkpointing) if launch.checkpointing else 0
    stages_apart = launch.world_size // launch.pp_size
    copies = launch.dp_size // launch.ep_size  # of experts
    others, trainable = counts.total - counts.experts, counts.trainable - counts.trainable_experts
    tp = launch.tp_size
    ep = launch.ep_size
    found = []

    def add(name: str, size: float, group: int, stride: int, overlaps: str = "") -> None:
        """A group of devices whose ranks differ by `stride`."""
        local = launch.local_world_size
        neighbors = max(1, local // stride) if group * stride > local else 0
        if size:
            found.append(Transfer(name, size, neighbors, overlaps))

    if launch.sharding == "fsdp":
        # The head, and a tied embedding, stay gathered between the passes. A pipeline gathers them
        # once per step, keeps the blocks' weights from a backward to the next forward pass, and
        # their whole gradients to the end of the step.
        once = counts.outside - counts.gathered_alone
        times, passes = accumulation, accumulation * (1 + launch.reshards)
        if launch.pp_size > 1:
            once, times, passes = counts.outside, 1, 1 + launch.reshards * accumulation
        for whose, gathered, scattered, shards, stride in (
            ("", passes * (others - once) + times * once, trainable, launch.shards, tp),
            (" of experts", passes * counts.experts, counts.trainable_experts, copies, ep),
        ):
            size = all_gather_bytes(value * gathered, shards)
            add(f"gathers of weights{whose}", size, shards, stride, "computation")
            size = all_gather_bytes(4 * scattered * times, shards)
            add(f"reduce-scatters of gradients{whose}", size, shards, stride, "computation")
    if launch.kind in ("DDP", "FSDP2"):
        each = 2 if launch.compression != "no" else 4
        gradients = all_reduce_bytes(each * trainable / launch.shards, launch.copies)
        stride = launch.shards * launch.tp_size
        overlaps = "the last backward pass"
        add("all-reduce of gradients", gradients, launch.copies, stride, overlaps)
    if launch.kind == "DDP":
        size = all_reduce_bytes(4 * counts.trainable_experts, copies)
        add("all-reduce of experts' gradients", size, copies, launch.ep_size)
    if launch.ep_size > 1:
        rows = len(experts_of(model)) * active_experts(config) * value * values
        size = all_gather_bytes((4 + 2 * again) * rows, launch.ep_size)
        add("exchanges with experts", size, launch.ep_size, 1)
    if launch.tp_size > 1:
        ends = 2 if launch.pp_size == 1 else 1  # embedding and head
        # gradients of a norm's output, which autocast leaves in float32, and the embedding's output
        sums = (2 + 2 * again) * blocks * value + (2 * blocks + ends) * launch.residual_bytes
        size = all_reduce_bytes(sums * values, launch.tp_size)
        add("tensor-parallel all-reduces", size, launch.tp_size, 1)
    if launch.cp_size > 1:
        heads, kv_heads = heads_of(config)
        if needs_ring(config, launch.tp_size * launch.cp_size):
            around = (2 + again) * (launch.cp_size - 1) * value + launch.cp_size * 4
            size = blocks * 2 * kv_heads / heads / launch.tp_size * values * around
        else:
            exchanged = (2 + again) * blocks * 2 * (heads + kv_heads) / heads / tp * value * values
            size = all_gather_bytes(exchanged, launch.cp_size)
        add("context-parallel exchanges", size, launch.cp_size, launch.tp_size)
    if launch.pp_size > 1:
        add(
            "activations between stages",
            min(2, launch.pp_size - 1) * launch.residual_bytes * values,
            launch.pp_size,
            stages_apart,
        )
        if config.tie_word_embeddings:
            head = next(model.get_input_embeddings().parameters())
            size = 4 * head.numel() / launch.tp_size / launch.shards
            add("gradients of the tied head", size, launch.pp_size, stages_apart)
    return found
