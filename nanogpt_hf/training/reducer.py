"""Reducers: how the gradients of a step's micro-batches become one gradient on every process.

The loss of a step is a sum over micro-batches and ranks. A reducer runs the backward passes and
adds up what they give; an updater then clips the result (distributed/updates.py). Accelerate does
it with DDP, FSDP2 and DeepSpeed; a run with gradient groups has its own order of sums. Pipeline
stages order their passes by a schedule instead (distributed/pipeline.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, Protocol, cast

import torch

from nanogpt_hf.distributed.gradient_tree import GradientTree
from nanogpt_hf.distributed.updates import accumulate, micro_batches_not_counted
from nanogpt_hf.methods.run import Run


class Reducer(Protocol):
    """Interface of the two reducers to `train_step`, for one step."""

    def micro_batch(self) -> Any:
        """Context for the forward and the backward pass of the next micro-batch."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch's share of the loss of the step."""

    def finish(self) -> torch.Tensor:
        """Complete the gradient; return this process's share of the loss, a scalar."""
        ...


class MeanReducer:
    """Accelerate's gradients: means over micro-batches and over ranks."""

    def __init__(self, run: Run):
        self.run = run
        self.losses: list[torch.Tensor] = []
        # The loss is divided by the targets of the whole step already. So cancel two means:
        # accelerate's over the micro-batches, and the one over the ranks.
        self.means = run.accelerator.gradient_accumulation_steps * run.mesh.dp_cp_size

    def micro_batch(self) -> Any:
        return accumulate(self.run.accelerator, self.run.model)

    def backward(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach())
        # Each operation on the loss is a kernel, and one more in the backward pass.
        if self.means != 1:
            loss = loss * self.means
        self.run.accelerator.backward(loss)

    def finish(self) -> torch.Tensor:
        return reduce(torch.add, self.losses)


class TreeReducer:
    """Sums in an order that does not depend on the number of processes (gradient_tree.py)."""

    def __init__(self, run: Run, groups: int):
        self.run = run
        # A dry-run step has fewer micro-batches than groups.
        per_group = max(1, run.batches.accumulation * run.mesh.dp_size // groups)
        optimizer = cast(Any, run.optimizer.optimizer)
        self.tree = GradientTree(run.model, optimizer.in_model_order, per_group)

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        accelerator = self.run.accelerator
        # Accelerate divides each loss by the number of micro-batches that it counts, and this
        # division would round.
        with micro_batches_not_counted(accelerator), accelerator.no_sync(self.run.model):
            yield

    def backward(self, loss: torch.Tensor) -> None:
        # FSDP2 reduces gradients in the backward pass, so it has to know whether a group ends.
        self.tree.before_backward()
        self.run.accelerator.backward(loss)
        self.tree.add(loss.detach())

    def finish(self) -> torch.Tensor:
        loss = self.tree.finish()
        # Every process has the loss of the whole step, and it is reported as a sum over them.
        return loss if self.run.mesh.is_main else torch.zeros_like(loss)


def reducer_of(run: Run) -> Reducer:
    """Make the reducer of a run's next step."""
    groups = run.config.train.gradient_groups
    return TreeReducer(run, groups) if groups else MeanReducer(run)
