"""The training loop: for each step: evaluate, checkpoint, stop, step, log.

A run is a pure function of its recipe, its seed and the step: the tokens of a step, its learning
rate and its dropout masks never depend on earlier steps or restarts, so a run can stop at any
step and resume on another machine. What needs another model, optimizer or batch in the middle of a
run ends the loop: layers are unfrozen, a stage begins, or the loss has spiked. The run then starts
again from its newest checkpoint, as a resumed run does.
"""

import dataclasses
import math
import time
from pathlib import Path

from safetensors import SafetensorError

from nanogpt_hf.config.checks import parse_duration
from nanogpt_hf.config.finetune import next_unfreezing
from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.stages import largest_stage, next_stage
from nanogpt_hf.distributed.accelerator import describe_machine, sum_over_ranks
from nanogpt_hf.distributed.full_state import full_weights
from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process
from nanogpt_hf.distributed.signals import StopRequest, stop_on_signals
from nanogpt_hf.errors import DivergedError, RunFolderError, Stopped
from nanogpt_hf.evaluation.table import load_training_evaluations
from nanogpt_hf.export.model_folder import save_trained
from nanogpt_hf.optim.optimizer import learning_rate_at
from nanogpt_hf.runs.files import write_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.methods import method_of
from nanogpt_hf.training.micro_batch import one_line_for_too_little_memory
from nanogpt_hf.training.monitor import Observers, observing
from nanogpt_hf.training.run import Run
from nanogpt_hf.training.start import start_again
from nanogpt_hf.training.step import step_metrics
from nanogpt_hf.training.tracking import log_summary


def train(run: Run) -> RunFolder:
    """Train the run that `prepare_run` returned to its end, and return its folder.

    Raises UserError before anything is written if its folder or its samples cannot be used,
    Stopped after saving if a signal ended the run early, and DivergedError after saving if the last
    evaluation is not finite.
    """
    config, folder, data = run.config, run.folder, run.data
    max_seconds = parse_duration(config.train.max_time) if config.train.max_time else None
    try:
        with (
            one_line_for_a_lost_process(folder),
            one_line_for_too_little_memory(largest_stage(config), data.vocab_size),
        ):
            evaluations = load_training_evaluations(config, data.tokenizer)
            if run.mesh.is_main:
                recipe = config_to_yaml(config)
                write_whole(folder.recipe, recipe) if run.saved else folder.start(recipe)
            run.accelerator.wait_for_everyone()
            with (
                stop_on_signals(max_seconds) as stop,
                observing(run, evaluations) as observers,
            ):
                while not train_steps(run, observers, stop):
                    before = run.state
                    observers.checkpoints.wait()
                    start_again(run)
                    observers.start_again(run, before)
    finally:
        folder.unlock()
    log_summary(run)
    if run.state.has_diverged:
        raise DivergedError(
            f"{folder.path}: the run has diverged: its last evaluation, at step "
            f"{run.state.evaluated_step:,}, is not finite; lower optim.learning_rate and train "
            "again with --overwrite, or in another --run-dir"
        )
    return folder


def train_steps(run: Run, observers: Observers, stop: StopRequest) -> bool:
    """Train to the last step and save the model; False if the run has to start again before.

    Raises Stopped on a signal, after saving.
    """
    config, state = run.config, run.state
    unfreezing = next_unfreezing(state.step, config.finetune)
    next_stage_at = next_stage(config, state.step)
    while True:
        started = time.perf_counter()
        done = state.step == config.train.max_steps or state.out_of_patience(config.eval)
        # With several processes these are collectives, so they run only at steps that are logged.
        poll = run.mesh.world_size == 1 or done or state.step % config.tracking.every == 0
        if poll:
            observers.checkpoints.poll()
        stopping = poll and stop.on_any_process(run.accelerator)

        new_stage = state.step == next_stage_at  # which evaluates its first step
        if (
            not (stopping or new_stage)
            and state.evaluated_step < state.step
            and (done or state.step % config.eval.every == 0)
        ):
            stopping = not evaluate_and_report(run, observers, stop)
            done = done or state.out_of_patience(config.eval)
        again = new_stage or state.step == unfreezing
        due = state.step > 0 and state.step % config.checkpoint.every == 0
        if (stopping or done or again or due) and state != run.saved:
            observers.monitor.count_steps(state)
            observers.checkpoints.save(run.model, run.optimizer, state)
            run.saved = dataclasses.replace(state)
            observers.tracking.restart_clock()
        if stopping:
            reason = stop.reason or "another process asked for it"
            raise Stopped(
                f"stopped at step {state.step:,}, saved ({reason}); continue with --resume"
            )
        if done:
            observers.checkpoints.wait()  # so that the disk does not need room for both at once
            save_model(run, run.folder.final)
            return True
        if again:
            state.seconds += time.perf_counter() - started
            return False
        spiked = step_and_report(run, observers)
        state.seconds += time.perf_counter() - started
        observers.tracking.step_done()
        if spiked:
            return False


def step_and_report(run: Run, observers: Observers) -> bool:
    """Take a step, and log it if it is due; return whether its loss has spiked."""
    config, state = run.config, run.state
    learning_rate = learning_rate_at(state.step, config.optim, config.train.max_steps)
    data_step = state.step + state.skipped_steps
    with observers.layers.measured_step(run.model, run.optimizer, state.step + 1):
        result = method_of(config).step(run, data_step, learning_rate)
    state.step += 1
    state.tokens += config.train.tokens_per_step
    observers.monitor.add(result.grad_norm)
    if state.step % config.tracking.every:
        return False
    loss = sum_over_ranks(run.accelerator, result.loss).item()
    metrics = observers.monitor.report(state)
    metrics |= observers.layers.step_report(result.grad_norm.item())
    metrics |= step_metrics(run, result)
    observers.tracking.train(loss, learning_rate, metrics)
    return observers.monitor.spiked(state, loss, run.saved)


def evaluate_and_report(run: Run, observers: Observers, stop: StopRequest) -> bool:
    """Evaluate, save the model if it is the best so far, and log; False if a signal interrupted
    the evaluation.
    """
    state, evaluate = run.state, method_of(run.config).evaluate
    evaluated = evaluate(run, lambda: stop.on_any_process(run.accelerator))
    if evaluated is not None:
        state.evaluation, state.evaluated_step = evaluated.evaluation, state.step
        state.score = evaluated.score
        best_before = math.inf if state.best_loss is None else state.best_loss
        # The model that fine-tuning starts from is the best until another is better.
        is_candidate = state.step > 0 or run.config.finetune.model is not None
        is_best = is_candidate and evaluated.score < best_before
        if is_best:
            state.best_loss, state.best_step = evaluated.score, state.step
            observers.checkpoints.wait()  # so that the disk does not need room for both at once
            save_model(run, run.folder.best)
        evaluated = observers.evaluate(run, evaluated)
        observers.tracking.evaluation(evaluated, is_best)
        if state.step < run.config.train.max_steps:  # else it is drawn at the end
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
            save_trained(
                path,
                run.config,
                run.model_config,
                weights,
                run.data,
                run.state,
                machine,
                run.generation_config,
            )
        except (OSError, SafetensorError) as error:
            raise RunFolderError(f"{path}: the model cannot be written: {error}") from None
    run.accelerator.wait_for_everyone()
