"""Tasks with verifiable answers: questions, their reference answers, and the score of a completion:
1 for a right answer, 0 for any other.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanogpt_hf.data.messages import Message
from nanogpt_hf.errors import UserError, did_you_mean
from nanogpt_hf.tasks.answer_text import chosen_letter, final_number

ARITHMETIC = "arithmetic"
GYM = "reasoning_gym:"
PASSED = 1.0  # the reward of a right answer


@dataclass(frozen=True)
class Question:
    """A question and its reference answer; for the task `regex`, the pattern of right answers."""

    messages: list[Message]  # all before the answer
    answer: str
    entry: Any = None  # the whole entry of reasoning-gym, which its score needs
    tools: list[Any] | None = None

    @property
    def prompt(self) -> str:
        """The last message: the user's, or a tool's result."""
        return self.messages[-1]["content"]


Score = Callable[[str, Question], float]  # scores a completion; 1 for a right answer


@dataclass(frozen=True)
class Task:
    """Questions to train on and held-out ones, which are pure functions of (seed, index), and the
    score of an answer.

    `revision` identifies questions and score, so that a resumed run notices when they have changed.
    """

    name: str
    train: Sequence[Question]
    held_out: Sequence[Question]
    score: Score
    revision: str


def _gsm8k(completion: str, question: Question) -> float:
    """Compare the numbers after ####, in which GSM8K writes its answers."""
    # None is no right answer, not even to a reference without a number.
    number = final_number(completion)
    return float(number is not None and number == final_number(question.answer))


def _multiple_choice(completion: str, question: Question) -> float:
    """Compare the letters that completion and reference choose."""
    letter = chosen_letter(completion)
    return float(letter is not None and letter == chosen_letter(question.answer))


def exact_match(completion: str, question: Question) -> float:
    """1 if the completion is the reference answer, up to white space."""
    return float(completion.split() == question.answer.split())


# The tasks whose questions are the conversations of `data.source`; the last message of each is the
# reference answer.
SCORES: dict[str, Score] = {
    "exact": exact_match,
    "gsm8k": _gsm8k,
    "multiple_choice": _multiple_choice,
    "regex": lambda text, question: float(re.search(question.answer, text) is not None),
}
TASKS = (ARITHMETIC, *SCORES, f"{GYM}NAME")


def is_generated(task: str) -> bool:
    """Whether the task has its own questions, and needs no `data.source`."""
    return task == ARITHMETIC or task.startswith(GYM)


def check_name(task: str, where: str = "rl.task") -> None:
    """Raises UserError if there is no such task."""
    if task not in TASKS and not task.startswith(GYM):
        if os.path.exists(os.path.expanduser(task)):
            raise UserError(
                f"{where}: {task}: a file, and no task; name how its answers are scored, as one "
                f"of {', '.join(SCORES)}, and the file by --data, of `evaluate` by --questions"
            )
        raise UserError(
            f"{where}: {task}: no such task{did_you_mean(task, TASKS)}; known: {', '.join(TASKS)}"
        )


def reference_problem(task: str, answer: str) -> str | None:
    """State why a reference answer cannot be compared with; None if it can."""
    # Such a question would give reward 0 to every answer, without a word.
    if task == "gsm8k" and final_number(answer) is None:
        return "has no number after ####"
    if task == "multiple_choice" and chosen_letter(answer) is None:
        return "names no letter, such as B"
    if task == "regex":
        try:
            re.compile(answer)
        except (re.error, OverflowError, RecursionError) as error:
            return f"is no regular expression: {error}"
    return None
