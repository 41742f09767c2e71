"""train.budget: the number of steps that fit into a time, by timing steps and an evaluation."""

import dataclasses
import itertools
import logging
from bisect import bisect_right

from nanogpt_hf.config.checks import parse_duration
from nanogpt_hf.config.schema import LARGEST
from nanogpt_hf.config.stages import with_known_steps
from nanogpt_hf.data.summary import repetition_warnings
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation.table import load_training_evaluations
from nanogpt_hf.formatting import plural
from nanogpt_hf.methods.run import Run
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.training.clock import (
    slowest,
    steps_per_window,
    time_of,
    time_windows,
    warm_up,
)
from nanogpt_hf.training.micro_batch import build_batches, without_a_trace
from nanogpt_hf.training.reporter import with_other_evaluations
from nanogpt_hf.training.step import train_step

logger = logging.getLogger(__name__)
# The share of the budget for what is not timed: checkpoints, saved models, plots, and a machine
# that becomes slower.
MARGIN = 0.05
# Windows of steps that are timed: at most this number, and at most this share of the budget.
_WINDOWS = 10
_TIMING = 0.02


def choose_steps(run: Run) -> None:
    """Set train.max_steps of the recipe of `run` to the number of steps that fit into its
    train.budget, and take train.budget out of the recipe.

    All processes call it before the first step, and get the same number. The steps that are timed
    have learning rate 0, and change nothing. Raises UserError if no step fits, or fewer than
    optim.warmup_steps.
    """
    config = run.config
    text = config.train.budget or ""
    budget = float(parse_duration(text) or 0)
    step = _seconds_per_step(run, budget)
    evaluation = _seconds_per_evaluation(run)
    every = config.eval.every
    steps = steps_within((1 - MARGIN) * budget, step, evaluation, every)
    evaluations = _evaluations(max(1, steps), every)
    measured = f"a step takes {step:,.3g} s here, an evaluation {evaluation:,.3g} s"
    if steps < 1:
        raise UserError(
            f"train.budget: {text} is too short for one step and {evaluations} evaluations: "
            f"{measured}; give more time, or lower eval.tokens"
        )
    warmup_steps = config.optim.warmup_in(steps)
    longest = config.optim.longest_warmup(steps)
    if longest < warmup_steps:
        before = "before the decay " if longest < steps else ""
        raise UserError(
            f"optim.warmup_steps: {warmup_steps:,} is more than the "
            f"{plural(longest, 'step')} {before}of train.budget {text}: {measured}; lower it, or "
            "give more time"
        )
    logger.info(
        f"train.budget {text}: {plural(steps, 'step')} and {evaluations} evaluations, with "
        f"{MARGIN:.0%} left for checkpoints: {measured}; the run records train.max_steps {steps}, "
        "which repeats it on any machine"
    )
    run.config = with_known_steps(config, steps)
    for line in repetition_warnings(run.config, run.data):
        logger.warning(line)


def _evaluations(steps: int, every: int) -> int:
    """Evaluations of a run: before its first step, every `every` steps, and after its last."""
    return 1 + -(-steps // every)


def steps_within(seconds: float, step: float, evaluation: float = 0.0, every: int = 1) -> int:
    """The largest number of steps that fit into `seconds`, if each takes `step` seconds, and an
    evaluation before the first, after every `every` and after the last takes `evaluation` seconds.
    """

    def needed(steps: int) -> float:
        return steps * step + _evaluations(steps, every) * evaluation

    # The time grows with the steps, so their number is found by bisection.
    possible = range(1, min(int(seconds / step), LARGEST) + 1)
    return bisect_right(possible, seconds, key=needed)


def _seconds_per_step(run: Run, budget: float) -> float:
    """Seconds of a step on the slowest process, the median of several windows as in `bench`."""
    accelerator = run.accelerator
    accumulation = accelerator.gradient_accumulation_steps
    size = run.batches.micro_batch_size
    # With batches of its own, since batches count the time that the host waits for them.
    batches = build_batches(run.config, accelerator, run.data.train, size)
    timed = dataclasses.replace(run, batches=batches)
    numbers = itertools.count()

    def step() -> None:
        train_step(timed, next(numbers), learning_rate=0.0)

    with without_a_trace(run, accumulation):
        seconds = warm_up(accelerator, step)
        steps = steps_per_window(seconds)
        windows = int(_TIMING * budget / (steps * seconds))
        windows = max(1, min(_WINDOWS, windows))
        found = time_windows(accelerator, step, steps, windows)["median"]
        return slowest(accelerator, found)


def _seconds_per_evaluation(run: Run) -> float:
    """Seconds of an evaluation on the slowest process, with all that the recipe evaluates."""
    others = load_training_evaluations(run.config, run.data.tokenizer)
    method = method_of(run.config)

    def evaluate() -> None:
        evaluated = method.evaluate(run, lambda: False)
        assert evaluated is not None, "nothing stops it"
        with_other_evaluations(run, evaluated, others)

    # The first one compiles and allocates.
    evaluate()
    return slowest(run.accelerator, time_of(run.accelerator.device, evaluate))
