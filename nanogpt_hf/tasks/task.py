"""Tasks with verifiable answers: questions, their reference answers, and a score of a
completion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanogpt_hf.data.conversations import Conversation

PASSED = 1.0  # the reward of a right answer


@dataclass(frozen=True)
class Question:
    """A question and its reference answer; of `regex`, the pattern of right answers."""

    messages: Conversation  # system, user and assistant; the user's is last
    answer: str

    @property
    def prompt(self) -> str:
        """The user's last message."""
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
