"""Gradient and update of a step: accumulate it over micro-batches, clip it, step.

How a gradient is clipped depends on the layout: who has which part of it, and who clips. That is
decided once, when a run is built (`updater_of`), and not at every step.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from nanogpt_hf.distributed.deepspeed import is_zero
from nanogpt_hf.distributed.expert_parallel import average_copies
from nanogpt_hf.distributed.gradient_tree import norm_by_rows
from nanogpt_hf.distributed.mesh import Mesh, mesh_of
from nanogpt_hf.distributed.pipeline import Pipeline, pipeline_of
from nanogpt_hf.optim.optimizer import skip_step_unless_finite
from nanogpt_hf.optim.state import clip_to_norm, full_tensor, total_norm


@contextmanager
def accumulate(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Context for the forward and backward pass of a micro-batch; the last one of a step reduces
    the gradients.

    FSDP2 reduce-scatters them after each (`sync_each_batch`), since it would otherwise
    accumulate whole gradients, 4 bytes per parameter on each process. HSDP's all-reduce over the
    copies waits for the last.
    """
    with accelerator.accumulate(model):
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(accelerator.sync_gradients)
        yield


@contextmanager
def micro_batches_not_counted(accelerator: Accelerator, count: int = 1) -> Iterator[None]:
    """Context for a step of `count` micro-batches that leaves accelerate's counter of micro-batches
    at 0.

    Accelerate lets the optimizer step at multiples of the accumulation.
    """
    accumulation = accelerator.gradient_accumulation_steps
    accelerator.gradient_accumulation_steps = count
    try:
        yield
    finally:
        # Also if the step has run out of memory: the next one is complete again.
        accelerator.gradient_accumulation_steps = accumulation
        accelerator.step = 0


class Updater:
    """Clips the gradient of a step and updates the weights.

    This one is for whole models, DDP, FSDP2, and tensor and context parallelism: after the last
    backward pass every process has its part of the gradient, in tensors or DTensors, and the norm
    of the whole follows from the parts.
    """

    def __init__(self, optimizer: Any):
        # The optimizer in accelerate's wrapper. At each step the wrapper would only forward the
        # call, and search Python's path twice for a package (LOMO).
        self.optimizer: Any = cast(AcceleratedOptimizer, optimizer).optimizer

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients to `max_norm` (0: not) and return their norm before, a scalar on the
        device.

        If it is not finite, the next step leaves weights and state unchanged.
        """
        # In the model's order, since a norm is a sum, and depends on the order in its last bits.
        parameters = [p for p in self.optimizer.in_model_order if p.grad is not None]
        norm = self.norm(parameters)
        clip_to_norm(parameters, max_norm, norm)
        skip_step_unless_finite(self.optimizer, norm)
        return norm

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Norm of the whole gradient, the same on all processes."""
        return total_norm([cast(Tensor, p.grad) for p in parameters])

    def step(self) -> None:
        """Update the weights, and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class ExpertUpdater(Updater):
    """For experts that processes share under DDP, which does not see their gradients."""

    def __init__(self, optimizer: Any, mesh: Mesh):
        super().__init__(optimizer)
        self.mesh = mesh

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        average_copies(parameters, self.mesh)
        return super().norm(parameters)


class RowUpdater(Updater):
    """For gradient groups: the norm is summed row by row, so that its bytes do not depend on the
    shards.
    """

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        return norm_by_rows([cast(Tensor, p.grad) for p in parameters])


class StageUpdater(Updater):
    """For a pipeline stage, which has the gradients of its own layers only."""

    def __init__(self, optimizer: Any, pipeline: Pipeline):
        super().__init__(optimizer)
        self.pipeline = pipeline

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        return self.pipeline.norm(parameters)


class AccelerateUpdater(Updater):
    """For DeepSpeed, which clips and steps by itself, and for fp16's loss scaler, which divides the
    gradients by its scale first. Both skip a step whose gradients are not finite.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any):
        super().__init__(optimizer)
        self.accelerator = accelerator
        self.model = model
        self.wrapper = optimizer

    def clip(self, max_norm: float) -> Tensor:
        norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm or math.inf)
        # DeepSpeed has clipped and stepped already, and returns a number.
        return torch.as_tensor(full_tensor(norm), device=self.accelerator.device)

    def step(self) -> None:
        self.wrapper.step()
        self.wrapper.zero_grad()


def updater_of(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, *, has_groups: bool = False
) -> Updater:
    """Choose the updater of a prepared model and its optimizer; `has_groups`: of a run with
    gradient groups.
    """
    # Settings with an updater of their own do not combine with groups (config/compatibility.py).
    if has_groups:
        return RowUpdater(optimizer)
    if is_zero(accelerator) or accelerator.scaler is not None:
        return AccelerateUpdater(accelerator, model, optimizer)
    if pipeline := pipeline_of(accelerator):
        return StageUpdater(optimizer, pipeline)
    mesh = mesh_of(accelerator)
    return ExpertUpdater(optimizer, mesh) if mesh.ep_size > 1 else Updater(optimizer)
