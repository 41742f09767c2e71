"""The workload of a bench: a training run without a run folder."""

from dataclasses import dataclass
from typing import cast

from accelerate import Accelerator

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.data.synthetic import prepared_if_any, synthetic_data
from nanogpt_hf.errors import UserError
from nanogpt_hf.optim.schedule import learning_rate_at
from nanogpt_hf.training.run import Run
from nanogpt_hf.training.start import build_run
from nanogpt_hf.training.step import train_step


@dataclass
class Workload:
    """A run before its first step, and the number of steps taken since."""

    run: Run
    token_source: str  # the data folder, or that the tokens are synthetic and why
    next_step: int = 0

    def step(self) -> None:
        """Take the next step with the loop's `train_step`."""
        number, config = self.next_step, self.run.config
        self.next_step += 1
        train_step(self.run, number, learning_rate_at(number, config.optim, config.train.max_steps))


def build_workload(accelerator: Accelerator, config: Config, *, use_prepared: bool) -> Workload:
    """`config` on this machine, with its prepared tokens or, if there are none, synthetic ones.

    Raises UserError if the prepared data does not fit the recipe, or the recipe the machine.
    """
    data, token_source, problem = prepared_if_any(config, use_prepared)
    if problem:
        raise UserError(problem)
    if data is None:
        token_source = f"synthetic tokens ({token_source})"
        # has all that a run needs without evaluations
        data = cast(PreparedData, synthetic_data(config))
    return Workload(build_run(config, accelerator, data), token_source)
