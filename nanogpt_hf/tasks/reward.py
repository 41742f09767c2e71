"""Rewards of completions: a task's score or a user's Python function, with a time limit. Errors are
counted.
"""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanogpt_hf.errors import UserError
from nanogpt_hf.tasks.own_modules import code_digest
from nanogpt_hf.tasks.task import Question, Score
from nanogpt_hf.tasks.user_code import UserCodeError, is_deferred, run_file, user_code

# The largest reward. float32 holds the sums and squares of more than a million of them.
_LARGEST = 1e15


class RewardError(UserError):
    """A reward function failed, and its errors do not count as 0."""


def load_reward(spec: str) -> tuple[Score, str]:
    """Load the function of `FILE.py:NAME`, called as NAME(prompt, completion, answer). Return it
    with the digest of its code.

    The file is Python code of the user's own, never read from the Hub. Raises UserError if there is
    no such file or function.
    """
    file, _, name = spec.rpartition(":")
    path = Path(os.path.expanduser(file))
    if not file or path.suffix != ".py" or not name.isidentifier():
        raise UserError(
            "rl.reward: expected a Python file and a function, such as "
            f"my_reward.py:score, got {spec!r}"
        )
    function: Any = run_file("rl.reward", path).get(name)
    if not callable(function):
        raise UserError(f"rl.reward: {path}: has no function {name!r}")
    if is_deferred(function):
        raise UserError(
            f"rl.reward: {path}: {name}: is asynchronous or a generator; return the reward"
        )
    # Found out now instead of after the first completions, and by its name.
    if not _takes_three(function):
        raise UserError(
            f"rl.reward: {path}: {name}{inspect.signature(function)} is called for one completion, "
            f"as {name}(prompt, completion, answer); give it these three parameters"
        )

    def score(completion: str, question: Question) -> float:
        result: Any = function(question.prompt, completion, question.answer)
        return result

    return score, code_digest("rl.reward", path)


def _takes_three(function: Any) -> bool:
    """Whether a function can be called with three values; True if it does not state it."""
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        parameters.bind("", "", "")
    except TypeError:
        return False
    return True


@dataclass(frozen=True)
class Rewards:
    """Rewards of completions in their order, and the errors of the ones whose score failed: their
    reward is 0.
    """

    values: list[float]
    errors: list[str]


@dataclass(frozen=True)
class RewardFunction:
    """A score that may raise, hang or return something else than a number.

    `on_error` decides what follows: `stop` ends the run with one line, `zero` counts the
    error and gives reward 0.
    """

    score: Score
    seconds: float
    on_error: Literal["stop", "zero"]

    def rewards(self, completions: Sequence[str], questions: Sequence[Question]) -> Rewards:
        """Compute the reward of each completion. Does not raise; `check` does, after the errors of
        all processes were collected: one process that ended alone would let the others wait.
        """
        values = []
        errors = []
        for completion, question in zip(completions, questions, strict=True):
            value, error = self._reward(completion, question)
            values.append(value)
            if error:
                errors.append(
                    f"{error}, for the completion {completion!r:.60} of {question.prompt!r:.60}"
                )
        return Rewards(values, errors)

    def check(self, errors: Sequence[str]) -> None:
        """Raises RewardError for the first of the errors, unless they count as zeros."""
        if errors and self.on_error == "stop":
            raise RewardError(
                f"the reward function {errors[0]}",
                "correct it, or set --rl.reward_errors zero to count such errors as reward 0",
            )

    def _reward(self, completion: str, question: Question) -> tuple[float, str | None]:
        try:
            with user_code(self.seconds):
                value = float(self.score(completion, question))
        except UserCodeError as error:
            return 0.0, str(error)
        # Written so that it holds for nan, too, which no comparison is true of.
        if not abs(value) <= _LARGEST:
            return 0.0, f"returns {value:g}, which is no number up to {_LARGEST:g}"
        return value, None
