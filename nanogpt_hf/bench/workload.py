"""The workload of a bench: a training run without a run folder, and its shares for several
processes.
"""

from dataclasses import dataclass
from typing import cast

from accelerate import Accelerator

from nanogpt_hf.config.schema import Config, replace_knobs
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


def strong_scaling(config: Config, processes: int) -> Config:
    """`config` with the step shared by `processes`, and the largest micro-batch up to the
    recipe's that divides it.
    """
    train, block = config.train, config.data.block_size
    sequences = train.tokens_per_step // block
    limit = sequences if train.micro_batch_size == "auto" else train.micro_batch_size
    sizes = [size for size in range(1, limit + 1) if sequences % (size * processes) == 0]
    if not sizes:
        raise UserError(
            f"--processes: {processes} does not divide a step of {sequences} "
            "sequences; try --scaling weak"
        )
    return replace_knobs(config, {"train.micro_batch_size": sizes[-1]})


def weak_scaling(config: Config, processes: int) -> Config:
    """`config` with `processes` times the tokens per step: as many per process as the recipe has
    for one.
    """
    tokens = config.train.tokens_per_step * processes
    return replace_knobs(config, {"train.tokens_per_step": tokens})
