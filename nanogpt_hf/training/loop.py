"""The training loop: for each segment, for each step: evaluate, checkpoint, stop, step, log.

A run is a pure function of its recipe, its seed and the step: the tokens of a step, its learning rate and its dropout
masks never depend on earlier steps or restarts, so a run can stop at any step and resume on another machine. A segment
ends when layers are unfrozen or after a loss spike; both load a checkpoint, as a resumed run does.
"""

import dataclasses
import math
import time
from enum import Enum
from pathlib import Path

from safetensors import SafetensorError

from nanogpt_hf.config.checks import parse_duration
from nanogpt_hf.config.finetune import next_unfreezing
from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.distributed.accelerator import build_accelerator, describe_machine, sum_over_ranks
from nanogpt_hf.distributed.full_state import full_weights
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.distributed.signals import StopRequest, stop_on_signals
from nanogpt_hf.errors import RunFolderError, Stopped, UserError
from nanogpt_hf.evaluation.samples import TrainingSamples
from nanogpt_hf.evaluation.tasks import TrainingTasks
from nanogpt_hf.export.save_trained import save_trained
from nanogpt_hf.optim.schedule import learning_rate_at
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.identity import run_identity
from nanogpt_hf.runs.provenance import restore_threads
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training.checkpoint import load_checkpoint, newest_step
from nanogpt_hf.training.checkpoint_writer import check_shared_folder
from nanogpt_hf.training.evaluate import evaluate_run
from nanogpt_hf.training.observers import Observers, finishing, observe
from nanogpt_hf.training.policy import policy_step
from nanogpt_hf.training.run import Run
from nanogpt_hf.training.setup import build_run, rebuild_model
from nanogpt_hf.training.step import step_metrics, train_step


class SegmentEnd(Enum):
    """Why a segment ended."""

    DONE = "done"
    UNFREEZE = "unfreeze"
    LOSS_SPIKE = "loss spike"


def train(config: Config, folder: RunFolder, data: PreparedData, *, resume: bool = False) -> TrainState:
    """Train `config` on `data` into `folder`, from scratch or from its newest checkpoint; return the final state.

    Raises UserError before anything is written if recipe, data and machine do not fit together, and Stopped after
    saving if a signal ended the run early.
    """
    accelerator = build_accelerator(config, folder)
    if resume and accelerator.device.type == "cpu":
        restore_threads(folder, Mesh.from_environment().local_world_size)
    step = newest_step(accelerator, folder) if resume and config.finetune.unfreeze_every else 0
    run = build_run(config, accelerator, data, folder, step=step, resume=resume)
    check_shared_folder(accelerator, folder)
    tasks, samples = TrainingTasks(run.config, run.data.tokenizer), TrainingSamples(run.config, run.data.tokenizer)
    start_or_resume(run, resume)
    observers = observe(run, tasks, samples)
    max_seconds = parse_duration(config.train.max_time) if config.train.max_time else None
    with stop_on_signals(max_seconds) as stop, finishing(observers, stop):
        while (end := train_segment(run, observers, stop)) is not SegmentEnd.DONE:
            if end is SegmentEnd.UNFREEZE:
                rebuild_model(run)
            before = run.state
            observers.checkpoints.wait()
            run.state = load_checkpoint(accelerator, run.model, run.optimizer, folder, before.identity)
            run.state.seconds = before.seconds
            run.saved = dataclasses.replace(run.state)
            if end is SegmentEnd.LOSS_SPIKE:
                observers.monitor.rolled_back(before, run.state)
                observers.tracking.rewind()
            observers.tracking.restart_clock()
    return run.state


def start_or_resume(run: Run, resume: bool) -> None:
    """Start the run folder, or load the newest checkpoint from it."""
    recipe, identity = config_to_yaml(run.config), run_identity(run.config, run.data.manifest)
    run.state.identity = identity
    if resume:
        run.state = load_checkpoint(run.accelerator, run.model, run.optimizer, run.folder, identity)
        run.saved = dataclasses.replace(run.state)
        step, max_steps = run.state.step, run.config.train.max_steps
        if step > max_steps:
            raise UserError(f"{run.folder.path}: its step {step:,} is past train.max_steps {max_steps:,}")
    if run.mesh.is_main:
        (run.folder.update_recipe if resume else run.folder.start)(recipe)
    run.accelerator.wait_for_everyone()


def train_segment(run: Run, observers: Observers, stop: StopRequest) -> SegmentEnd:
    """Train until the run is done, frozen layers are unfrozen, or the loss spikes. Raises Stopped on a signal."""
    config, state, tracking = run.config, run.state, observers.tracking
    unfreezing = next_unfreezing(state.step, config.finetune)
    while True:
        started = time.perf_counter()
        done = state.step == config.train.max_steps or state.out_of_patience(config.eval)
        # With several processes this is a collective, so it runs only at steps that are logged.
        poll = run.mesh.world_size == 1 or done or state.step % config.tracking.every == 0
        stopping = poll and stop.on_any_process(run.accelerator)

        if not stopping and state.evaluated_step < state.step and (done or state.step % config.eval.every == 0):
            stopping = not evaluate_and_report(run, observers, stop)
            done = done or state.out_of_patience(config.eval)
        unfreeze = state.step == unfreezing
        due = stopping or done or unfreeze or (state.step and state.step % config.checkpoint.every == 0)
        if due and state != run.saved:
            observers.monitor.settle(state)
            observers.checkpoints.save(run.model, run.optimizer, state)
            run.saved = dataclasses.replace(state)
            tracking.restart_clock()
        if stopping:
            reason = stop.reason or "another process asked for it"
            raise Stopped(f"stopped at step {state.step:,}, saved ({reason}); continue with --resume")
        if done:
            observers.checkpoints.wait()  # so that the disk does not need room for both at once
            save_model(run, run.folder.final)
            return SegmentEnd.DONE
        if unfreeze:
            state.seconds += time.perf_counter() - started
            return SegmentEnd.UNFREEZE

        learning_rate = learning_rate_at(state.step, config.optim, config.train.max_steps)
        take_step = policy_step if config.rl.task else train_step
        number = state.step + state.skipped_steps
        with (
            observers.layers.measured_step(run.model, run.optimizer, state.step + 1),
            observers.sources.measured_step(state.step + 1, number),
        ):
            result = take_step(run, number, learning_rate)
        state.step += 1
        state.tokens += config.train.tokens_per_step
        observers.monitor.add(result.grad_norm)
        spiked = False
        if state.step % config.tracking.every == 0:
            loss = sum_over_ranks(run.accelerator, run.mesh, result.loss).item()
            metrics = observers.monitor.report(state) | observers.layers.step_report(result.grad_norm.item())
            tracking.train(loss, learning_rate, metrics | step_metrics(run, result) | observers.sources.report())
            observers.push.poll()
            spiked = observers.monitor.spiked(state, loss, run.saved)
        state.seconds += time.perf_counter() - started
        tracking.step_done()
        if spiked:
            return SegmentEnd.LOSS_SPIKE


def evaluate_and_report(run: Run, observers: Observers, stop: StopRequest) -> bool:
    """Evaluate, save the model if it is the best so far, and log; False if a signal interrupted the evaluation."""
    state = run.state
    evaluated = evaluate_run(run, stopping=lambda: stop.on_any_process(run.accelerator))
    if evaluated is not None:
        state.evaluation, state.evaluated_step = evaluated.evaluation, state.step
        is_best = state.step > 0 and evaluated.score < (math.inf if state.best_loss is None else state.best_loss)
        if is_best:
            state.best_loss, state.best_step = evaluated.score, state.step
            observers.checkpoints.wait()  # so that the disk does not need room for both at once
            save_model(run, run.folder.best)
        samples = evaluated.samples + observers.samples.write(run.accelerator, run.model, state.step)
        observers.tracking.samples(samples)
        metrics = observers.tasks.run(run.accelerator, run.model) | observers.layers.evaluation_report(run.model)
        observers.tracking.evaluation(evaluated, is_best, metrics)
        observers.reports.plot(observers.tracking.events)
        if is_best:
            observers.push.new_model(run.folder.best)
    observers.tracking.restart_clock()
    return evaluated is not None


def save_model(run: Run, path: Path) -> None:
    """Save the model as a model folder at `path`, replacing the one before."""
    weights = full_weights(run.accelerator, run.model)
    if run.mesh.is_main:
        machine = describe_machine(run.accelerator)
        try:
            save_trained(path, run.config, run.model_config, weights, run.data, run.state, machine)
        except (OSError, SafetensorError) as error:
            raise RunFolderError(f"{path}: the model cannot be written: {error}") from None
    run.accelerator.wait_for_everyone()
