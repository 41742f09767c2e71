"""Training loop: evaluate, save, step, until the last step is done.

A run is a pure function of its recipe, its seed and the step: the tokens of a step, its learning
rate and its dropout masks never depend on earlier steps or restarts. So a run can stop at any step
and resume on another machine. `next_action` decides what comes next from the progress alone, and
the loop does it. A step is in step.py; examples/plain_loop.py computes the same in one short file.
"""

import math
from enum import Enum, auto

from nanogpt_hf.config.finetune import next_unfreezing
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.stages import next_stage
from nanogpt_hf.errors import DivergedError, Stopped
from nanogpt_hf.methods.run import Evaluated, Run, is_done
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training.build import start_again
from nanogpt_hf.training.reporter import RunReporter, reporting
from nanogpt_hf.training.step import next_step


class Action(Enum):
    """An action of the loop; `next_action` chooses the next one."""

    EVALUATE = auto()
    # Save a checkpoint.
    SAVE = auto()
    STEP = auto()
    # Start again from the newest checkpoint, with another model, optimizer or data.
    START_AGAIN = auto()
    # Stop early, to be resumed.
    STOP = auto()
    FINISH = auto()


def next_action(
    config: Config,
    state: TrainState,
    saved: TrainState | None,
    *,
    built_at: int,
    stopping: bool = False,
    spiked: bool = False,
) -> Action:
    """Decide what a run does next; a pure function, which needs no model.

    `saved` is the state in the newest checkpoint, `built_at` the step at which model, optimizer
    and batches were built. `stopping`: the run was asked to stop; `spiked`: the loss of the last
    step has spiked, so the run goes back to its checkpoint.
    """
    if spiked:
        # Nothing is saved: the weights are already spoiled by the step that has spiked.
        return Action.START_AGAIN
    step = state.step
    done = is_done(config, state)
    # A stage or an unfreezing needs another optimizer or model, so the run starts again there.
    new_stage = step == next_stage(config, built_at)
    starts_again = new_stage or step == next_unfreezing(built_at, config.finetune)

    is_evaluated = state.evaluated_step >= step
    evaluates = not is_evaluated and (done or step % config.eval.every == 0)
    # The recipe of the new stage holds for the evaluation of its first step.
    if evaluates and not (stopping or new_stage):
        return Action.EVALUATE
    # A checkpoint follows the evaluation of its step, so that a resumed run need not repeat it.
    # A run that has just resumed is equal to what is saved.
    due = step > 0 and step % config.checkpoint.every == 0
    if (stopping or done or starts_again or due) and state != saved:
        return Action.SAVE
    if stopping:
        return Action.STOP
    if done:
        return Action.FINISH
    return Action.START_AGAIN if starts_again else Action.STEP


def train(run: Run) -> RunFolder:
    """Train the run that `prepare_run` returned to its end, and return its folder.

    Raises UserError before anything is written if its folder or its samples cannot be used,
    Stopped after saving if a signal ended the run early, and DivergedError after saving if the last
    evaluation is not finite.
    """
    with reporting(run) as reporter:
        train_steps(run, reporter)
    reporter.log_summary()
    if run.state.has_diverged:
        raise DivergedError(
            f"{run.folder.path}: the run has diverged: its last evaluation, at step "
            f"{run.state.evaluated_step:,}, is not finite; lower optim.learning_rate and train "
            "again with --overwrite, or in another --run-dir"
        )
    return run.folder


def train_steps(run: Run, reporter: RunReporter) -> None:
    """Train to the last step and save the model. Raises Stopped on a signal, after saving."""
    spiked = False
    built_at = run.state.step
    # Asked once per step, since several processes have to agree on it.
    stopping = reporter.should_stop()
    while True:
        action = next_action(
            run.config, run.state, run.saved, built_at=built_at, stopping=stopping, spiked=spiked
        )
        match action:
            case Action.EVALUATE:
                stopping = not evaluate(run, reporter)
            case Action.SAVE:
                reporter.checkpoint()
            case Action.STEP:
                spiked = step(run, reporter)
                stopping = not spiked and reporter.should_stop()
            case Action.START_AGAIN:
                with reporter.starting_again():
                    start_again(run)
                spiked = False
                built_at = run.state.step
                stopping = reporter.should_stop()
            case Action.STOP:
                raise Stopped(reporter.how_to_continue())
            case Action.FINISH:
                reporter.save_model(run.folder.final)
                return


def step(run: Run, reporter: RunReporter) -> bool:
    """Take the next step and report it; return whether its loss has spiked."""
    with reporter.measured_step():
        result, learning_rate = next_step(run)
    spiked = reporter.log_step(result, learning_rate)
    reporter.step_done()
    return spiked


def evaluate(run: Run, reporter: RunReporter) -> bool:
    """Evaluate, record the score, and save the model if it is the best so far; False if a signal
    interrupted the evaluation.
    """
    evaluated = method_of(run.config).evaluate(run, reporter.stop_requested)
    if evaluated is not None:
        is_best = record_evaluation(run, evaluated)
        reporter.evaluation(evaluated, is_best=is_best)
    # An evaluation is no part of the training speed.
    reporter.restart_clock()
    return evaluated is not None


def record_evaluation(run: Run, evaluated: Evaluated) -> bool:
    """Record an evaluation in the state of the run; return whether its model is the best so far."""
    state = run.state
    # The state goes into the checkpoint, so a resumed run knows its best model and patience.
    state.evaluation = evaluated.evaluation
    state.evaluated_step = state.step
    state.score = evaluated.score
    best_before = math.inf if state.best_loss is None else state.best_loss
    # The model that fine-tuning starts from is the best until another is better.
    is_candidate = state.step > 0 or run.config.finetune.model is not None
    is_best = is_candidate and evaluated.score < best_before
    if is_best:
        state.best_loss = evaluated.score
        state.best_step = state.step
    return is_best
