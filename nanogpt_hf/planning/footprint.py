"""Estimate the memory of a training step: of the pipeline stage with the highest peak, or of any
device.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.planning.counts import stages_of
from nanogpt_hf.planning.memory import Footprint, Memory
from nanogpt_hf.planning.sampling import Sampling
from nanogpt_hf.planning.teacher import Teacher


def footprint(
    model: PreTrainedModel,
    launch: Launch,
    *,
    micro_batch_size: int,
    block_size: int,
    accumulation: int,
    optim: OptimSection | None = None,
    sequences: int = 1,
    row_loss: str = "",
    sampling: Callable[[int], Sampling] | None = None,
    keeps_start: bool = False,
    teacher: Teacher | None = None,
) -> Footprint:
    """Estimate the memory of a training step; `model` may be on the meta device.

    With accumulation, gradients stay allocated after the first micro-batch. `optim`: that of the
    recipe; without it AdamW with float32 state. `sequences` and `row_loss` come from a method
    (methods/method.py). `sampling` makes the answers that are sampled at once from the size of a
    micro-batch. `keeps_start`: the model that the run started from stays, too; `teacher`: another
    one that has a pass in each micro-batch. Of a pipeline it is the stage with the highest peak, of
    other kinds of parallelism any device.
    """
    footprints = []
    for stage in stages_of(model, launch):
        memory = Memory(
            model,
            launch,
            stage,
            # A micro-batch of pairs has two sequences for each.
            micro_batch_size=micro_batch_size * sequences,
            block_size=block_size,
            accumulation=accumulation,
            optim=optim or OptimSection(),
            row_loss=row_loss,
            sampling=sampling and sampling(micro_batch_size),
            keeps_start=keeps_start,
            teacher=teacher,
        )
        footprints.append(memory.footprint())
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
