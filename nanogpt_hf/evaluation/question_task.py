"""The questions of a task with the sampler of their answers, for `evaluate` and for a run."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nanogpt_hf.config.schema import KNOBS, Config, DataSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation.base import Request, Subject
from nanogpt_hf.tasks.task import Question, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanogpt_hf.evaluation.answers import Answers, AnswerSampler
    from nanogpt_hf.tasks.turns import Turns

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
    samples: int  # answers to each question
    left_out: int  # questions that leave no room for an answer


def load_question_task(
    name: str,
    request: Request,
    *,
    title: str,
    source: str | None,
    option: str,
    reward: str | None = None,
    tools: str | None = None,
) -> QuestionTask:
    """Load the task `name` for `evaluate`; `title` is its name in the output.

    A task without questions of its own asks all rows of `source`, which `option` names. `reward`
    replaces its score, and its answers may call `tools`.

    Raises UserError if the task, a tool, its questions or the tokenizer cannot be used, or no
    question leaves room for an answer.
    """
    from nanogpt_hf.tasks.load import Generated

    arguments = request.arguments
    turns = None if tools is None else _turns_of(tools.split(","), request)
    knobs: dict[str, Any] = {**request.knobs}
    if source:
        knobs["source"] = source
    try:
        data = DataSection(**knobs)
        task = _load(name, data, request.tokenizer.hf, reward, hold_out_all=True, turns=turns)
    except UserError as error:
        # The functions name knobs of a recipe; this command has options instead.
        line = str(error).replace("data.source:", f"{option}:").replace("rl.reward:", "--reward:")
        raise type(error)(line) from None
    limit = arguments.limit
    # There is no end of generated questions.
    if limit is None and isinstance(task.held_out, Generated):
        limit = _GENERATED_LIMIT
    samples = arguments.samples or 1
    temperature = arguments.temperature
    # One answer is the most probable one. Several would all be equal at temperature 0.
    if temperature is None:
        temperature = 1.0 if samples > 1 else 0.0
    try:
        return _with_sampler(
            title,
            task,
            task.held_out[:limit],
            request.tokenizer.hf,
            samples=samples,
            temperature=temperature,
            max_new_tokens=arguments.max_new_tokens,
            batch_size=arguments.batch_size,
            positions=request.positions,
            turns=turns,
        )
    except UserError as error:
        line = str(error).replace("max_new_tokens", "--max-new-tokens")
        where = f"--tasks: {title}" if option == "--questions" else option
        raise UserError(f"{where}: {line}") from None


def _turns_of(tools: list[str], request: Request) -> "Turns":
    """Load tools that the answers of the model may call."""
    from nanogpt_hf.data.chat_template import chat_of
    from nanogpt_hf.tasks.tools import load_tools
    from nanogpt_hf.tasks.turns import MAX_TURNS, build_turns

    loaded = load_tools(tools, _SECONDS, "--tools")
    return build_turns(chat_of(request.tokenizer.hf), loaded, MAX_TURNS, "--tools")


def training_question_task(
    config: Config, tokenizer: "PreTrainedTokenizerBase", rows: int
) -> QuestionTask:
    """Load the first `rows` held-out conversations of a run as questions, with greedy answers.

    Raises UserError if no question leaves room for an answer.
    """
    task = _load("exact", config.data, tokenizer, None, hold_out_all=False)
    # The batches of training fit into memory. With `auto` their size is not known yet.
    try:
        return _with_sampler(
            "held-out rows",
            task,
            task.held_out[:rows],
            tokenizer,
            # Greedy: figures of two evaluations differ by the model, not by chance.
            samples=1,
            temperature=0.0,
            max_new_tokens=None,
            batch_size=config.train.min_micro_batch_size,
            positions=config.data.block_size,
        )
    except UserError as error:
        raise UserError(f"eval.metrics: {error}") from None


def _load(
    name: str,
    data: DataSection,
    tokenizer: "PreTrainedTokenizerBase",
    reward: str | None,
    *,
    hold_out_all: bool,
    turns: "Turns | None" = None,
) -> Task:
    """Load a task whose questions the tokenizer can encode."""
    from nanogpt_hf.data.chat_template import chat_of
    from nanogpt_hf.evaluation.answers import encode_question
    from nanogpt_hf.tasks.load import load_task

    return load_task(
        name,
        data,
        reward=reward,
        seed=_SEED,
        where="--tasks",
        hold_out_all=hold_out_all,
        encode=partial(
            encode_question,
            tokenizer=tokenizer,
            chat=chat_of(tokenizer),
            tools=turns.tools if turns else None,
        ),
    )


def _with_sampler(
    title: str,
    task: Task,
    questions: Sequence[Question],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    samples: int,
    temperature: float,
    max_new_tokens: int | None,
    batch_size: int,
    positions: int,
    turns: "Turns | None" = None,
) -> QuestionTask:
    """Add a sampler of answers. Without `max_new_tokens` an answer may be as long as the longest
    question leaves room for, up to 256 tokens.
    """
    from nanogpt_hf.evaluation.answers import AnswerSampler
    from nanogpt_hf.tasks.reward import RewardFunction

    # While the length of answers is open, a question fits if there is room for one token.
    sampler = AnswerSampler(
        tokenizer,
        RewardFunction(task.score, _SECONDS, "stop"),
        max_new_tokens=max_new_tokens or 0,
        temperature=temperature,
        batch_size=batch_size,
        positions=positions,
        turns=turns,
    )
    fitting, left_out = sampler.fitting(questions, "shorten the questions")
    if max_new_tokens is None:
        longest = max(len(sampler.encode(question)) for question in fitting)
        room = min(_MAX_NEW_TOKENS, positions - longest)
        sampler = dataclasses.replace(sampler, max_new_tokens=room)
    return QuestionTask(title, fitting, task.revision, sampler, samples, len(left_out))


def answers_to(task: QuestionTask, subject: Subject) -> "Answers":
    """Sample the answers to all questions of a task, on all processes, with a progress bar."""
    from tqdm import tqdm

    from nanogpt_hf.tasks.reward import RewardError

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
        try:
            return task.sampler.sample(
                subject.accelerator, subject.model, task.questions, seeds, bar.update
            )
        except RewardError as error:
            # `evaluate` counts no error as 0, and has no knob for it.
            raise UserError(error.fault, "correct it") from None
