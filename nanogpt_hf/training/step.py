"""One optimizer step: batch, objective, backward, clip, update.

`next_step` finds the data and the learning rate of a run's next step, `take_step` prepares what its
method needs, and `train_step` computes the step. On one process, it computes

    set_learning_rate(optimizer, learning_rate)
    num_targets = batches.num_targets(step)
    for batch in batches.micro_batches(step):
        summed_loss, metrics = objective(model, batch)
        (summed_loss / num_targets).backward()
    clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
"""

from functools import reduce

import torch

from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.distributed.accelerator import sum_over_ranks
from nanogpt_hf.distributed.context_parallel import own_positions
from nanogpt_hf.methods.run import Run, StepResult
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.model.architecture import Metrics
from nanogpt_hf.model.experts import load_figures
from nanogpt_hf.optim.optimizer import learning_rate_at, set_learning_rate
from nanogpt_hf.training.reducer import reducer_of


def train_step(run: Run, step: int, learning_rate: float) -> StepResult:
    """Take one optimizer step on the micro-batches of `step`.

    The loss is a sum over the step's targets, on all ranks, divided once by their number: each
    target counts the same, in whichever micro-batch it is.

    A reducer adds up the gradients of micro-batches and ranks (reducer.py). The run's updater clips
    the sum and updates the weights (distributed/updates.py).
    """
    set_learning_rate(run.optimizer, learning_rate)
    if run.pipeline:
        loss, metrics = pipeline_forward_backward(run, step)
    else:
        loss, metrics = forward_backward(run, step)
    grad_norm = run.updater.clip(run.config.optim.max_grad_norm)
    run.updater.step()
    return StepResult(loss, grad_norm, grad_norm, metrics, {})


def forward_backward(run: Run, step: int) -> tuple[torch.Tensor, Metrics]:
    """Compute the gradient of a step, micro-batch by micro-batch; return this rank's shares of the
    loss and of the metrics.
    """
    num_targets = run.batches.num_targets(step)
    reducer = reducer_of(run)
    metrics: Metrics = {}
    for index, batch in enumerate(run.batches.micro_batches(step)):
        seed_micro_batch(run, step, index)
        batch = on_device(run, batch)
        # The last micro-batch of the step reduces the gradients over the ranks.
        with reducer.micro_batch():
            summed_loss, sums = run.objective(run.model, batch)
            reducer.backward(summed_loss / num_targets)
        for name, value in sums.items():
            metrics[name] = metrics.get(name, 0) + value.detach() / num_targets
    return reducer.finish(), metrics


def pipeline_forward_backward(run: Run, step: int) -> tuple[torch.Tensor, Metrics]:
    """Do the same as `forward_backward` with pipeline stages.

    Stages wait for each other's activations and gradients, so a schedule orders the passes of all
    micro-batches. The last stage computes the loss of the next token by itself.
    """
    assert run.pipeline
    loss = run.pipeline.train(
        list(run.batches.micro_batches(step)),
        run.batches.num_targets(step),
        before=lambda index: seed_micro_batch(run, step, index),
    )
    return loss, {}


def on_device(run: Run, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy a micro-batch to the device; with context parallelism, return this process's positions
    of it.
    """
    device = run.accelerator.device
    batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    # Before the objective, so that its terms see the positions that the model computes.
    return own_positions(batch, run.model, run.mesh) if run.mesh.cp_size > 1 else batch


def next_step(run: Run) -> tuple[StepResult, float]:
    """Take the next step of a run and count it; return its result and its learning rate."""
    state = run.state
    # After a spike the data is some steps ahead: the batches that led to the spike are skipped.
    data_step = state.step + state.skipped_steps
    rate = learning_rate_at(state.step, run.config.optim, run.config.train.max_steps)
    # Forward and backward pass of each micro-batch, clipping and update.
    result = take_step(run, data_step, rate)
    state.step += 1
    state.tokens += run.config.train.tokens_per_step
    return result, rate


def take_step(run: Run, step: int, learning_rate: float) -> StepResult:
    """Take one step of the run's method: make its data ready, then train on it."""
    method = method_of(run.config)
    figures = method.begin_step(run, step)
    # Reinforcement learning may train several times on the answers that it has sampled.
    updates = range(method.updates(run.config))
    results = [train_step(run, step, learning_rate) for _ in updates]
    # A gradient that is not finite counts in any of the updates: `maximum` passes NaN on.
    grad_norm = reduce(torch.maximum, [result.grad_norm for result in results])
    return results[-1]._replace(grad_norm=grad_norm, figures=figures)


def seed_micro_batch(run: Run, step: int, index: int) -> None:
    """Seed dropout for this rank's micro-batch `index` of a step.

    The seed follows from the number of the micro-batch among all ranks. So a resumed run draws the
    masks of an uninterrupted one, and several processes draw the masks of one.
    """
    batches = run.batches
    mesh = run.mesh
    # Processes that share the positions of a sequence draw masks of their own parts.
    place = batches.micro_batch_number(index) * mesh.cp_size + mesh.cp_rank
    # The first pipeline stage draws what one process would; later stages need other masks.
    stage = [mesh.pp_rank] if mesh.pp_rank else []
    seed = derive_seed(batches.seed, "dropout", step, place, *stage)
    seed_dropout(run.accelerator.device, seed)


def seed_dropout(device: torch.device, seed: int) -> None:
    """Seed the random generator of `device` and no other.

    torch.manual_seed seeds every device type, and formats a stack trace for each type that is
    missing.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)


def step_metrics(run: Run, result: StepResult) -> dict[str, float]:
    """Metrics of the objective and of the method's step, by name. All processes call it."""
    sums = {name: sum_over_ranks(run.accelerator, value) for name, value in result.metrics.items()}
    values: dict[str, float] = {}
    for name, value in sums.items():
        # Experts report a vector, the share of tokens that each of them gets.
        values |= load_figures(value) if value.dim() else {name: value.item()}
    return {f"train/{name}": value for name, value in (values | result.figures).items()}
