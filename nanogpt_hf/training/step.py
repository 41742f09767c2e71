"""One optimizer step: forward, backward, clip, update."""

from typing import NamedTuple

import torch

from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.model.objective import Metrics
from nanogpt_hf.optim.optimizer import clip_gradients, set_learning_rate, update
from nanogpt_hf.training.run import Run


class StepResult(NamedTuple):
    """Scalars on the device: reading them makes the host wait."""

    loss: torch.Tensor  # this rank's share; the shares of all ranks sum to the mean over the step's targets
    grad_norm: torch.Tensor  # of the whole gradient, before clipping
    metrics: Metrics  # the objective's, shares like the loss


def train_step(run: Run, step: int, learning_rate: float) -> StepResult:
    """Take one optimizer step on the micro-batches of `step`."""
    accelerator, batches = run.accelerator, run.batches
    set_learning_rate(run.optimizer, learning_rate)
    # Each target weighs the same, however many of them a micro-batch or a rank has.
    num_targets = batches.num_targets(step)
    total, totals = torch.zeros((), device=accelerator.device), {}
    for index, batch in enumerate(batches.micro_batches(step)):
        seed_dropout(accelerator.device, derive_seed(batches.seed, "dropout", step, batches.micro_batch_number(index)))
        with accelerator.accumulate(run.model):
            batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
            summed_loss, metrics = run.objective(run.model, batch)
            loss = summed_loss / num_targets
            # Undo two means: Accelerate's over accumulated micro-batches, and that of the gradients over ranks.
            accelerator.backward(loss * accelerator.gradient_accumulation_steps * run.mesh.dp_size)
            total += loss.detach()
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0) + value.detach() / num_targets
            if accelerator.sync_gradients:
                grad_norm = clip_gradients(accelerator, run.model, run.optimizer, run.config.optim.max_grad_norm)
                update(accelerator, run.optimizer)
    return StepResult(total, grad_norm, totals)


def seed_dropout(device: torch.device, seed: int) -> None:
    """Seed the generator that dropout on `device` draws from, and only that one.

    torch.manual_seed seeds all kinds of devices, and formats a stack trace for each kind that is missing.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)
