"""Metrics of generated answers by the `evaluate` library: ROUGE, BLEU, chrF, exact match,
accuracy, or one of your own, in `evaluate --metrics` and during training.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nanogpt_hf.config.schema import Config
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation.base import (
    DATA,
    LIMIT,
    MAX_NEW_TOKENS,
    TEMPERATURE,
    Evaluation,
    Loaded,
    Measure,
    Option,
    Request,
    Result,
    Subject,
    with_error,
)
from nanogpt_hf.evaluation.metric_modules import (
    RESAMPLES,
    Metric,
    compute_metrics,
    load_metrics,
    numbers_of,
    standard_errors,
)
from nanogpt_hf.evaluation.question_task import (
    QuestionTask,
    answers_to,
    load_question_task,
    training_question_task,
)
from nanogpt_hf.formatting import plural

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

METRICS = Option(
    "--metrics A,B",
    "metrics of the `evaluate` library on answers to the rows of --data: names such as rouge, "
    "folders or files",
)


class AnswerMetrics(Evaluation):
    options = (METRICS, DATA, MAX_NEW_TOKENS, TEMPERATURE, LIMIT)
    knob = "eval.metrics"

    def load(self, request: Request) -> Loaded:
        if not request.arguments.data:
            raise UserError("--metrics: needs rows with questions and answers: --data rows.jsonl")
        names = [name.strip() for name in request.arguments.metrics.split(",") if name.strip()]
        metrics = load_metrics(names, "--metrics")
        rows = request.arguments.data
        task = load_question_task("exact", request, title=rows, source=rows, option="--data")
        facts = {f"answers of {rows}": task.revision}
        return Loaded(partial(_measure, metrics, task), facts)

    def load_for_training(self, config: Config, tokenizer: "PreTrainedTokenizerBase") -> Measure:
        metrics = load_metrics(config.eval.metrics, "eval.metrics")
        task = training_question_task(config, tokenizer, config.eval.metric_rows)
        return partial(_measure_in_training, metrics, task)


class Compared(NamedTuple):
    """The result of metrics: figures, standard errors, and the texts that were compared."""

    figures: dict[str, Any]
    errors: dict[str, float]
    predictions: list[str]
    tokens: float  # per answer
    cut_share: float  # answers that did not end by themselves


def compare_answers(
    metrics: Sequence[Metric], task: QuestionTask, subject: Subject, *, with_errors: bool
) -> Compared:
    """Generate the answers, on all processes, and compute the metrics on the main one."""
    from accelerate.utils import broadcast_object_list

    answers = answers_to(task, subject)
    predictions = list(answers.texts)
    references = [question.answer for question in task.questions]
    # A program of the user's may give another result at each call: one process computes. The others
    # wait for its result, and raise its error, too.
    found: list[Any] = [None]
    if subject.accelerator.is_main_process:
        try:
            figures = compute_metrics(metrics, predictions, references)
            errors = standard_errors(metrics, predictions, references) if with_errors else {}
            found = [(figures, errors)]
        except UserError as error:
            found = [error]
    broadcast_object_list(found)
    if isinstance(found[0], UserError):
        raise found[0]
    figures, errors = found[0]
    completions = answers.completions
    tokens = completions.lengths.double().mean().item()
    cut_share = 1 - completions.ended.double().mean().item()
    return Compared(figures, errors, predictions, tokens, cut_share)


def _measure(metrics: Sequence[Metric], task: QuestionTask, subject: Subject) -> Iterator[Result]:
    compared = compare_answers(metrics, task, subject, with_errors=True)
    sampler = task.sampler
    way = f"temperature {sampler.temperature:g}" if sampler.temperature else "greedy"
    asked = f"{plural(len(task.questions), 'question')}, {way}"
    if task.left_out:
        asked += f" ({task.left_out:,} more leave no room for an answer, left out)"
    lines = [f"{subject.name} on {task.name}: {asked}"]
    # Lists, such as BLEU's precisions, are in the JSON only.
    numbers = numbers_of(compared.figures)
    for name, value in numbers.items():
        error = compared.errors.get(name, math.nan)
        lines.append(f"  {name:<14} {with_error(value, error, 4)}")
    cut = f"{compared.cut_share:.1%} cut at {sampler.max_new_tokens:,}"
    lines.append(f"  {compared.tokens:.1f} tokens per answer, {cut}")
    answers = [
        {"prompt": question.prompt, "answer": answer, "reference": question.answer}
        for question, answer in zip(task.questions, compared.predictions, strict=True)
    ]
    if not numbers:
        lines.append("  no figure is a single finite number; --json has all")
    figures = {
        "figures": compared.figures,
        "standard_errors": compared.errors,
        "data": task.name,
        "rows": len(answers),
        "rows_left_out": task.left_out,
        "temperature": sampler.temperature,
        "max_new_tokens": sampler.max_new_tokens,
        "resamples": RESAMPLES,
        "revision": task.revision,
        "answers": answers,
    }
    yield Result(lines, {"metrics": figures})


def _measure_in_training(
    metrics: Sequence[Metric], task: QuestionTask, subject: Subject
) -> Iterator[Result]:
    """Measure without standard errors, which would compute each metric a hundred times."""
    compared = compare_answers(metrics, task, subject, with_errors=False)
    numbers = numbers_of(compared.figures)
    shown = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
    # The prefix, since a metric may have the name of another figure of the run.
    figures = {f"metrics/{name}": value for name, value in numbers.items()}
    yield Result([f"  {plural(len(compared.predictions), 'held-out answer')}: {shown}"], figures)
