"""Rewards of completions: a task's score or a user's Python function, with a time limit. Errors are
counted.
"""

import hashlib
import os
import runpy
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from nanogpt_hf.errors import UserError, one_line
from nanogpt_hf.tasks.task import Question, Score
from nanogpt_hf.time_limit import TimeUpError, time_limit

_IMPORT_SECONDS = 300.0  # the limit for importing a reward file, which may load a model
# The largest reward. float32 holds the sums and squares of more than a million of them.
_LARGEST = 1e15
# Settings of the whole process that reward models change, and on which the numbers of training
# depend: a getter and a setter each.
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    # A stated device, even the CPU, is a mode that every call of torch passes.
    (torch.get_default_device, lambda _: torch.set_default_device(None)),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
]


class _UserCodeError(Exception):
    """A user's code has failed; the message continues a sentence about it: `raises ...`."""


@contextmanager
def _user_code(seconds: float) -> Iterator[None]:
    """Context for a user's code: its errors and a time limit raise _UserCodeError.

    The end of the context restores the current folder, and torch's settings.
    """
    before = [get() for get, _ in _SETTINGS]
    try:
        with time_limit(seconds), chdir(os.curdir), torch.enable_grad():
            yield
    except KeyboardInterrupt:
        raise
    except TimeUpError:
        raise _UserCodeError(f"takes more than {seconds:g} seconds") from None
    except BaseException as error:
        # Also sys.exit(). Not str(error), which is the user's code, too, and may raise.
        what = traceback.format_exception_only(error)[-1]
        raise _UserCodeError(f"raises {one_line(what, 150)}") from None
    finally:
        for (get, set_again), value in zip(_SETTINGS, before, strict=True):
            # Setting a device again, even the same one, would slow down every call of torch.
            if get() != value:
                set_again(value)


def load_reward(spec: str) -> tuple[Score, str]:
    """Load the function of `FILE.py:NAME`, called as NAME(prompt, completion, answer). Return it
    with the sha256 of the file.

    The file is Python code of the user's own, never read from the Hub. Raises UserError if there is
    no such file or function.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser()
    if not file or path.suffix != ".py" or not name.isidentifier():
        raise UserError(
            "rl.reward: expected a Python file and a function, such as "
            f"my_reward.py:score, got {spec!r}"
        )
    if not path.is_file():
        raise UserError(f"rl.reward: {path}: no such file")
    try:
        with _user_code(_IMPORT_SECONDS):
            function: Any = runpy.run_path(str(path)).get(name)
    except _UserCodeError as error:
        raise UserError(f"rl.reward: {path} cannot be imported: it {error}") from None
    if not callable(function):
        raise UserError(f"rl.reward: {path}: has no function {name!r}")

    def score(completion: str, question: Question) -> float:
        result: Any = function(question.prompt, completion, question.answer)
        return result

    return score, f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


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
        """Raises UserError for the first of the errors, unless they count as zeros."""
        if errors and self.on_error == "stop":
            raise UserError(
                f"the reward function {errors[0]}; correct it, or set --rl.reward_errors zero to "
                "count such errors as reward 0"
            )

    def _reward(self, completion: str, question: Question) -> tuple[float, str | None]:
        try:
            with _user_code(self.seconds):
                value = float(self.score(completion, question))
        except _UserCodeError as error:
            return 0.0, str(error)
        # Written so that it holds for nan, too, which no comparison is true of.
        if not abs(value) <= _LARGEST:
            return 0.0, f"returns {value:g}, which is no number up to {_LARGEST:g}"
        return value, None
