"""The training loop. This is the page to read: everything a run does, in the order it does it.

A run is a pure function of its recipe, its seed and the step: which tokens a step sees, its learning rate and its
dropout masks never depend on how the process got there. So a run may stop anywhere and go on somewhere else.
"""

import math
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError

from nanogpt_hf.config.checks import seconds_of
from nanogpt_hf.config.finetune import frozen_layers_at
from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.prepare import load_prepared
from nanogpt_hf.distributed.accelerator import build_accelerator, describe_machine, stop_on_signals
from nanogpt_hf.distributed.full_state import full_weights
from nanogpt_hf.errors import RunFolderError, Stopped, UserError
from nanogpt_hf.evaluation.samples import TrainingSamples
from nanogpt_hf.evaluation.tasks import TrainingTasks
from nanogpt_hf.export.save_trained import save_trained
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.checkpoint import TrainState, load_checkpoint, newest_step, save_checkpoint
from nanogpt_hf.training.evaluate import evaluate
from nanogpt_hf.training.layer_stats import Layers
from nanogpt_hf.training.micro_batch import rehearsal, settle_micro_batch
from nanogpt_hf.training.monitor import Health
from nanogpt_hf.training.optimizer import clip_gradients, set_learning_rate, update
from nanogpt_hf.training.schedule import learning_rate_at
from nanogpt_hf.training.setup import batches_of, seed_dropout, set_up
from nanogpt_hf.training.tracking import Tracking


def train(config: Config, run: RunFolder, *, resume: bool = False) -> TrainState:
    """Train `config` into `run`, from scratch or from its newest checkpoint; return where it ended.

    Raises UserError before anything is written where recipe, data and machine do not fit, and Stopped where a signal
    ended the run early, after saving.
    """
    # Set up: machine, data, model, optimizer.
    accelerator = build_accelerator(config, run)
    data = load_prepared(config)
    thaws = config.finetune.unfreeze_every is not None
    first_step = newest_step(accelerator, run) if resume and thaws else 0
    model, optimizer, model_config = set_up(accelerator, config, data, first_step)
    frozen = frozen_layers_at(first_step, config.finetune)

    def rehearse(size: int) -> None:
        with rehearsal(accelerator, model, optimizer):
            batches = batches_of(accelerator, config, data, size)
            train_step(accelerator, model, optimizer, batches, 0, learning_rate=0.0, max_grad_norm=0.0)

    config = settle_micro_batch(accelerator, model, config, run if resume else None, rehearse)
    batches = batches_of(accelerator, config, data, config.train.micro_batch_size)
    tasks, samples = TrainingTasks(config, data.tokenizer), TrainingSamples(config, data.tokenizer)

    # Start anew, or stand where the newest checkpoint stood.
    if resume:
        state = load_checkpoint(accelerator, model, optimizer, run)
        if state.step > config.train.max_steps:
            raise UserError(f"{run.path}: is at step {state.step:,}, past train.max_steps {config.train.max_steps:,}")
        if accelerator.is_main_process:
            run.go_on(config_to_yaml(config))
    else:
        state = TrainState()
        if accelerator.is_main_process:
            run.start(config_to_yaml(config))
        accelerator.wait_for_everyone()
    tracking = Tracking(accelerator, config, run, state, model_config, batches)

    def save_model(folder: Path) -> None:
        weights = full_weights(accelerator, model)
        if accelerator.is_main_process:
            machine = describe_machine(accelerator)
            try:
                save_trained(folder, config, model_config, weights, data, state, machine)
            except (OSError, SafetensorError) as error:
                raise RunFolderError(f"{folder}: the model cannot be written: {error}") from None
        accelerator.wait_for_everyone()

    model.train()
    health = Health(accelerator, config, run)
    layers = Layers(accelerator, config, data.validation)
    with stop_on_signals(config.train.max_time and seconds_of(config.train.max_time)) as stop, tracking:
        while True:
            started = time.perf_counter()
            done = state.step == config.train.max_steps or state.out_of_patience(config.eval)
            # Several processes have to ask each other; they do where they meet anyway to report.
            ask = accelerator.num_processes == 1 or done or state.step % config.tracking.every == 0
            stopping = ask and stop.on_any_process(accelerator)

            if not stopping and state.evaluated_step < state.step and (done or state.step % config.eval.every == 0):
                evaluation = evaluate(
                    accelerator,
                    model,
                    data.validation,
                    block_size=config.data.block_size,
                    micro_batch_size=config.train.micro_batch_size,
                    tokens=config.eval.tokens,
                    bytes_per_token=data.manifest.validation.bytes_per_token,
                    stopping=lambda: stop.on_any_process(accelerator),
                )
                stopping = evaluation is None
                if not stopping:
                    state.evaluation, state.evaluated_step = evaluation, state.step
                    best = math.inf if state.best_loss is None else state.best_loss
                    is_best = state.step > 0 and evaluation.loss < best
                    if is_best:
                        state.best_loss, state.best_step = evaluation.loss, state.step
                        save_model(run.best)
                    tracking.samples(state, samples.write(accelerator, model, state.step))
                    tracking.evaluation(state, is_best, tasks.run(accelerator, model) | layers.look(model))
                    done = done or state.out_of_patience(config.eval)
                tracking.restart_clock(state)

            was_frozen, frozen = frozen, frozen_layers_at(state.step, config.finetune)
            if stopping or done or frozen < was_frozen or (state.step and state.step % config.checkpoint.every == 0):
                save_checkpoint(accelerator, model, optimizer, state, run, config.checkpoint.keep)
                tracking.restart_clock(state)
            if stopping:
                why = stop.reason or "another process asked for it"
                raise Stopped(f"stopped at step {state.step:,}, saved ({why}); go on with --resume")
            if done:
                save_model(run.final)
                return state
            if frozen != was_frozen:  # go on as a resumed run does, with what trains from here on
                model, optimizer = accelerator.free_memory(model, optimizer)
                model, optimizer, _ = set_up(accelerator, config, data, state.step)
                rehearse(config.train.micro_batch_size)
                state = load_checkpoint(accelerator, model, optimizer, run)
                model.train()
                tracking.restart_clock(state)

            learning_rate = learning_rate_at(state.step, config.optim, config.train.max_steps)
            with layers.watched(model, optimizer, state.step + 1):
                loss, grad_norm = train_step(
                    accelerator,
                    model,
                    optimizer,
                    batches,
                    state.step + state.skipped_steps,
                    learning_rate=learning_rate,
                    max_grad_norm=config.optim.max_grad_norm,
                )
            state.step += 1
            state.tokens += config.train.tokens_per_step
            health.add(grad_norm)
            if state.step % config.tracking.every == 0:
                loss = accelerator.reduce(loss, "sum").item()
                tracking.train(state, loss, learning_rate, health.report(state) | layers.report(grad_norm.item()))
                if health.spiked(state, loss):
                    before, state = state, load_checkpoint(accelerator, model, optimizer, run)
                    health.rolled_back(before, state)
                    tracking.rewind(state)
            state.seconds += time.perf_counter() - started
            tracking.step_done(state)


def train_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    step: int,
    *,
    learning_rate: float,
    max_grad_norm: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step on the micro-batches of `step`; 0 clips nothing.

    Returns this process's share of the loss (the shares sum to the mean over the step's tokens) and the norm of the
    whole gradient before clipping, both still on the device: reading them would make the host wait.
    """
    set_learning_rate(optimizer, learning_rate)
    # Each token weighs the same, however many of them a micro-batch or a process has.
    tokens_in_step = batches.counted(step)
    total = torch.zeros((), device=accelerator.device)
    for index, batch in enumerate(batches.at(step)):
        seed_dropout(accelerator.device, derive_seed(batches.seed, "dropout", step, batches.micro_batch_number(index)))
        with accelerator.accumulate(model):
            batch = {name: tensor.to(accelerator.device, non_blocking=True) for name, tensor in batch.items()}
            loss = model(**batch, num_items_in_batch=tokens_in_step, use_cache=False).loss
            # Undo two means: accelerate's over accumulated micro-batches, and the gradients' over processes.
            accelerator.backward(loss * accelerator.gradient_accumulation_steps * accelerator.num_processes)
            total += loss.detach()
            if accelerator.sync_gradients:
                grad_norm = clip_gradients(accelerator, model, optimizer, max_grad_norm)
                update(accelerator, optimizer)
    return total, grad_norm
