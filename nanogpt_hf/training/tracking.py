"""Logging of a run: metrics.jsonl, console lines, and what trackers get."""

import json
import logging
import math
import os
import shlex
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.config.stages import planned_tokens, stage_lines
from nanogpt_hf.distributed.accelerator import (
    describe_device,
    describe_machine,
    is_deterministic,
    precision_of,
)
from nanogpt_hf.formatting import format_duration, format_number, shows_bars
from nanogpt_hf.methods.run import Evaluated, Run
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.methods.terms import loss_parts
from nanogpt_hf.model.architecture import count_parameters
from nanogpt_hf.planning.hardware import peak_flops
from nanogpt_hf.program import program
from nanogpt_hf.runs.files import write_whole
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.runs.provenance import add_start, describe_start
from nanogpt_hf.training.trackers import send_alert, start_trackers

logger = logging.getLogger(__name__)

# In the plain log; a terminal has a progress bar instead.
_SECONDS_BETWEEN_LINES = 10.0
# The time that is left follows from the last reports together: the speed of one varies.
_REPORTS_OF_TIME_LEFT = 10


class Tracking:
    """Writes metrics.jsonl, console lines and trackers.

    Only the main process writes; all processes may call.
    """

    def __init__(self, run: Run):
        self.run = run
        self.accelerator = run.accelerator
        self.folder = run.folder
        self.main = run.mesh.is_main
        self.peak = peak_flops(run.accelerator.device)
        self.events: list[dict[str, Any]] = []
        self._last_line = 0.0
        # Seconds and tokens of each of the last reports.
        self._recent: deque[tuple[float, int]] = deque(maxlen=_REPORTS_OF_TIME_LEFT)

    def open_bar(self) -> None:
        """Show the progress bar, on a terminal only."""
        self.bar = tqdm(
            total=self.config.train.max_steps,
            initial=self.run.state.step,
            unit="step",
            dynamic_ncols=True,
            disable=not (self.main and shows_bars()),
        )

    @property
    def config(self) -> Config:
        """Recipe of the run's stage."""
        return self.run.config

    def begin(self) -> None:
        """Drop the events after the run's state, since their steps run again.

        Trackers keep those they received.
        """
        # A stage may have another block size, and attention costs more in longer blocks.
        self.flops_per_token = self.run.architecture.flops_per_token(
            self.run.model_config, self.config.data.block_size
        )
        if self.main:
            state = self.run.state
            # The training event of the state's own step is kept; its evaluation only if the state
            # contains it.
            trained = state.step + 1
            evaluated = trained if state.evaluated_step == state.step else state.step
            self.events = [
                event
                for event in read_metrics(self.folder)
                if event["step"] < (trained if "train/loss" in event else evaluated)
            ]
            lines = (json.dumps(event) + "\n" for event in self.events)
            write_whole(self.folder.metrics, "".join(lines))
        self.restart_clock()

    def alert(self, title: str, text: str) -> None:
        """Send an alert by the trackers that have them."""
        if self.main:
            send_alert(self.accelerator, title, text)

    def restart_clock(self) -> None:
        """Leave the time since the last report (an evaluation, a checkpoint) out of the training
        speed.
        """
        self._clock = time.perf_counter()
        self._clock_tokens = self.run.state.tokens
        self._clock_waited = self.run.batches.seconds_waited

    def _write(self, values: dict[str, float]) -> None:
        # JSON has no NaN: values that are not finite become null.
        self._append({name: v if math.isfinite(v) else None for name, v in values.items()})
        with self._one_line_for_trackers():
            self.accelerator.log(values, step=self.run.state.step)

    @contextmanager
    def _one_line_for_trackers(self) -> Iterator[None]:
        """Context in which trackers write, such as TensorBoard's, which write into the folder."""
        try:
            yield
        except OSError as error:
            # An error of the network has no number, or is one of these.
            network = (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)
            if error.errno is None or isinstance(error, network):
                raise
            # A tracker may write files of its own elsewhere.
            name = error.filename
            if isinstance(name, str | bytes):
                file = Path(os.path.abspath(os.fsdecode(name)))
                if not file.is_relative_to(os.path.abspath(self.folder.path)):
                    raise
            raise self.folder.write_error(self.folder.trackers, error) from None

    def _append(self, values: dict[str, Any]) -> None:
        state = self.run.state
        event = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 3)}
        self.events.append(event | values)
        if self.main:
            try:
                with self.folder.metrics.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(event | values) + "\n")
            except OSError as error:
                # If a part of the line was written, the resume removes it.
                raise self.folder.write_error(self.folder.metrics, error) from None

    def step_done(self) -> None:
        # After a rollback the difference is negative.
        self.bar.update(self.run.state.step - self.bar.n)

    def train(self, loss: float, learning_rate: float, metrics: dict[str, float]) -> None:
        """Log the last step, with further metrics by name.

        Call it after the loss was read from the device, so that the speed counts finished steps
        only.
        """
        now = time.perf_counter()
        tokens = self.run.state.tokens
        elapsed = max(now - self._clock, 1e-9)
        rate = (tokens - self._clock_tokens) / elapsed
        self._recent.append((elapsed, tokens - self._clock_tokens))
        waited = self.run.batches.seconds_waited - self._clock_waited
        self.restart_clock()
        values = {
            "train/loss": loss,
            "train/learning_rate": learning_rate,
            "train/tokens_per_second": round(rate, 1),
            "train/data_wait": round(waited / elapsed, 4),
            **self._epochs(),
            **metrics,
        }
        # MFU: the floating-point operations of the model, as a share of what the GPUs can do.
        if self.peak:
            values["train/mfu"] = round(
                rate * self.flops_per_token / self.peak / self.run.mesh.world_size, 4
            )
        self._write(values)
        headline = self._headline(loss, metrics)
        speed = f"{rate:,.0f} tokens/s" + (f", MFU {values['train/mfu']:.1%}" if self.peak else "")
        self._show(f"{headline}, {speed}")
        if self.bar.disable and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._log(f"train {headline}, {speed}, {self._time_left()} left")

    def _time_left(self) -> str:
        """Estimate the time to the end by the last reports, without evaluations and checkpoints."""
        seconds = sum(report[0] for report in self._recent)
        tokens = sum(report[1] for report in self._recent)
        left = planned_tokens(self.config) - self.run.state.tokens
        return format_duration(left * seconds / tokens)

    def _headline(self, loss: float, metrics: dict[str, float]) -> str:
        """The figures of training that come first in a line: the loss and its parts."""
        # Reinforcement learning has no loss with a meaning: its reward is the headline.
        if "train/reward" in metrics:
            return f"reward {metrics['train/reward']:.4f}"
        # With a teacher or another term, the loss does not compare with the validation loss, but
        # its cross-entropy does.
        parts = [
            f"{name.replace('_', '-')} {format_number(metrics[f'train/{name}'], 4)}"
            for name in loss_parts(self.config)
            if f"train/{name}" in metrics
        ]
        return f"loss {format_number(loss, 4)}" + (f" ({', '.join(parts)})" if parts else "")

    def _epochs(self) -> dict[str, float]:
        """Count how often each source of a mixture has been read."""
        state = self.run.state
        batches = self.run.batches
        if not is_mixture(self.config.data):
            return {}
        # After loss spikes the data is ahead of the steps.
        epochs = batches.epochs(state.step + state.skipped_steps)
        names = [source.name for source in sources_of(self.config.data)]
        return {f"train/epochs/{name}": value for name, value in zip(names, epochs, strict=True)}

    def _show(self, metrics: str) -> None:
        """Show metrics next to the progress bar, if there is one."""
        score = self.run.state.best_loss
        best = "" if score is None else f", {method_of(self.config).describe_best(score)}"
        self.bar.set_postfix_str(f"{metrics}{best}")

    def _log(self, *lines: str) -> None:
        step = f"step {self.run.state.step:,}/{self.config.train.max_steps:,}"
        logger.info("\n".join((f"{step}: {lines[0]}", *lines[1:])))

    def evaluation(self, evaluated: Evaluated, is_best: bool) -> None:
        """Log an evaluation with its samples."""
        if evaluated.samples:
            self._append({"samples": evaluated.samples})
        self._write(evaluated.metrics)
        # The line of the method's own evaluation comes first; the bar shows it without its details.
        first, *others = evaluated.lines
        self._log(f"{first}{' -> best/' if is_best else ''}", *others)
        self._show(first.partition(" (")[0])

    def close(self) -> None:
        """Close the bar and the trackers."""
        self.bar.close()
        if self.accelerator.log_with:
            with self._one_line_for_trackers():
                self.accelerator.end_training()


def start_tracking(run: Run) -> Tracking:
    """Begin to log a run that has started or resumed."""
    tracking = Tracking(run)
    tracking.begin()
    if tracking.main:
        _record_start(run)
    tracking.open_bar()
    _log_plan(run)
    return tracking


def _record_start(run: Run) -> None:
    """Write the machine and versions of this start into the run folder and the trackers."""
    device = run.accelerator.device
    start = {
        "step": run.state.step,
        "processes": run.mesh.world_size,
        "precision": precision_of(run.accelerator),
        "dynamo": run.mesh.compiler,
        "device": describe_device(device),
        "deterministic": is_deterministic(run.config, device),
        **describe_start(device),
    }
    if run.steps_from:
        start |= {"steps_from": run.steps_from, "max_steps": run.config.train.max_steps}
    if run.accelerator.log_with:
        start_trackers(run, start)
    add_start(run.folder, start | {"data": (run.state.identity or {}).get("data")})


def _log_plan(run: Run) -> None:
    """Log the size of the model and of a step, and the stages."""
    config = run.config
    logger.info(
        f"{config.name}: {count_parameters(run.model_config):,} parameters; "
        f"{config.train.max_steps:,} steps of {config.train.tokens_per_step:,} tokens = "
        f"{config.train.micro_batch_size} sequences × {config.data.block_size} × "
        f"{run.mesh.data_parallel} × {run.accelerator.gradient_accumulation_steps} "
        f"accumulated; {describe_machine(run.accelerator)}"
    )
    for line in stage_lines(config):
        logger.info(line)


def log_summary(run: Run) -> None:
    """Log the last lines of a finished run: steps and time, best loss, files, the next command."""
    config = run.config
    folder = run.folder
    state = run.state
    best = "no evaluation was the best"
    if state.best_loss is not None:
        best = f"{method_of(config).describe_best(state.best_loss)} at step {state.best_step:,}"
        if not state.best_step:
            best += f": no evaluation was better than that of the start, {config.finetune.model}"
    duration = format_duration(state.seconds)
    ending = "diverged" if state.has_diverged else "done"
    lines = [f"\n{ending}: {state.step:,} steps, {state.tokens:,} tokens in {duration}"]
    if state.has_diverged:
        lines.append(
            f"  the last evaluation, at step {state.evaluated_step:,}, is not finite; lower "
            "optim.learning_rate"
        )
    lines.append(f"  {best}")
    if state.step < config.train.max_steps:
        lines.append(
            f"  stopped early: no better in {config.eval.patience} evaluations (eval.patience)"
        )
    opens_as = f"as plain {run.architecture.title}"
    if not run.architecture.is_standard(run.model_config):
        opens_as = "with transformers after `import nanogpt_hf.model`"
    if config.lora.rank is not None and not config.lora.merge:
        opens_as = "with peft's AutoPeftModelForCausalLM"
    models = {"best" if state.best_step else "start": folder.best, "last": folder.final}
    named = [f"{path} (the {which})" for which, path in models.items() if path.is_dir()]
    lines.append(f"  model    {', '.join(named)}; each opens {opens_as}")
    files = {"curve": folder.loss_plot, "report": folder.report, "metrics": folder.metrics}
    # A short run has no curve.
    lines += [f"  {name:<8} {file}" for name, file in files.items() if file.is_file()]
    if not state.has_diverged:
        answers = run.data.end_of_turn_id is not None
        command = "chat {}" if answers else "sample {} --prompt 'The '"
        lines.append(f"next: {program()} {command.format(shlex.quote(str(folder.path)))}")
    logger.info("\n".join(lines))
