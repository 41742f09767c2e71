"""What a run says: metrics.jsonl, the console, accelerate's trackers, and the picture of the loss."""

import json
import math
import os
import sys
import time
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from nanogpt_hf.config.load import config_to_dict
from nanogpt_hf.config.schema import Config
from nanogpt_hf.model.build import count_parameters
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.reports.curves import draw_run
from nanogpt_hf.reports.metrics import read_metrics
from nanogpt_hf.reports.page import write_report
from nanogpt_hf.training.checkpoint import TrainState
from nanogpt_hf.training.pushing import Pushing
from nanogpt_hf.training.run_folder import RunFolder
from nanogpt_hf.training.runtime import describe_machine
from nanogpt_hf.training.throughput import flops_per_token, peak_flops

_SECONDS_BETWEEN_LINES = 10.0  # of the plain log, where there is no live bar


class Tracking:
    """Reports of one run. Only the main process prints and writes; all processes may call."""

    def __init__(
        self, accelerator: Accelerator, config: Config, run: RunFolder, state: TrainState, model_config: GPTConfig
    ):
        self.accelerator, self.config, self.run = accelerator, config, run
        self.main = accelerator.is_main_process
        self.parameters = count_parameters(model_config)
        self.flops_per_token = flops_per_token(model_config, config.data.block_size)
        self.peak = peak_flops(accelerator.device)
        self.events, self.bar = [], None
        self.pushing = Pushing(config.hub, run, self.say) if config.hub.push and self.main else None
        self.rewind(state)
        if accelerator.log_with:
            self._start_trackers()
        if self.main and sys.stderr.isatty():
            self.bar = tqdm(total=config.train.max_steps, initial=state.step, unit="step", dynamic_ncols=True)
        self._last_line = 0.0

    def _start_trackers(self) -> None:
        wandb_options = {"name": self.config.name, "dir": str(self.run.path)}
        if "wandb" in self.config.tracking.trackers and "WANDB_MODE" not in os.environ:
            import wandb

            if not wandb.login(prompt=False):
                wandb_options["mode"] = "offline"
                self.say("wandb: no login found, so the run is kept offline; `wandb sync` sends it later")
        flat = {f"{s}.{k}": v for s, knobs in config_to_dict(self.config).items() for k, v in knobs.items()}
        plain = {k: ", ".join(v) if isinstance(v, list) else v for k, v in flat.items() if v is not None}
        project = self.config.tracking.project
        self.accelerator.init_trackers(project, config=plain, init_kwargs={"wandb": wandb_options})

    def say(self, line: str) -> None:
        """Print a line on the main process, above the bar where there is one."""
        if not self.main:
            return
        if self.bar:
            self.bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def rewind(self, state: TrainState) -> None:
        """Forget the events after the state, whose steps are done again. Trackers that have got them keep them."""
        if self.main:
            self.events = [event for event in read_metrics(self.run) if event["step"] <= state.step]
            partial = self.run.metrics.with_name(f".{self.run.metrics.name}")
            partial.write_text("".join(json.dumps(event) + "\n" for event in self.events), encoding="utf-8")
            partial.replace(self.run.metrics)
        self.restart_clock(state)

    def restart_clock(self, state: TrainState) -> None:
        """Do not count what happened since the last report (an evaluation, a checkpoint) as training time."""
        self._clock, self._clock_tokens = time.perf_counter(), state.tokens

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
            with self.run.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def samples(self, state: TrainState, samples: list[dict[str, str]]) -> None:
        """Keep what was written after the prompts of `eval.samples`, in metrics.jsonl only."""
        if samples:
            self._keep(state, {"samples": samples})

    def step_done(self, state: TrainState) -> None:
        if self.bar:
            self.bar.update(state.step - self.bar.n)  # below 0 after going back

    def train(self, state: TrainState, loss: float, learning_rate: float, grad_norm: float, skipped: int) -> None:
        """Report the step just done, and how many steps since the last report were skipped.

        Call it after the loss was read from the device, so that time is real.
        """
        now = time.perf_counter()
        rate = (state.tokens - self._clock_tokens) / max(now - self._clock, 1e-9)
        self.restart_clock(state)
        values = {
            "train/loss": loss,
            "train/learning_rate": learning_rate,
            "train/grad_norm": grad_norm,
            "train/tokens_per_second": round(rate, 1),
        }
        if skipped:
            values["train/skipped_steps"] = skipped
            self.say(f"step {state.step:,}: {skipped} steps had no finite gradient and were skipped")
        if self.peak:
            values["train/mfu"] = round(rate * self.flops_per_token / self.peak / self.accelerator.num_processes, 4)
        self._write(state, values)
        mfu = f", MFU {values['train/mfu']:.1%}" if self.peak else ""
        if self.bar:
            self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} tok/s{mfu}")
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = (self.config.train.max_steps * self.config.train.tokens_per_step - state.tokens) / rate
            self.say(
                f"step {state.step:,}/{self.config.train.max_steps:,}: train loss {loss:.4f}, "
                f"{rate:,.0f} tokens/s{mfu}, {duration(left)} left"
            )

    def evaluation(self, state: TrainState, is_best: bool, tasks: dict[str, float]) -> None:
        """Report the state's evaluation and what `eval.tasks` gave, and draw the curves anew."""
        result = state.evaluation
        self._write(
            state,
            {
                "val/loss": result.loss,
                "val/perplexity": result.perplexity,
                "val/bits_per_byte": result.bits_per_byte,
                **tasks,
            },
        )
        self.say(
            f"step {state.step:,}/{self.config.train.max_steps:,}: validation loss {result.loss:.4f} "
            f"(perplexity {result.perplexity:.2f}, {result.bits_per_byte:.3f} bits a byte)"
            + (" -> best/" if is_best else "")
        )
        if shown := {name: value for name, value in tasks.items() if not name.endswith("_stderr")}:
            self.say("  " + ", ".join(f"{name.removeprefix('task/')} {value:.4g}" for name, value in shown.items()))
        self.draw()
        if self.pushing and is_best:
            self.pushing.new_model(self.run.best)

    def draw(self) -> None:
        """Draw the curves. A picture that cannot be drawn must not end a run, nor hide why it ended."""
        if self.main:
            try:
                draw_run(self.run, self.config, self.events)
            except Exception as error:
                self.say(f"{self.run.picture}: cannot be drawn: {error}")

    def report(self) -> None:
        """Write report.html. As with the picture, nothing here may end a run."""
        if self.main:
            try:
                write_report(self.run, self.run.report, self.events)
            except Exception as error:
                self.say(f"{self.run.report}: cannot be written: {error}")

    def __enter__(self) -> "Tracking":
        train = self.config.train
        self.say(
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


def duration(seconds: float) -> str:
    """3725 -> 1h 2m"""
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"
