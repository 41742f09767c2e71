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

_GENERATED_LIMIT = 500  # default number of questions of a task that generates them
_MAX_NEW_TOKENS = 256
# so `rl` with its default seed is evaluated on the same questions
_SEED = KNOBS["train.seed"].default
_SECONDS = 5.0  # for the score of an answer


class QuestionTask(NamedTuple):
    """The questions of a task, and how their answers are sampled."""

    name: str
    questions: Sequence[Question]
    revision: str
    sampler: "AnswerSampler"
    samples: int
    left_out: int  # questions that leave no room for an answer


class QuestionAnswers(Evaluation):
    asked_by, source = f"--tasks {QUESTIONS}NAME", "questions"
    options = (
        TASKS,
        Option(
            "--questions ROWS",
            "rl: rows with questions and answers: a file, URL or data set",
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

    def wanted(self, arguments: Namespace) -> bool:
        return bool(task_names(arguments, of_rl=True))

    def load(self, request: Request) -> Loaded:
        names = task_names(request.arguments, of_rl=True)
        tasks = [_load_question_task(name, request) for name in names]
        revisions = {f"questions of {task.name}": task.revision for task in tasks}
        return Loaded(partial(_measure, tasks), revisions)


def _load_question_task(name: str, request: Request) -> QuestionTask:
    """The task rl:NAME; one without questions of its own asks all rows of --questions.

    Raises UserError if the task, its questions or the tokenizer cannot be used, or no question
    leaves room for an answer.
    """
    from nanogpt_hf.data.chat_template import chat_of
    from nanogpt_hf.evaluation.answers import AnswerSampler, encode_question
    from nanogpt_hf.tasks.load import Generated, load_task
    from nanogpt_hf.tasks.reward import RewardFunction

    arguments, tokenizer = request.arguments, request.tokenizer.hf
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
        raise DataError(str(error).replace("data.source:", "--questions:")) from None
    limit = arguments.limit or (_GENERATED_LIMIT if isinstance(task.held_out, Generated) else None)
    samples = arguments.samples or 1
    sampler = AnswerSampler(
        tokenizer,
        RewardFunction(task.score, _SECONDS, "stop"),
        max_new_tokens=arguments.max_new_tokens or 0,
        temperature=float(samples > 1) if arguments.temperature is None else arguments.temperature,
        batch_size=arguments.batch_size,
        positions=request.positions,
    )
    try:
        questions, left_out = sampler.fitting(task.held_out[:limit], "shorten the questions")
    except UserError as error:
        line = str(error).replace("max_new_tokens", "--max-new-tokens")
        raise UserError(f"--tasks: {name}: {line}") from None
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
        yield Result(
            [
                f"{subject.name} on {task.name}: {asked}, temperature {sampler.temperature:g}",
                *(f"  {k:<14} {with_error(values[k], error, 4)}" for k, error in errors.items()),
                f"  {values['answer_tokens']:.1f} tokens per answer, {cut}",
            ]
        )
        results[task.name] = {
            **values,
            **{f"{k}_stderr": v if math.isfinite(v) else None for k, v in errors.items()},
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
    """Sample answers to the questions of a task; return figures by name, and the standard errors
    over the questions of those that have one.

    The random numbers of an answer follow from the numbers of its question and sample alone.
    """
    from nanogpt_hf.evaluation.answers import pass_at_k

    seeds = [
        derive_seed(_SEED, "answers", number, sample)
        for number in range(len(task.questions))
        for sample in range(task.samples)
    ]
    with subject.bar("answer", len(seeds), task.name) as progress:
        answers = task.sampler.sample(
            subject.accelerator, subject.model, task.questions, seeds, progress
        )
    # 1, 2, 4, ... and the number of samples
    counts = {2**power for power in range(task.samples.bit_length())} | {task.samples}
    reward, completions = answers.grouped_rewards.double(), answers.completions
    rates = {f"pass@{k}": pass_at_k(reward >= PASSED, k) for k in sorted(counts)}
    if bool(((reward != 0) & (reward != 1)).any()):  # some answers are partly right
        rates["reward"] = reward.mean(1)
    figures = {
        "answer_tokens": completions.lengths.double().mean(),
        "cut_share": 1 - completions.ended.double().mean(),
    }
    values = {name: tensor.mean().item() for name, tensor in (rates | figures).items()}
    count = len(task.questions)  # a single one has no standard error
    errors = {
        name: (rate.std() / math.sqrt(count)).item() if count > 1 else math.nan
        for name, rate in rates.items()
    }
    return values, errors
