"""Accuracy in tasks with verifiable answers: pass@1 and pass@k of sampled answers."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers
from accelerate import Accelerator

from nanogpt_hf.config.schema import KNOBS, DataSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import DataError, UserError
from nanogpt_hf.evaluation.answers import AnswerSampler, pass_at_k
from nanogpt_hf.tasks.load import Generated, load_task
from nanogpt_hf.tasks.reward import RewardFunction
from nanogpt_hf.tasks.task import PASSED, Question

GENERATED_LIMIT = 500  # default number of questions of a task that generates them
_MAX_NEW_TOKENS = 256
_SEED = KNOBS["train.seed"].default  # so `rl` with its default seed is evaluated on the same questions
_SECONDS = 5.0  # for the score of an answer
_BATCHES_AT_ONCE = 16  # between two calls of `progress`


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are sampled."""

    samples: int  # answers to each question
    temperature: float
    max_new_tokens: int | None  # None: 256, or what the model's positions leave
    batch_size: int
    limit: int | None


@dataclass(frozen=True)
class QuestionTask:
    """The questions of a task, and how their answers are sampled."""

    name: str
    questions: Sequence[Question]
    revision: str
    sampler: AnswerSampler
    samples: int


@dataclass(frozen=True)
class AnswerScores:
    """Figures of the answers to the questions of a task, by name; errors are standard errors over the questions."""

    values: dict[str, float]
    errors: dict[str, float]


def load_question_tasks(
    names: Sequence[str],
    data: DataSection | None,
    tokenizer: transformers.PreTrainedTokenizerBase,
    positions: int,
    options: AnswerOptions,
) -> list[QuestionTask]:
    """The tasks `names`, each rl:NAME; those without questions of their own ask all rows of `data`.

    Raises UserError if a task, its questions or the tokenizer cannot be used, or a prompt leaves no room for an answer.
    """
    chat = ChatFormat(tokenizer, fixed_day=True) if tokenizer.chat_template else None
    tasks = []
    for name in names:
        try:
            kind = name.partition(":")[2]
            task = load_task(kind, data or DataSection(), seed=_SEED, where="--tasks", hold_out_all=True)
        except DataError as error:
            raise DataError(str(error).replace("data.source:", "--questions:")) from None
        generated = isinstance(task.held_out, Generated)
        questions = task.held_out[: options.limit or (GENERATED_LIMIT if generated else None)]
        sampler = AnswerSampler(
            tokenizer,
            RewardFunction(task.score, _SECONDS, "stop"),
            max_new_tokens=options.max_new_tokens or 0,
            temperature=options.temperature,
            batch_size=options.batch_size,
            positions=positions,
            limits=("--max-new-tokens", "the model"),
        )
        longest = max(len(sampler.encode(chat, question)) for question in questions)
        if options.max_new_tokens is None:
            if longest == positions:
                raise UserError(f"--tasks: {name}: a question fills all {positions} positions of the model")
            sampler = dataclasses.replace(sampler, max_new_tokens=min(_MAX_NEW_TOKENS, positions - longest))
        tasks.append(QuestionTask(name, questions, task.revision, sampler, options.samples))
    return tasks


def evaluate_questions(
    accelerator: Accelerator,
    mesh: Mesh,
    model: transformers.PreTrainedModel,
    task: QuestionTask,
    *,
    progress: Callable[[int], object] = lambda questions: None,
) -> AnswerScores:
    """Sample answers to the questions of a task. All processes call it and get the same figures.

    The random numbers of an answer follow from the numbers of its question and sample alone. `progress` is called with
    the number of questions done.
    """
    at_once = max(1, _BATCHES_AT_ONCE * task.sampler.batch_size // task.samples)
    rewards, lengths, ended = [], [], []
    for first in range(0, len(task.questions), at_once):
        questions = task.questions[first : first + at_once]
        numbers = range(first, first + len(questions))
        seeds = [derive_seed(_SEED, "answers", number, sample) for number in numbers for sample in range(task.samples)]
        answers = task.sampler.sample(accelerator, mesh, model, questions, seeds)
        rewards.append(answers.grouped_rewards)
        lengths.append(answers.completions.lengths)
        ended.append(answers.completions.ended)
        progress(len(questions))
    reward = torch.cat(rewards).double()
    rates = {f"pass@{k}": pass_at_k(reward >= PASSED, k) for k in _powers_of_two(task.samples)}
    if bool(((reward != 0) & (reward != 1)).any()):  # some answers are partly right
        rates["reward"] = reward.mean(1)
    figures = {"answer_tokens": torch.cat(lengths).double().mean(), "cut_share": 1 - torch.cat(ended).double().mean()}
    values = {name: tensor.mean().item() for name, tensor in (rates | figures).items()}
    return AnswerScores(values, {name: _standard_error(rate) for name, rate in rates.items()})


def _powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... below `largest`, and `largest`."""
    return [*(2**power for power in range(largest.bit_length()) if 2**power < largest), largest]


def _standard_error(values: torch.Tensor) -> float:
    """The standard error of the mean of values, nan for a single one."""
    return math.nan if len(values) < 2 else (values.std() / math.sqrt(len(values))).item()
