"""Load a task by name: arithmetic, reasoning-gym's tasks, or the conversations of `data.source`
as questions.
"""

import dataclasses
import hashlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.config.sources import is_mixture
from nanogpt_hf.data.built_in import arithmetic_question, is_held_out
from nanogpt_hf.data.conversations import conversation_of
from nanogpt_hf.data.documents import split_documents
from nanogpt_hf.data.messages import Message
from nanogpt_hf.data.source import load_documents
from nanogpt_hf.errors import DataError, UserError, did_you_mean, one_line
from nanogpt_hf.tasks.reward import load_reward
from nanogpt_hf.tasks.task import (
    ARITHMETIC,
    GYM,
    SCORES,
    Question,
    Task,
    check_name,
    exact_match,
    reference_problem,
)

# The length of each split of a generated task. There is no last question, but a sequence needs one.
GENERATED_QUESTIONS = 1_000_000
# Items of reasoning-gym per question of a split, to find one in which an item belongs to the split.
# One in ten is held out, so a window without one is rare, and then the next ones are searched.
_WINDOW = 64


@dataclass(frozen=True)
class Generated(Sequence[Question]):
    """Questions that are generated from their index: the first candidate that fits."""

    task: str
    candidates: Callable[[int], Iterator[Question]]
    fits: Callable[[Question], bool] = lambda question: True

    def __len__(self) -> int:
        return GENERATED_QUESTIONS

    def __getitem__(self, index: Any) -> Any:
        chosen = range(len(self))[index]
        if isinstance(index, slice):
            return [self[number] for number in chosen]
        for question in self.candidates(chosen):
            if self.fits(question):
                return question
        raise UserError(
            f"{self.task}: generates no question in place {chosen:,} that is as long as wanted; "
            "choose other rl.options, or larger blocks"
        )


def load_task(
    name: str,
    data: DataSection,
    *,
    reward: str | None = None,
    options: dict[str, Any] | None = None,
    seed: int = 0,
    where: str = "rl.task",
    hold_out_all: bool = False,
    encode: Callable[[Question], object] = lambda question: None,
) -> Task:
    """Load the task `name`: arithmetic, reasoning_gym:NAME with `options`, or one of `SCORES` on
    the rows of `data.source`.

    `reward`, such as my_reward.py:score, replaces the task's own score. With `hold_out_all`
    every row of a source is a held-out question. A row that `encode` refuses by a UserError, as
    the model's chat template may, is one that cannot be used. Raises UserError for an unknown
    task, a package that is not installed, and questions or a reward that cannot be used.
    """
    check_name(name, where)
    if name == ARITHMETIC:
        task = _arithmetic(seed)
    elif name.startswith(GYM):
        task = _reasoning_gym(name.removeprefix(GYM), options or {}, seed, where)
    else:
        # A user's reward may compare with reference answers that the task itself could not read.
        compare = name if reward is None else None
        question_of = partial(_question, compare=compare, encode=encode)
        task = _from_source(name, data, question_of, hold_out_all=hold_out_all)
    if options and not name.startswith(GYM):
        raise UserError(
            "rl.options: only tasks of reasoning-gym have options, and this is "
            f"{name}; leave it out"
        )
    if reward is None:
        return task
    # Another file of the same name is another task, which a resume must notice.
    score, digest = load_reward(reward)
    return dataclasses.replace(task, score=score, revision=f"{task.revision}, {reward} {digest}")


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _arithmetic(seed: int) -> Task:
    def questions(held_out: bool) -> Generated:
        def candidates(index: int) -> Iterator[Question]:
            # A question that does not fit is replaced by one of the next hundred.
            for number in range(index, index + 100):
                question, answer = arithmetic_question(seed, number, held_out=held_out)
                yield Question(_user(question), answer)

        return Generated(ARITHMETIC, candidates)

    return Task(ARITHMETIC, questions(False), questions(True), exact_match, f"{ARITHMETIC} 1")


def _from_source(
    name: str, data: DataSection, question_of: Callable[[Any], Question], *, hold_out_all: bool
) -> Task:
    """Make questions of the rows of `data.source`, split as for training."""
    if is_mixture(data):
        raise DataError("data.source: questions come from one source; a list is not supported")
    if not data.source:
        raise DataError(
            f"data.source: {name} has no questions of its own; name a file or data set of them"
        )
    # Files from a URL are downloaded to this folder; the questions stay in memory.
    with tempfile.TemporaryDirectory() as scratch:
        documents = load_documents(data, Path(scratch), lambda row, _: question_of(row))
        # `evaluate` asks all rows, training keeps some for its own evaluations.
        splits = ([], documents.read()) if hold_out_all else split_documents(documents, data)
    if not splits[1]:
        raise DataError(f"data.source: {data.source}: holds no questions")
    return Task(name, splits[0], splits[1], SCORES[name], documents.revision)


def _question(row: Any, compare: str | None, encode: Callable[[Question], object]) -> Question:
    """Make a question of a row's conversation. Raises ValueError or UserError if it is none, or if
    the task `compare`, where it is given, cannot compare with its answer.
    """
    # The last message is the reference answer.
    messages, tools, unlearned = conversation_of(row)
    *asked, answer = messages
    if "tool_calls" in answer or len(asked) in unlearned:
        raise DataError(
            f"the answer to {asked[-1]['content']!r:.60} calls a tool, or is marked not to be "
            "learned; a reward compares texts of right answers"
        )
    question = Question(asked, answer["content"], tools=tools)
    if compare and (problem := reference_problem(compare, question.answer)):
        raise DataError(
            f"the answer {question.answer!r:.60} {problem}, which task {compare} compares"
        )
    encode(question)
    return question


def _reasoning_gym(name: str, options: dict[str, Any], seed: int, where: str) -> Task:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            f"{where}: {GYM}{name}: needs reasoning-gym; run `pip install "
            "'nanogpt_hf[reasoning-gym]'`"
        )
    import reasoning_gym  # pyright: ignore[reportMissingImports]
    from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]

    if name not in DATASETS:
        raise UserError(
            f"{where}: {name}: reasoning-gym has no such task{did_you_mean(name, DATASETS)}"
        )
    size = GENERATED_QUESTIONS * _WINDOW

    # Two seeds give other questions, but small tasks have the same ones under both. So the text of
    # a question decides to which split it belongs, and no held-out question is trained on.
    def split(held_out: bool) -> tuple[Any, Generated]:
        seed_of_split = derive_seed(seed, "questions", int(held_out)) % 2**31
        dataset = reasoning_gym.create_dataset(name, size=size, seed=seed_of_split, **options)

        def candidates(index: int) -> Iterator[Question]:
            for number in range(index * _WINDOW, (index + 100) * _WINDOW):
                entry = dataset[number % size]
                if is_held_out(entry["question"]) == held_out:
                    yield Question(_user(entry["question"]), str(entry["answer"]), entry)

        return dataset, Generated(f"{GYM}{name}", candidates)

    try:
        dataset, train = split(False)
        _, held_out = split(True)
        # The task's own checks of its options raise errors of any type, some at the first question.
        train[0]
    except Exception as error:
        raise UserError(
            f"rl.options: {GYM}{name}: {type(error).__name__}: {one_line(error)}"
        ) from None

    def score(completion: str, question: Question) -> float:
        return float(dataset.score_answer(completion.strip(), question.entry))

    digest = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:16]
    revision = f"reasoning-gym {version('reasoning-gym')}, options {digest}"
    return Task(f"{GYM}{name}", train, held_out, score, revision)
