"""One optimizer step: forward, backward, clip, update."""

from typing import NamedTuple

import torch

from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.distributed.accelerator import accumulate, clip_gradients, sum_over_ranks, update
from nanogpt_hf.distributed.context_parallel import own_positions
from nanogpt_hf.model.objective import Metrics
from nanogpt_hf.optim.optimizer import set_learning_rate
from nanogpt_hf.rl.rollouts import Rollouts
from nanogpt_hf.training.pipeline import pipelined_step
from nanogpt_hf.training.run import Run


class StepResult(NamedTuple):
    """Results of a step, scalars on the device: reading them makes the host wait."""

    loss: torch.Tensor  # this rank's share; its sum over ranks is the mean over the step's targets
    grad_norm: torch.Tensor  # of the whole gradient, before clipping
    metrics: Metrics  # of the objective; shares, like the loss


def train_step(run: Run, step: int, learning_rate: float) -> StepResult:
    """Take one optimizer step on the micro-batches of `step`."""
    if run.mesh.pp_size > 1:
        return StepResult(*pipelined_step(run, step, learning_rate, seed_dropout), {})
    accelerator, batches = run.accelerator, run.batches
    set_learning_rate(run.optimizer, learning_rate)
    # The loss is divided once by all targets of the step, so each counts the same in every micro-batch and rank.
    num_targets = batches.num_targets(step)
    loss_sum = grad_norm = torch.zeros((), device=accelerator.device)
    metric_sums: Metrics = {}
    for index, batch in enumerate(batches.micro_batches(step)):
        number = batches.micro_batch_number(index) * run.mesh.cp_size + run.mesh.cp_rank
        seed_dropout(accelerator.device, derive_seed(batches.seed, "dropout", step, number))
        with accumulate(accelerator, run.model):
            batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
            batch = own_positions(batch, run.model, run.mesh)
            summed_loss, metrics = run.objective(run.model, batch)
            loss = summed_loss / num_targets
            # Cancel two means: Accelerate's over accumulated micro-batches, and the gradients' over ranks.
            accelerator.backward(loss * accelerator.gradient_accumulation_steps * run.mesh.dp_cp_size)
            loss_sum = loss_sum + loss.detach()
            for name, value in metrics.items():
                metric_sums[name] = metric_sums.get(name, 0) + value.detach() / num_targets
            if accelerator.sync_gradients:
                grad_norm = clip_gradients(accelerator, run.model, run.optimizer, run.config.optim.max_grad_norm)
                update(accelerator, run.optimizer)
    return StepResult(loss_sum, grad_norm, metric_sums)


def step_metrics(run: Run, result: StepResult) -> dict[str, float]:
    """Metrics of the objective and of the step's blocks, by name. All processes call it."""
    values = {name: sum_over_ranks(run.accelerator, run.mesh, value).item() for name, value in result.metrics.items()}
    blocks = run.batches.blocks
    values |= blocks.metrics() if isinstance(blocks, Rollouts) else {}
    return {f"train/{name}": value for name, value in values.items()}


def seed_dropout(device: torch.device, seed: int) -> None:
    """Seed the random generator of `device` and no other.

    torch.manual_seed seeds every device type, and formats a stack trace for each type that is missing.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)
