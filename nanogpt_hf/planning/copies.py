"""Estimate the memory of temporary weights and gradients."""

from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.planning.counts import Counts

# Parameters that DeepSpeed keeps gathered: the default of stage3_max_live_parameters.
_ZERO_3_LIVE = 1e9
# Gradients that DeepSpeed reduces at once: the default of reduce_bucket_size.
_ZERO_BUCKET = 5e8


def copy_bytes(counts: Counts, launch: Launch, blocks: int, done: int | None = None) -> float:
    """Bytes of temporary weights and gradients: cast, gathered, or in communication buckets.

    `blocks`: the number of blocks whose 16-bit weights the autograd graph holds. `done`: that of
    blocks that had their backward pass; None before it.
    """
    value = launch.compute_bytes
    if launch.sharding == "fsdp":
        gathered = counts.total - counts.outside
        if launch.reshards:
            # This block and the next one. torch's pipelines keep blocks from a backward to the
            # next forward pass.
            kept = (done or 0) * (launch.pp_size > 1)
            gathered = min(gathered, (2 + kept) * counts.block)
        # The gradients of a block, in the compute precision and in float32.
        gradients = 0 if done is None else (value + 4) * counts.block
        return value * (counts.outside - counts.gathered_alone + gathered) + gradients
    if launch.sharding == "zero":
        live = min(counts.total, _ZERO_3_LIVE) if launch.kind == "ZeRO-3" else 0
        bucket = 0 if done is None else min(counts.trainable, _ZERO_BUCKET)
        return value * (live + bucket)
    cast = 2 * (counts.head + counts.block * blocks) if launch.autocast else 0
    has_buckets = launch.kind == "DDP" and launch.pp_size == 1
    return cast + has_buckets * 4 * (counts.trainable - counts.trainable_experts)
