"""One optimizer step: forward, backward, clip, update."""

from typing import Any, cast

import torch

from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.distributed.accelerator import (
    accumulate,
    clip_gradients,
    micro_batches_not_counted,
    sum_over_ranks,
    update,
)
from nanogpt_hf.distributed.context_parallel import own_positions
from nanogpt_hf.distributed.gradient_tree import GradientTree
from nanogpt_hf.distributed.pipeline import Pipeline
from nanogpt_hf.model.architecture import Metrics
from nanogpt_hf.model.experts import load_figures
from nanogpt_hf.optim.optimizer import set_learning_rate, skip_step_unless_finite
from nanogpt_hf.training.run import Run, StepResult


def train_step(run: Run, step: int, learning_rate: float) -> StepResult:
    """Take one optimizer step on the micro-batches of `step`."""
    if run.pipeline:
        return _pipelined_step(run, run.pipeline, step, learning_rate)
    if groups := run.config.train.gradient_groups:
        return _grouped_step(run, groups, step, learning_rate)
    accelerator, batches = run.accelerator, run.batches
    set_learning_rate(run.optimizer, learning_rate)
    # The loss is divided once by all targets of the step, so each counts the same in every
    # micro-batch and rank.
    num_targets = batches.num_targets(step)
    loss_sum = grad_norm = torch.zeros((), device=accelerator.device)
    metric_sums: Metrics = {}
    for index, batch in enumerate(batches.micro_batches(step)):
        with accumulate(accelerator, run.model):
            summed_loss, metrics = _forward(run, step, index, batch)
            loss = summed_loss / num_targets
            # Cancel two means: Accelerate's over accumulated micro-batches, and the gradients' over
            # ranks.
            accelerator.backward(
                loss * accelerator.gradient_accumulation_steps * run.mesh.dp_cp_size
            )
            loss_sum = loss_sum + loss.detach()
            for name, value in metrics.items():
                metric_sums[name] = metric_sums.get(name, 0) + value.detach() / num_targets
            if accelerator.sync_gradients:
                grad_norm = clip_gradients(
                    accelerator, run.model, run.optimizer, run.config.optim.max_grad_norm
                )
                update(accelerator, run.optimizer)
    return StepResult(loss_sum, grad_norm, metric_sums, {})


def _forward(
    run: Run, step: int, index: int, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, Metrics]:
    """The summed loss and the metrics of this rank's micro-batch `index`."""
    accelerator, batches = run.accelerator, run.batches
    place = batches.micro_batch_number(index) * run.mesh.cp_size + run.mesh.cp_rank
    seed_dropout(accelerator.device, derive_seed(batches.seed, "dropout", step, place))
    batch = {
        name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()
    }
    return run.objective(run.model, own_positions(batch, run.model, run.mesh))


def _grouped_step(run: Run, groups: int, step: int, learning_rate: float) -> StepResult:
    """Take one optimizer step whose bytes do not depend on the number of processes."""
    accelerator, batches, optimizer = run.accelerator, run.batches, run.optimizer
    set_learning_rate(optimizer, learning_rate)
    num_targets = batches.num_targets(step)
    # a dry-run step has fewer micro-batches than groups
    per_group = max(1, batches.accumulation * run.mesh.dp_size // groups)
    bare = cast(Any, optimizer.optimizer)
    tree = GradientTree(run.model, bare.in_model_order, per_group)
    # not counted: accelerate would divide each loss by their number, which rounds
    with micro_batches_not_counted(accelerator), accelerator.no_sync(run.model):
        for index, batch in enumerate(batches.micro_batches(step)):
            loss = _forward(run, step, index, batch)[0] / num_targets
            tree.before_backward()
            accelerator.backward(loss)
            tree.add(loss.detach())
    loss = tree.finish()
    grad_norm = tree.clip(run.config.optim.max_grad_norm)
    skip_step_unless_finite(bare, grad_norm)
    update(accelerator, optimizer)
    # all processes have the loss of the step, and it is reported as a sum over them
    return StepResult(loss if run.mesh.is_main else torch.zeros_like(loss), grad_norm, {}, {})


def _pipelined_step(run: Run, pipeline: Pipeline, step: int, learning_rate: float) -> StepResult:
    """Take one optimizer step: all micro-batches through all stages, clip, update.

    Without dropout it equals that of one process. With dropout, the first stage draws the masks
    of one process.
    """
    batches, accelerator = run.batches, run.accelerator
    set_learning_rate(run.optimizer, learning_rate)

    def before(index: int) -> None:
        number = batches.micro_batch_number(index)
        later = [pipeline.index] if pipeline.index else []
        seed_dropout(pipeline.device, derive_seed(batches.seed, "dropout", step, number, *later))

    loss = pipeline.train(list(batches.micro_batches(step)), batches.num_targets(step), before)
    grad_norm = clip_gradients(
        accelerator, run.model, run.optimizer, run.config.optim.max_grad_norm
    )
    update(accelerator, run.optimizer)
    return StepResult(loss, grad_norm, {}, {})


def step_metrics(run: Run, result: StepResult) -> dict[str, float]:
    """Metrics of the objective and of the method's step, by name. All processes call it."""
    sums = {name: sum_over_ranks(run.accelerator, value) for name, value in result.metrics.items()}
    values: dict[str, float] = {}
    for name, value in sums.items():
        values |= load_figures(value) if value.dim() else {name: value.item()}
    return {f"train/{name}": value for name, value in (values | result.figures).items()}


def seed_dropout(device: torch.device, seed: int) -> None:
    """Seed the random generator of `device` and no other.

    torch.manual_seed seeds every device type, and formats a stack trace for each type that is
    missing.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)
