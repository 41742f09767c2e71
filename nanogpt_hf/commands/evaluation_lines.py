"""What `evaluate` prints and writes: lines for the console, and figures for JSON."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from nanogpt_hf.formatting import format_number, plural

if TYPE_CHECKING:
    from nanogpt_hf.evaluation.core import CoreTaskScore
    from nanogpt_hf.evaluation.core_bundle import CoreBundle
    from nanogpt_hf.evaluation.corpus import Corpus
    from nanogpt_hf.evaluation.load import Evaluation
    from nanogpt_hf.evaluation.loss import TextEvaluation
    from nanogpt_hf.evaluation.questions import AnswerScores, QuestionTask


def text_lines(evaluation: "Evaluation", measured: "TextEvaluation") -> list[str]:
    lines = [
        f"  loss           {_figure(measured.loss, measured.loss_error, 4)} nats per token",
        f"  perplexity     {_figure(measured.perplexity, measured.perplexity_error, 2)}",
        f"  bits per byte  {_figure(measured.bits_per_byte, measured.bits_per_byte_error, 4)}",
        f"  {plural(measured.windows, 'window')} of {evaluation.block_size:,} tokens, stride {evaluation.stride:,}: "
        f"{measured.tokens:,} tokens, each predicted once, from at least "
        f"{evaluation.block_size - evaluation.stride + 1:,} before it, or from all at the start of the text",
    ]
    if not math.isfinite(measured.loss):
        lines.insert(0, f"  the loss is not finite ({measured.loss}): the model's training diverged, or it is damaged")
    return lines


def text_results(
    evaluation: "Evaluation", corpus: "Corpus", measured: "TextEvaluation", tokens_sha256: str
) -> dict[str, Any]:
    return measured.figures() | {
        "documents": corpus.documents,
        "tokens": len(corpus.stream),
        "bytes": corpus.bytes,
        "data": corpus.name,
        "data_revision": corpus.revision,
        "tokens_sha256": tokens_sha256,
        "block_size": evaluation.block_size,
        "stride": evaluation.stride,
        "protocol": "documents joined by end-of-text; the first token is not predicted; bootstrap over windows",
    }


def task_lines(folder: str, scores: dict[str, dict[str, Any]], limit: int | None) -> list[str]:
    lines = []
    for name, metrics in scores.items():
        lines.append(f"{folder} on task {name}" + (f", first {limit} questions" if limit else ""))
        for metric, value in metrics.items():
            if not metric.endswith("_stderr"):
                lines.append(f"  {metric:<14} {_figure(value, metrics.get(f'{metric}_stderr', math.nan), 4)}")
    return lines


def core_lines(folder: str, bundle: "CoreBundle", scores: list["CoreTaskScore"]) -> list[str]:
    """The line of the newest score, with a title before the first one and the CORE score after the last one."""
    from nanogpt_hf.evaluation.core import GPT2_SCORE, core_score

    score, lines = scores[-1], []
    if len(scores) == 1:
        lines.append(f"{folder} on CORE, {plural(len(bundle.tasks), 'task')} of {bundle.name}")
    width = max(len(task.label) for task in bundle.tasks)
    lines.append(
        f"  {score.label:<{width}}  {score.num_fewshot:>2} examples  accuracy {score.accuracy:.4f}  "
        f"centred {score.centred:7.4f}  {plural(score.questions, 'question')}"
    )
    if len(scores) == len(bundle.tasks):
        lines.append(f"  CORE {core_score(scores):.4f}  (GPT-2 1.6B on DCLM's 22 tasks: {GPT2_SCORE:.4f})")
    return lines


def core_results(bundle: "CoreBundle", scores: list["CoreTaskScore"]) -> dict[str, Any]:
    from nanogpt_hf.evaluation.core import core_score

    tasks = {score.label: dataclasses.asdict(score) for score in scores}
    return {"score": core_score(scores), "tasks": tasks, "bundle": bundle.name, "bundle_sha256": bundle.sha256}


def _figure(value: float, error: float, digits: int) -> str:
    """3.1234 ± 0.0045"""
    return format_number(value, digits) + (f" ± {format_number(error, digits)}" if math.isfinite(error) else "")


def answer_lines(folder: str, task: "QuestionTask", scores: "AnswerScores") -> list[str]:
    """pass@k with standard errors, and the length of answers."""
    sampler, values = task.sampler, scores.values
    asked = f"{plural(len(task.questions), 'question')}, {plural(task.samples, 'answer')} each"
    lines = [f"{folder} on {task.name}: {asked}, temperature {sampler.temperature:g}"]
    lines += [f"  {name:<14} {_figure(values[name], error, 4)}" for name, error in scores.errors.items()]
    cut = f"{values['cut_share']:.1%} cut at {sampler.max_new_tokens:,}"
    return [*lines, f"  {values['answer_tokens']:.1f} tokens per answer, {cut}"]


def answer_results(task: "QuestionTask", scores: "AnswerScores") -> dict[str, Any]:
    sampler = task.sampler
    errors = {f"{name}_stderr": error if math.isfinite(error) else None for name, error in scores.errors.items()}
    return {
        **scores.values,
        **errors,
        "questions": len(task.questions),
        "samples": task.samples,
        "temperature": sampler.temperature,
        "max_new_tokens": sampler.max_new_tokens,
        "revision": task.revision,
    }
