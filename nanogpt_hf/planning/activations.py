"""Estimate the activations of a training step: bytes that autograd holds of blocks, with or
without activation checkpointing, and of the micro-batches that a pipeline stage has in flight.
"""

from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel

from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.recompute import SELECTIVE, interval
from nanogpt_hf.planning.counts import Counts, StageShare
from nanogpt_hf.planning.kept_bytes import block_bytes


@dataclass
class Activations:
    """Bytes of activations on a device that has one pipeline stage, or the whole model."""

    model: PreTrainedModel
    launch: Launch
    stage: StageShare
    # Parameters that the device computes with.
    counts: Counts
    micro_batch_size: int
    block_size: int
    accumulation: int

    @cached_property
    def rows(self) -> int:
        """Tokens of a micro-batch on this device."""
        return self.micro_batch_size * self.block_size // self.launch.cp_size

    @cached_property
    def residual(self) -> int:
        """Bytes of the residual stream between two blocks."""
        return self.launch.residual_bytes * self.rows * self.model.config.hidden_size

    @cached_property
    def full_block(self) -> float:
        """Bytes that autograd saves of a block."""
        return self.rows * block_bytes(self.model, self.block_size, self.launch)[0]

    @cached_property
    def kept_block(self) -> float:
        """Bytes that are held of a block whose activations are computed again."""
        return self.rows * _kept_bytes(self.model, self.block_size, self.launch)

    def again(self, blocks: int) -> int:
        """Count how many of the lowest `blocks` that have a backward pass are computed again."""
        if not self.launch.checkpointing:
            return 0
        frozen = 0
        if self.launch.pp_size == 1:
            frozen = self.model.config.num_hidden_layers - self.counts.backward_blocks
        # Of the first n blocks of the model that is ceil(n / every): those below are subtracted.
        every = interval(self.launch.checkpointing)
        return -((-frozen - blocks) // every) + -frozen // every

    def saved(self, blocks: int) -> float:
        """Bytes of activations held of the lowest `blocks` that have a backward pass."""
        again = self.again(blocks)
        return again * self.kept_block + (blocks - again) * self.full_block

    @cached_property
    def waiting(self) -> float:
        """Bytes of activations of other micro-batches, which a pipeline stage holds."""
        stage = self.stage
        left = self.counts.backward_blocks
        cast = 2 * self.launch.autocast * self.counts.block * (left - self.again(left))
        in_flight = (stage.in_flight - 1) * (self.saved(left) + cast)
        # torch receives each micro-batch of a step into a buffer of its own: the input of a stage,
        # for which it also keeps the gradient, and the gradient of its output.
        buffers = 2 * (not stage.has_embedding) + (not stage.has_head)
        return in_flight + self.residual * self.accumulation * buffers

    @cached_property
    def passing(self) -> float:
        """Bytes of gradients within a block's backward pass: of the residual stream, and of the
        input of the MLP's last layer.
        """
        architecture = architecture_of(self.model)
        block = architecture.blocks(self.model)[-1]
        last = list(architecture.linear_layers(block)[1].values())[-1:]
        # An adapter has a gradient of its own.
        copies_of_input = 1 + any(hasattr(layer, "lora_A") for layer in last)
        inner = architecture.inner_width(block, self.model.config) // self.launch.tp_size
        return self.residual + self.launch.compute_bytes * self.rows * (inner * copies_of_input)


def _kept_bytes(model: PreTrainedModel, block_size: int, launch: Launch) -> float:
    """Bytes per token that are held of a block whose activations are computed again: its input, and
    selected results.
    """
    width = model.config.hidden_size
    if launch.checkpointing != SELECTIVE:
        return launch.residual_bytes * width
    return launch.residual_bytes * width + block_bytes(model, block_size, launch)[1]
