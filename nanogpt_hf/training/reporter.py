"""All that a run writes while it trains. The loop calls it between its steps.

A reporter writes checkpoints, log lines, metrics, trackers, plots and model folders, and pushes
models to the Hub. All processes call it; each part decides which of them writes.
"""

import contextlib
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors import SafetensorError

from nanogpt_hf.checkpoint.writer import CheckpointWriter
from nanogpt_hf.config.checks import parse_duration
from nanogpt_hf.config.stages import largest_stage
from nanogpt_hf.distributed.accelerator import describe_machine, sum_over_ranks
from nanogpt_hf.distributed.full_state import full_weights
from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process
from nanogpt_hf.distributed.signals import StopRequest, stop_on_signals
from nanogpt_hf.evaluation.base import Measure, Subject
from nanogpt_hf.evaluation.table import load_training_evaluations
from nanogpt_hf.export.hub import BackgroundPush
from nanogpt_hf.export.model_folder import save_trained
from nanogpt_hf.methods.run import Evaluated, Run, StepResult, is_done
from nanogpt_hf.program import program
from nanogpt_hf.reports.page import LiveReports
from nanogpt_hf.runs.files import write_whole
from nanogpt_hf.runs.recipe import recipe_text
from nanogpt_hf.training.micro_batch import one_line_for_too_little_memory
from nanogpt_hf.training.monitor import LayerStats, Monitor
from nanogpt_hf.training.step import step_metrics
from nanogpt_hf.training.tracking import Tracking, log_summary, start_tracking


@dataclass
class RunReporter:
    """Outputs of one run, and the request to stop that the system may send."""

    run: Run
    stop: StopRequest
    tracking: Tracking
    monitor: Monitor
    layers: LayerStats
    evaluations: list[Measure]
    plots: LiveReports
    checkpoints: CheckpointWriter
    push: BackgroundPush
    # The seconds of the run are counted up to this time.
    counted: float = field(default_factory=time.perf_counter)

    def should_stop(self) -> bool:
        """Whether the run should stop at this step, the same on all processes.

        With several processes this is a collective, so it runs only at steps that are logged, and
        at the last one.
        """
        run = self.run
        is_logged = run.state.step % run.config.tracking.every == 0
        if not (is_logged or run.mesh.world_size == 1 or is_done(run.config, run.state)):
            return False
        # Raises the error of a checkpoint that could not be written meanwhile.
        self.checkpoints.poll()
        return self.stop_requested()

    def stop_requested(self) -> bool:
        """Whether a signal has arrived on any process, or the time is up; a collective."""
        return self.stop.on_any_process(self.run.accelerator)

    def how_to_continue(self) -> str:
        """The line of a run that was stopped and saved: why, and the command that continues it."""
        run = self.run
        reason = self.stop.reason or "another process asked for it"
        # `resume` takes the run's own recipe, so that no knob of the first command is forgotten.
        command = f"{program()} resume {shlex.quote(str(run.folder.path))}"
        return (
            f"stopped at step {run.state.step:,}, saved ({reason}); continue with --resume, or "
            f"with {command}"
        )

    @contextlib.contextmanager
    def measured_step(self) -> Iterator[None]:
        """Context for the next step, which measures norms of layers if they are logged."""
        run = self.run
        with self.layers.measured_step(run.model, run.optimizer, run.state.step + 1):
            yield

    def log_step(self, result: StepResult, learning_rate: float) -> bool:
        """Log the step if it is due; return whether its loss has spiked.

        Reading a loss makes the host wait for the device, so only steps that are logged are read.
        """
        run = self.run
        self.monitor.add(result.grad_norm)
        if run.state.step % run.config.tracking.every:
            return False
        loss = sum_over_ranks(run.accelerator, result.loss).item()
        # From here on the host waits: the norms and the loss of the step are read.
        metrics = self.monitor.report(run.state)
        metrics |= self.layers.step_report(result.last_grad_norm.item())
        metrics |= step_metrics(run, result)
        self.tracking.train(loss, learning_rate, metrics)
        return self.monitor.spiked(run.state, loss, run.saved)

    def evaluation(self, evaluated: Evaluated, *, is_best: bool) -> None:
        """Run the recipe's other evaluations, and log all; save the model to best/ if it is."""
        run = self.run
        # Before the other evaluations, which may take long: a kill meanwhile keeps the best model.
        if is_best:
            self.save_model(run.folder.best)
        evaluated = with_other_evaluations(run, evaluated, self.evaluations)
        self.tracking.evaluation(evaluated, is_best)
        self._alert_of_the_evaluation()
        # At the end of the run `reporting` draws it.
        if run.state.step < run.config.train.max_steps:
            self.plots.plot(self.tracking.events)
        if is_best:
            self.push.new_model(run.folder.best)

    def _alert_of_the_evaluation(self) -> None:
        """Send an alert if the evaluation ends the run before its last step, or is not finite."""
        run = self.run
        state = run.state
        if state.has_diverged:
            text = f"the evaluation at step {state.evaluated_step:,} is not finite"
            self.tracking.alert("Training has diverged", text)
        elif state.out_of_patience(run.config.eval) and state.step < run.config.train.max_steps:
            patience = run.config.eval.patience
            text = f"stopped at step {state.step:,}: no better in {patience} evaluations"
            self.tracking.alert("Stopped early", f"{text} (eval.patience)")

    def checkpoint(self) -> None:
        """Save a checkpoint; a thread writes it while training continues."""
        run = self.run
        # The state that is saved counts skipped and clipped steps up to here.
        self.monitor.count_steps(run.state)
        self.checkpoints.save(run.model, run.optimizer, run.state)
        run.saved = replace(run.state)
        self.restart_clock()

    def save_model(self, path: Path) -> None:
        """Save the model as a model folder at `path`, replacing the one before."""
        run = self.run
        # So that the disk does not need room for a checkpoint and a model in the making.
        self.checkpoints.wait()
        # A collective: shards are gathered on the main process, which alone writes.
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
                raise run.folder.write_error(path, error) from None
        run.accelerator.wait_for_everyone()

    @contextlib.contextmanager
    def starting_again(self) -> Iterator[None]:
        """Context in which the run is built again from its newest checkpoint.

        The time that it takes is not counted, as the time of a resumed run's start is not.
        """
        self.count_seconds()
        before = self.run.state
        self.checkpoints.wait()
        yield
        self.counted = time.perf_counter()
        run = self.run
        if run.state.skipped_steps > before.skipped_steps:
            self.monitor.rolled_back(before, run.state)
        # A stage may have another limit.
        self.monitor.max_grad_norm = run.config.optim.max_grad_norm
        self.layers.max_grad_norm = run.config.optim.max_grad_norm
        self.tracking.begin()

    def restart_clock(self) -> None:
        """Leave the time since the last report out of the training speed."""
        self.tracking.restart_clock()

    def log_summary(self) -> None:
        """Log the last lines of a run, when all is written."""
        log_summary(self.run)

    def count_seconds(self) -> None:
        """Add the time since the last call to the seconds of the run."""
        now = time.perf_counter()
        self.run.state.seconds += now - self.counted
        self.counted = now

    def step_done(self) -> None:
        """Count the seconds of a step, and move the progress bar."""
        self.count_seconds()
        self.tracking.step_done()


def with_other_evaluations(run: Run, evaluated: Evaluated, others: list[Measure]) -> Evaluated:
    """Add the figures of the recipe's other evaluations to the method's own."""
    subject = Subject(
        name=run.config.name,
        model=run.model,
        tokenizer=run.data.tokenizer,
        accelerator=run.accelerator,
        batch_size=run.config.train.min_micro_batch_size,
        step=run.state.step,
    )
    metrics = dict(evaluated.metrics)
    lines = list(evaluated.lines)
    samples = list(evaluated.samples)
    for measure in others:
        for result in measure(subject):
            metrics |= result.figures
            lines += result.lines
            samples += result.samples
    return evaluated._replace(metrics=metrics, lines=lines, samples=samples)


@contextlib.contextmanager
def reporting(run: Run) -> Iterator[RunReporter]:
    """Context for the training of a run that `prepare_run` has built: begin its folder, turn
    signals into a request to stop, and report.

    At its end, also if the run fails, the last checkpoint is complete, the plot is drawn, the
    report written, trackers and push have ended, and the folder is unlocked. Raises UserError
    before anything is written if the samples of the recipe cannot be used.
    """
    config = run.config
    try:
        with (
            one_line_for_a_lost_process(run.folder),
            one_line_for_too_little_memory(largest_stage(config), run.data.vocab_size, run.mesh),
        ):
            # Tasks and prompts that cannot be used end the run here, before it writes a file.
            evaluations = load_training_evaluations(config, run.data.tokenizer)
            if run.mesh.is_main:
                recipe = recipe_text(config)
                if run.saved:
                    # A resumed run may have changed knobs; its folder keeps all else.
                    write_whole(run.folder.recipe, recipe)
                else:
                    run.folder.start(recipe)
            # No process writes into the folder before it is there.
            run.accelerator.wait_for_everyone()
            max_seconds = parse_duration(config.train.max_time) if config.train.max_time else None
            with (
                stop_on_signals(max_seconds) as stop,
                _outputs(run, stop, evaluations) as reporter,
            ):
                yield reporter
    finally:
        run.folder.unlock()


@contextlib.contextmanager
def _outputs(run: Run, stop: StopRequest, evaluations: list[Measure]) -> Iterator[RunReporter]:
    is_main = run.mesh.is_main
    checkpoints = CheckpointWriter(run.accelerator, run.folder, run.config.checkpoint.keep)
    tracking = start_tracking(run)
    reporter = RunReporter(
        run=run,
        stop=stop,
        tracking=tracking,
        monitor=Monitor(run.accelerator, run.config, checkpoints, tracking.alert),
        layers=LayerStats(run.accelerator, run.config),
        evaluations=evaluations,
        plots=LiveReports(run.folder, run.config.recipe, is_main=is_main),
        checkpoints=checkpoints,
        push=BackgroundPush(run.config.hub, run.folder, is_main=is_main),
    )
    # From the inside out: the last checkpoint is complete before the plot is drawn and the report
    # written, trackers end after that, and the push of the final model waits for all of them.
    done = False
    try:
        with contextlib.closing(reporter.tracking):
            try:
                with checkpoints:
                    yield reporter
            finally:
                reporter.plots.finish(reporter.tracking.events)
        # The weights of a diverged run are of no use, and are not pushed.
        done = not run.state.has_diverged
    finally:
        reporter.push.finish(done=done)
