"""Bytes on a device by part, in each phase of a training step that can be the peak.

The sums follow from the model, its loss and training/step.py: what autograd saves of a block and
of the loss, and when gradients are allocated and freed. tests/planning/test_footprint.py
compares them with torch's allocator.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.optim.optimizer import kind_of
from nanogpt_hf.planning.activations import Activations
from nanogpt_hf.planning.copies import copy_bytes
from nanogpt_hf.planning.counts import Counts, StageShare, one_rank_of
from nanogpt_hf.planning.logits import loss_bytes
from nanogpt_hf.planning.sampling import Sampling
from nanogpt_hf.planning.teacher import Teacher

# The copy that a checkpoint is written from in the background, kept for the next one.
CHECKPOINT = "checkpoint"
PARTS = (
    "weights",
    "other models",
    "optimizer",
    "gradients",
    "copies",
    "activations",
    "cache",
    "logits",
    CHECKPOINT,
)
# The phases of a step that can be the peak. Only optimizers that need buffers have an update, only
# reinforcement learning samples, and only distillation has a teacher.
SAMPLING = "sampling"
TEACHER = "the teacher's pass"
LOSS = "the loss"
TOP = "the top block"
BOTTOM = "the bottom block"
EMBEDDING = "the embedding's gradient"
UPDATE = "update"


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device by part, in each phase of a step that can be the peak."""

    phases: dict[str, dict[str, float]]
    host_copy: float  # bytes per machine with GPUs, in host memory, for the copy of a checkpoint

    @property
    def peak_phase(self) -> str:
        """Return the phase with the most bytes."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> float:
        return sum(self.phases[self.peak_phase].values())


def start_model_bytes(model: nn.Module) -> int:
    """Bytes of the model that a run of `model` started from: whole on every process, in float32,
    without adapters.
    """
    return 4 * sum(p.numel() for name, p in model.named_parameters() if ".lora_" not in name)


@dataclass
class Memory:
    """Bytes on a device that has one pipeline stage, or the whole model: a method for each phase
    of a step that can be the peak.

    A phase is a dict of parts; parts that all phases have are in `always`.
    """

    model: PreTrainedModel
    launch: Launch
    stage: StageShare
    micro_batch_size: int
    block_size: int
    accumulation: int
    optim: OptimSection
    row_loss: str
    sampling: Sampling | None
    keeps_start: bool
    teacher: Teacher | None

    def footprint(self) -> Footprint:
        phases = {
            LOSS: self.at_the_loss(),
            TOP: self.in_a_block(0),
            BOTTOM: self.in_a_block(self.counts.backward_blocks - 1),
            EMBEDDING: self.at_the_embedding(),
        }
        if kind_of(self.optim).update_bytes:
            phases[UPDATE] = self.at_the_update()
        if self.teacher:
            phases[TEACHER] = self.while_taught(self.teacher)
        if self.sampling:
            phases[SAMPLING] = self.while_sampling(self.sampling)
        parts = dict.fromkeys(PARTS, 0.0) | self.always
        return Footprint({name: parts | own for name, own in phases.items()}, self.host_copy)

    # Numbers of parameters.

    @cached_property
    def counts(self) -> Counts:
        """Parameters that this device computes with."""
        return Counts.of(self.model, self.launch.tp_size, self.stage, self.launch.ep_size)

    @property
    def ep(self) -> int:
        """Return how many processes share the experts that this device keeps between steps."""
        # FSDP2 shards the copies of experts instead.
        return 1 if self.launch.sharding == "fsdp" else self.launch.ep_size

    @cached_property
    def held(self) -> Counts:
        """Parameters of which this device keeps its shard, with gradients and optimizer state."""
        return Counts.of(self.model, self.launch.tp_size, self.stage, self.ep)

    # What is there in all phases: weights, optimizer state, and the copy of a checkpoint.

    @cached_property
    def always(self) -> dict[str, float]:
        launch = self.launch
        held = self.held
        state = {
            "weights": 4 * held.total / launch.shards,
            "optimizer": self._optimizer_state(self.optim.state),
            CHECKPOINT: self.checkpoint if launch.on_cpu else 0.0,
        }
        others = float(start_model_bytes(self.model)) if self.keeps_start else 0.0
        others += self.teacher.kept(launch) if self.teacher else 0.0
        if others:
            state["other models"] = others
        if launch.sharding == "zero":
            # Weights in the compute precision, and a float32 copy in the optimizer.
            shards = launch.shards if launch.kind == "ZeRO-3" else 1
            state["weights"] = launch.compute_bytes * held.total / shards
            state["optimizer"] += 4 * held.trainable / launch.shards
        return state

    def _optimizer_state(self, precision: str) -> float:
        """Bytes of the optimizer state of this device's share, with state of that precision."""
        launch = self.launch
        rank = one_rank_of(self.model, launch.tp_size, self.ep)
        share = self.held.trainable / Counts.of(rank).trainable
        return share * _optimizer_bytes(rank, launch.shards, self.optim.name, precision)

    @cached_property
    def checkpoint(self) -> float:
        """Bytes of this device's copy that a checkpoint is written from, in float32."""
        return self._optimizer_state("float32") + 4 * self.held.total / self.launch.shards

    @property
    def host_copy(self) -> float:
        """Bytes of the copies of all GPUs in a machine, in host memory."""
        launch = self.launch
        if launch.on_cpu:
            return 0
        # One process saves what several have a copy of.
        distinct = max(launch.ep_size, launch.world_size // launch.copies)
        savers = min(launch.local_world_size, distinct)
        whole = 4 * Counts.of(self.model).total
        whole += _optimizer_bytes(self.model, 1, self.optim.name, "float32")
        return min(savers * self.checkpoint, whole)

    # Gradients.

    @cached_property
    def gradients(self) -> float:
        """Bytes of the gradients of a step."""
        size = 4 * self.held.trainable / self.launch.shards
        # torch's pipelines reduce them after the last backward pass of a step.
        return size * self.launch.shards if self.launch.pp_size > 1 else size

    @property
    def accumulated(self) -> float:
        """Bytes of the gradients that earlier micro-batches have left."""
        return self.gradients if self.accumulation > 1 else 0

    @property
    def head_gradient(self) -> float:
        """Bytes of a gradient of the head that is not yet reduced."""
        if not self.counts.head_is_trainable:
            return 0
        each = self.launch.compute_bytes if self.launch.sharding == "fsdp" else 4
        return self.counts.head * each

    @cached_property
    def activations(self) -> Activations:
        """Bytes that autograd holds on this device."""
        return Activations(
            self.model,
            self.launch,
            self.stage,
            self.counts,
            micro_batch_size=self.micro_batch_size,
            block_size=self.block_size,
            accumulation=self.accumulation,
        )

    # The phases.

    def at_the_loss(self) -> dict[str, float]:
        activations = self.activations
        logits = head_gradient = row_gradients = 0.0
        if self.stage.has_head:
            logits, head_gradient, row_gradients = loss_bytes(
                self.model,
                self.counts,
                self.launch,
                activations.rows,
                self.row_loss,
                self.teacher,
            )
        left = self.counts.backward_blocks
        # The last LayerNorm saves its input, and the head its own.
        norm = 2.0 * activations.residual
        if self.teacher:
            norm += self.teacher.hidden(self.launch, activations.rows)
        return {
            "gradients": self.accumulated + head_gradient,
            "activations": activations.waiting + activations.saved(left) + norm + row_gradients,
            "logits": logits,
            "copies": copy_bytes(self.counts, self.launch, left - activations.again(left)),
        }

    def in_a_block(self, done: int) -> dict[str, float]:
        """Return the parts in the backward pass of a block after `done` blocks above it."""
        activations = self.activations
        left = self.counts.backward_blocks - done
        is_again = activations.again(left) - activations.again(left - 1)
        computed_again = is_again * (
            activations.residual + activations.full_block - activations.kept_block
        )
        so_far = self.gradients * done * self.held.block / self.held.total
        cast = left - activations.again(left) + is_again
        return {
            "gradients": (self.accumulated or so_far) + self.head_gradient,
            "activations": activations.waiting
            + activations.saved(left)
            + computed_again
            + activations.passing,
            "copies": copy_bytes(self.counts, self.launch, cast, done),
        }

    def at_the_embedding(self) -> dict[str, float]:
        activations = self.activations
        # A tied head has its gradient, the embedding's, and their sum; and one more from earlier
        # micro-batches.
        heads = 2 if self.model.config.tie_word_embeddings else 0
        heads += self.accumulation > 1
        return {
            "gradients": self.gradients + self.head_gradient * heads,
            "activations": activations.waiting + 2 * activations.residual,
            "copies": copy_bytes(self.counts, self.launch, 0, self.counts.backward_blocks),
        }

    def at_the_update(self) -> dict[str, float]:
        launch = self.launch
        optim = self.optim
        shards = launch.shards * Counts.of(self.model).trainable / self.held.trainable
        copies = _update_bytes(
            self.model, launch.on_cpu, shards, launch.world_size, optim.name, optim.state
        )
        return {"gradients": self.gradients, "copies": copies}

    def while_taught(self, teacher: Teacher) -> dict[str, float]:
        """Return the parts in the pass of the teacher, before the student's."""
        return {
            "gradients": self.accumulated,
            **teacher.passing(self.launch, self.activations.rows),
        }

    def while_sampling(self, sampling: Sampling) -> dict[str, float]:
        launch = self.launch
        if launch.sharding == "none":
            # autocast keeps casts of what is trained until all answers are complete.
            copies = 2.0 * launch.autocast * self.counts.trainable
            # DDP has buckets for all gradients.
            copies += copy_bytes(self.counts, replace(launch, precision="no"), 0)
        else:
            copies = copy_bytes(self.counts, launch, 0)
        return {"copies": copies, **sampling.parts(self.model, launch)}


@lru_cache(maxsize=256)
def _optimizer_bytes(model: PreTrainedModel, shards: int, name: str, state: Any) -> float:
    """Bytes of the optimizer state of a whole model, on one of N shards."""
    return kind_of(OptimSection(name=name, state=state)).state_bytes(model, shards)


@lru_cache(maxsize=256)
def _update_bytes(
    model: PreTrainedModel, on_cpu: bool, shards: float, processes: int, name: str, state: Any
) -> float:
    """Bytes of the buffers of an optimizer that needs some for its update."""
    update_bytes = kind_of(OptimSection(name=name, state=state)).update_bytes
    return update_bytes(model, on_cpu, shards, processes) if update_bytes else 0.0
