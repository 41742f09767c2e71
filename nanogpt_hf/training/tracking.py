"""What a run says: metrics.jsonl, the console, accelerate's trackers, and the picture of the loss."""

import json
import logging
import math
import sys
import time
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed.accelerator import describe_machine
from nanogpt_hf.errors import RunFolderError, UserError
from nanogpt_hf.export.background_push import Pushing
from nanogpt_hf.model.build import count_parameters
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.reports.curves import draw_run
from nanogpt_hf.reports.page import write_report
from nanogpt_hf.reports.sections import duration
from nanogpt_hf.runs.folder import RunFolder, written_whole
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.runs.provenance import add_start, describe_start
from nanogpt_hf.training.checkpoint import TrainState
from nanogpt_hf.training.monitor import TimedBatches
from nanogpt_hf.training.throughput import flops_per_token, peak_flops
from nanogpt_hf.training.trackers import start_trackers

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 10.0  # of the plain log, where there is no live bar
_SECONDS_BETWEEN_PICTURES = 30.0  # one takes about half a second


class Tracking:
    """Reports of one run. Only the main process says and writes anything; all processes may call."""

    def __init__(
        self,
        accelerator: Accelerator,
        config: Config,
        run: RunFolder,
        state: TrainState,
        model_config: GPTConfig,
        batches: TimedBatches,
    ):
        self.accelerator, self.config, self.run, self.batches = accelerator, config, run, batches
        self.main = accelerator.is_main_process
        self.parameters = count_parameters(model_config)
        self.flops_per_token = flops_per_token(model_config, config.data.block_size)
        self.peak = peak_flops(accelerator.device)
        self.events, self.bar = [], None
        self.pushing = Pushing(config.hub, run) if config.hub.push and self.main else None
        self.rewind(state)
        if self.main:
            start = describe_start(accelerator, state.step)
            if accelerator.log_with:
                start_trackers(accelerator, config, run, start)
            add_start(run, start)
        if self.main and logger.isEnabledFor(logging.INFO) and sys.stderr.isatty():
            self.bar = tqdm(total=config.train.max_steps, initial=state.step, unit="step", dynamic_ncols=True)
        self._last_line, self._last_picture = 0.0, -math.inf

    def rewind(self, state: TrainState) -> None:
        """Forget the events after the state, whose steps are done again. Trackers that have got them keep them."""
        if self.main:
            self.events = [event for event in read_metrics(self.run) if event["step"] <= state.step]
            with written_whole(self.run.metrics) as partial:
                partial.write_text("".join(json.dumps(event) + "\n" for event in self.events), encoding="utf-8")
        self.restart_clock(state)

    def restart_clock(self, state: TrainState) -> None:
        """Do not count what happened since the last report (an evaluation, a checkpoint) as training time."""
        self._clock, self._clock_tokens, self._clock_waited = time.perf_counter(), state.tokens, self.batches.waited

    def _write(self, state: TrainState, values: dict[str, float]) -> None:
        # JSON has no NaN: what is not finite is null
        self._keep(state, {name: value if math.isfinite(value) else None for name, value in values.items()})
        self.accelerator.log(values, step=state.step)
        if self.pushing:
            self.pushing.look()

    def _keep(self, state: TrainState, values: dict[str, Any]) -> None:
        event = {"step": state.step, "tokens": state.tokens, "seconds": round(state.seconds, 3), **values}
        self.events.append(event)
        if self.main:
            try:
                with self.run.metrics.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(event) + "\n")
            except OSError as error:  # a line that was cut short goes when the run is resumed
                raise RunFolderError(f"{self.run.metrics}: cannot be written: {error.strerror}") from None

    def samples(self, state: TrainState, samples: list[dict[str, str]]) -> None:
        """Keep what was written after the prompts of `eval.samples`, in metrics.jsonl only."""
        if samples:
            self._keep(state, {"samples": samples})

    def step_done(self, state: TrainState) -> None:
        if self.bar:
            self.bar.update(state.step - self.bar.n)  # below 0 after going back

    def train(self, state: TrainState, loss: float, learning_rate: float, facts: dict[str, float]) -> None:
        """Report the step just done, with other facts of it by their names.

        Call it after the loss was read from the device, so that time is real.
        """
        now = time.perf_counter()
        elapsed = max(now - self._clock, 1e-9)
        rate, waited = (state.tokens - self._clock_tokens) / elapsed, self.batches.waited - self._clock_waited
        self.restart_clock(state)
        values = {
            "train/loss": loss,
            "train/learning_rate": learning_rate,
            "train/tokens_per_second": round(rate, 1),
            "train/data_wait": round(waited / elapsed, 4),
            **facts,
        }
        if self.peak:
            values["train/mfu"] = round(rate * self.flops_per_token / self.peak / self.accelerator.num_processes, 4)
        self._write(state, values)
        said = f"{rate:,.0f} tokens/s" + (f", MFU {values['train/mfu']:.1%}" if self.peak else "")
        if self.bar:
            self._show(state, f"loss {loss:.4f}, {said}")
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = (self.config.train.max_steps * self.config.train.tokens_per_step - state.tokens) / rate
            self._say(f"{self._at(state)}: train loss {loss:.4f}, {said}, {duration(left)} left")

    def _show(self, state: TrainState, facts: str) -> None:
        """Write them beside the bar."""
        best = "" if state.best_loss is None else f", best validation loss {state.best_loss:.4f}"
        self.bar.set_postfix_str(f"{facts}{best}")

    def _at(self, state: TrainState) -> str:
        return f"step {state.step:,}/{self.config.train.max_steps:,}"

    def _say(self, line: str) -> None:
        if self.main:
            logger.info(line)

    def evaluation(self, state: TrainState, is_best: bool, facts: dict[str, float]) -> None:
        """Report the state's evaluation, with what else was measured (tasks, layers); now and then draw the curves."""
        result = state.evaluation
        self._write(
            state,
            {
                "val/loss": result.loss,
                "val/perplexity": result.perplexity,
                "val/bits_per_byte": result.bits_per_byte,
                **facts,
            },
        )
        self._say(
            f"{self._at(state)}: validation loss {result.loss:.4f} (perplexity {result.perplexity:.2f}, "
            f"{result.bits_per_byte:.3f} bits a byte){' -> best/' if is_best else ''}"
        )
        if self.bar:
            self._show(state, f"validation loss {result.loss:.4f}")
        tasks = {name.removeprefix("task/"): value for name, value in facts.items() if name.startswith("task/")}
        if shown := [f"{name} {value:.4g}" for name, value in tasks.items() if not name.endswith("_stderr")]:
            self._say(f"  {', '.join(shown)}")
        if time.perf_counter() - self._last_picture >= _SECONDS_BETWEEN_PICTURES:
            self.draw()
        if self.pushing and is_best:
            self.pushing.new_model(self.run.best)

    def draw(self) -> None:
        """Draw the curves. A picture that cannot be drawn must not end a run, nor hide why it ended."""
        if self.main:
            self._last_picture = time.perf_counter()
            try:
                draw_run(self.run, self.config, self.events)
            except Exception as error:
                logger.warning(
                    error if isinstance(error, UserError) else f"{self.run.picture}: cannot be drawn: {error}"
                )

    def report(self) -> None:
        """Write report.html. As with the picture, nothing here may end a run."""
        if self.main:
            try:
                write_report(self.run, self.run.report, self.events)
            except Exception as error:
                said = error if isinstance(error, UserError) else f"{self.run.report}: cannot be written: {error}"
                logger.warning(said)

    def __enter__(self) -> "Tracking":
        train = self.config.train
        self._say(
            f"{self.config.name}: {self.parameters:,} parameters; {train.max_steps:,} steps of "
            f"{train.tokens_per_step:,} tokens = {train.micro_batch_size} sequences × {self.config.data.block_size} × "
            f"{self.accelerator.num_processes} processes × {self.accelerator.gradient_accumulation_steps} accumulated; "
            f"{describe_machine(self.accelerator)}"
        )
        return self

    def __exit__(self, *error: object) -> None:
        """Close the bar and the trackers, and leave picture and report as complete as the metrics."""
        self.draw()
        self.report()
        if self.bar:
            self.bar.close()
        if self.pushing:
            self.pushing.finish(done=error[0] is None)
        if self.accelerator.log_with:
            self.accelerator.end_training()
