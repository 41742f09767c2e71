"""Accuracy in tasks with verifiable answers: pass@1 and pass@k of sampled answers."""

import dataclasses
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nanogpt_hf.config.schema import KNOBS, DataSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.config.values import bounded
from nanogpt_hf.errors import DataError, UserError
from nanogpt_hf.evaluation.base import (
    COUNT,
    LIMIT,
    TASKS,
    Evaluation,
    Loaded,
    Option,
    Request,
    Result,
    Subject,
    with_error,
)
from nanogpt_hf.evaluation.tasks import QUESTIONS, task_names
from nanogpt_hf.formatting import plural
from nanogpt_hf.tasks.task import PASSED, Question

if TYPE_CHECKING:
    from nanogpt_hf.evaluation.answers import AnswerSampler

# Default of --limit for a task that generates its questions. 500 questions give pass@1 with a
# standard error of at most 0.022.
_GENERATED_LIMIT = 500
_MAX_NEW_TOKENS = 256
# The default of `rl`, too: so a model is measured on the questions that its training held out.
_SEED = KNOBS["train.seed"].default
_SECONDS = 5.0  # limit for the score of an answer


class QuestionTask(NamedTuple):
    """The questions of a task, and the sampler of their answers."""

    name: str
    questions: Sequence[Question]
    revision: str
    sampler: "AnswerSampler"
    samples: int
    left_out: int  # questions that leave no room for an answer


class QuestionAnswers(Evaluation):
    options = (
        TASKS,
        Option(
            "--questions ROWS",
            "rl: rows with questions and answers: a file, URL or data set",
            names_source=True,
        ),
        Option("--samples K", "rl: answers to each question (default 1)", COUNT),
        Option(
            "--temperature T",
            "rl: temperature of sampling (default: 0 for one answer, 1 for several)",
            bounded(float, 0),
        ),
        Option(
            "--max-new-tokens N",
            "rl: maximum tokens of an answer (default: 256, or what fits)",
            COUNT,
        ),
        LIMIT,
    )

    @property
    def asked_by(self) -> str:
        """--tasks with a prefix: without it, the option asks for lm-eval's tasks."""
        return f"--tasks {QUESTIONS}NAME"

    def wanted(self, arguments: Namespace) -> bool:
        return bool(task_names(arguments, of_rl=True))

    def load(self, request: Request) -> Loaded:
        names = task_names(request.arguments, of_rl=True)
        tasks = [_load_question_task(name, request) for name in names]
        revisions = {f"questions of {task.name}": task.revision for task in tasks}
        return Loaded(partial(_measure, tasks), revisions)


def _load_question_task(name: str, request: Request) -> QuestionTask:
    """Load the task rl:NAME. A task without questions of its own asks all rows of --questions.

    Raises UserError if the task, its questions or the tokenizer cannot be used, or no question
    leaves room for an answer.
    """
    from nanogpt_hf.data.chat_template import chat_of
    from nanogpt_hf.evaluation.answers import AnswerSampler, encode_question
    from nanogpt_hf.tasks.load import Generated, load_task
    from nanogpt_hf.tasks.reward import RewardFunction

    arguments = request.arguments
    tokenizer = request.tokenizer.hf
    knobs: dict[str, Any] = {**request.knobs}
    if arguments.questions:
        knobs["source"] = arguments.questions
    try:
        task = load_task(
            name.removeprefix(QUESTIONS),
            DataSection(**knobs),
            seed=_SEED,
            where="--tasks",
            hold_out_all=True,
            encode=partial(encode_question, tokenizer=tokenizer, chat=chat_of(tokenizer)),
        )
    except DataError as error:
        # The functions name knobs of a recipe; this command has options instead.
        raise DataError(str(error).replace("data.source:", "--questions:")) from None
    limit = arguments.limit
    # There is no end of generated questions.
    if limit is None and isinstance(task.held_out, Generated):
        limit = _GENERATED_LIMIT
    samples = arguments.samples or 1
    temperature = arguments.temperature
    # One answer is the most probable one. Several would all be equal at temperature 0.
    if temperature is None:
        temperature = 1.0 if samples > 1 else 0.0
    sampler = AnswerSampler(
        tokenizer,
        RewardFunction(task.score, _SECONDS, "stop"),
        max_new_tokens=arguments.max_new_tokens or 0,
        temperature=temperature,
        batch_size=arguments.batch_size,
        positions=request.positions,
    )
    try:
        questions, left_out = sampler.fitting(task.held_out[:limit], "shorten the questions")
    except UserError as error:
        line = str(error).replace("max_new_tokens", "--max-new-tokens")
        raise UserError(f"--tasks: {name}: {line}") from None
    # The default of --max-new-tokens: as much as the longest question leaves room for.
    if arguments.max_new_tokens is None:
        longest = max(len(sampler.encode(question)) for question in questions)
        room = min(_MAX_NEW_TOKENS, request.positions - longest)
        sampler = dataclasses.replace(sampler, max_new_tokens=room)
    return QuestionTask(name, questions, task.revision, sampler, samples, len(left_out))


def _measure(tasks: list[QuestionTask], subject: Subject) -> Iterator[Result]:
    results = {}
    for task in tasks:
        values, errors = _sample_answers(subject, task)
        sampler = task.sampler
        asked = f"{plural(len(task.questions), 'question')}, {plural(task.samples, 'answer')} each"
        if task.left_out:
            asked += f" ({task.left_out:,} more leave no room for it, left out)"
        cut = f"{values['cut_share']:.1%} cut at {sampler.max_new_tokens:,}"
        lines = [f"{subject.name} on {task.name}: {asked}, temperature {sampler.temperature:g}"]
        for name, error in errors.items():
            lines.append(f"  {name:<14} {with_error(values[name], error, 4)}")
        lines.append(f"  {values['answer_tokens']:.1f} tokens per answer, {cut}")
        yield Result(lines)
        # JSON has no NaN: the error over a single question
        finite = {
            f"{name}_stderr": error if math.isfinite(error) else None
            for name, error in errors.items()
        }
        results[task.name] = {
            **values,
            **finite,
            "questions": len(task.questions),
            "questions_left_out": task.left_out,
            "samples": task.samples,
            "temperature": sampler.temperature,
            "max_new_tokens": sampler.max_new_tokens,
            "revision": task.revision,
        }
    yield Result(figures={"answers": results})


def _sample_answers(
    subject: Subject, task: QuestionTask
) -> tuple[dict[str, float], dict[str, float]]:
    """Sample answers to the questions of a task. Return figures by name, and the standard errors
    over the questions for the figures that are rates.
    """
    from tqdm import tqdm

    from nanogpt_hf.evaluation.answers import pass_at_k

    # The random numbers of an answer follow from the numbers of its question and sample alone, not
    # from the batch or process that generates it.
    seeds = [
        derive_seed(_SEED, "answers", number, sample)
        for number in range(len(task.questions))
        for sample in range(task.samples)
    ]
    with tqdm(
        desc=task.name,
        total=len(seeds),
        unit="answer",
        disable=not subject.shows_bars,
        leave=False,
    ) as bar:
        answers = task.sampler.sample(
            subject.accelerator, subject.model, task.questions, seeds, bar.update
        )
    # pass@k for k = 1, 2, 4, ... and for the number of samples
    counts = {2**power for power in range(task.samples.bit_length())} | {task.samples}
    reward = answers.grouped_rewards.double()  # (questions, samples)
    completions = answers.completions
    rates = {f"pass@{k}": pass_at_k(reward >= PASSED, k) for k in sorted(counts)}
    # A mean reward adds nothing to pass@1, unless some answers are partly right.
    if bool(((reward != 0) & (reward != 1)).any()):
        rates["reward"] = reward.mean(1)
    figures = {
        "answer_tokens": completions.lengths.double().mean(),
        "cut_share": 1 - completions.ended.double().mean(),
    }
    values = {name: tensor.mean().item() for name, tensor in (rates | figures).items()}
    # The questions are the independent draws, not the answers: answers to one question are alike.
    count = len(task.questions)
    errors = dict.fromkeys(rates, math.nan)
    if count > 1:
        errors = {name: (rate.std() / math.sqrt(count)).item() for name, rate in rates.items()}
    return values, errors
