"""Measure a model: loss, perplexity and bits per byte on a text, tasks by lm-eval, and the CORE score.

Under `accelerate launch` the processes share the work; the results do not depend on their number.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nanogpt_hf.commands.arguments import add_model_argument, number
from nanogpt_hf.commands.console import show
from nanogpt_hf.config.schema import KNOBS, DataSection
from nanogpt_hf.data.progress import shows_bars
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import format_number, plural
from nanogpt_hf.runs.files import output_file, write_json
from nanogpt_hf.runs.find import find_model

if TYPE_CHECKING:
    from nanogpt_hf.evaluation.core import CoreTaskScore
    from nanogpt_hf.evaluation.core_bundle import CoreBundle
    from nanogpt_hf.evaluation.corpus import Corpus
    from nanogpt_hf.evaluation.load import Evaluation
    from nanogpt_hf.evaluation.loss import TextEvaluation

_DATA_KNOBS = ("config", "split", "revision", "text_column", "sha256")  # that a source may need
_SPLIT = "split of a Hub data set, which must be named, or of prepared data (default there: validation)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--data", metavar="TEXT", help="python-docs, a file, folder, glob, URL, Hub data set, or prepared data"
    )
    parser.add_argument("--tasks", metavar="A,B", help="lm-eval tasks: names, patterns or YAML files, with commas")
    parser.add_argument(
        "--core", metavar="BUNDLE", help="the CORE score: a folder with core.yaml, or the URL of such a folder as a zip"
    )
    parser.add_argument("--core-sha256", metavar="HEX", help="expected sha256 of the zip at a URL")
    parser.add_argument(
        "--block-size", metavar="N", type=number(int, 1), help="tokens read at once (default: all of the model's)"
    )
    parser.add_argument(
        "--stride", metavar="N", type=number(int, 1), help="tokens from one window to the next (default: --block-size)"
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=number(int, 1), default=8, help="texts in one forward pass; default 8"
    )
    parser.add_argument(
        "--limit", metavar="N", type=number(int, 1), help="questions of each task; of CORE drawn by seed"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=output_file, help="write all figures and the protocol as JSON; - is stdout"
    )
    meanings = {name: KNOBS[f"data.{name}"].meaning for name in _DATA_KNOBS} | {"split": _SPLIT}
    parser.epilog = "Options of the text:\n\n" + "\n".join(f"  --data.{name:<15} {m}" for name, m in meanings.items())


def _check(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> tuple[list[str], dict[str, Any]]:
    """The tasks, and the knobs of the text. Raises UserError for options that do not fit, before anything is loaded."""
    knobs: dict[str, Any] = {}
    for key, value in overrides:
        section, _, name = key.partition(".")
        if section != "data" or name not in _DATA_KNOBS:
            known = ", ".join(f"--data.{name}" for name in _DATA_KNOBS)
            raise UserError(f"cli.py evaluate: --{key}: not a knob of `evaluate`, which has {known}")
        knobs[name] = value
    tasks = [name.strip() for name in (arguments.tasks or "").split(",") if name.strip()]
    if not (arguments.data or tasks or arguments.core):
        raise UserError(
            "cli.py evaluate: give a text (--data TEXT), tasks (--tasks A,B), or the CORE score (--core BUNDLE)"
        )
    if knobs and not arguments.data:
        raise UserError(f"--data.{next(iter(knobs))}: describes a text; give --data too")
    if arguments.limit and not (tasks or arguments.core):
        raise UserError("--limit: applies to --tasks and --core; a text is always measured whole")
    if arguments.core_sha256 and not arguments.core:
        raise UserError("--core-sha256: checks the download of a bundle; give --core too")
    for name in ("block_size", "stride"):
        if getattr(arguments, name) and not arguments.data:
            raise UserError(f"--{name.replace('_', '-')}: applies to --data; a task has its own")
    return tasks, knobs


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    tasks, knobs = _check(arguments, overrides)

    import datasets
    from transformers.utils import logging

    from nanogpt_hf.distributed.accelerator import build_evaluation_accelerator, describe_machine
    from nanogpt_hf.distributed.mesh import Mesh
    from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process, prepare_on_all_ranks
    from nanogpt_hf.evaluation.core import evaluate_core_task
    from nanogpt_hf.evaluation.load import load_evaluation
    from nanogpt_hf.evaluation.loss import evaluate_text
    from nanogpt_hf.evaluation.tasks import run_tasks
    from nanogpt_hf.runs.machine import versions

    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    folder, split = find_model(arguments.model), knobs.pop("split", None)
    text = DataSection(source=arguments.data, **knobs) if arguments.data else None
    evaluation, facts = prepare_on_all_ranks(
        lambda: load_evaluation(
            folder, text, split, tasks, arguments.block_size, arguments.stride, core=_core_arguments(arguments)
        )
    )
    with one_line_for_a_lost_process():
        accelerator = build_evaluation_accelerator()
        model = evaluation.model.to(accelerator.device)
        results: dict[str, Any] = {
            "model": facts["model"],
            "machine": describe_machine(accelerator),
            "versions": versions() | (_lm_eval_version() if tasks else {}),
        }
        if corpus := evaluation.corpus:
            if accelerator.is_main_process:
                size = f"{len(corpus.stream):,} tokens, {corpus.bytes:,} bytes"
                show(f"{folder} on {corpus.name}: {plural(corpus.documents, 'document')}, {size}")
            with _bar(accelerator.is_main_process, "window") as progress:
                measured = evaluate_text(
                    accelerator,
                    Mesh.from_environment(),
                    model,
                    corpus,
                    block_size=evaluation.block_size,
                    stride=evaluation.stride,
                    batch_size=arguments.batch_size,
                    progress=progress,
                )
            if accelerator.is_main_process:
                show(*_text_lines(evaluation, measured), sep="\n")
            results["text"] = _text_results(evaluation, corpus, measured, facts["tokens_sha256"])
        if evaluation.tasks:
            scores = run_tasks(
                accelerator,
                model,
                evaluation.tokenizer.hf,
                evaluation.tasks,
                batch_size=arguments.batch_size,
                limit=arguments.limit,
                show_progress=shows_bars(),
            )
            if accelerator.is_main_process:
                show(*_task_lines(folder, scores, arguments.limit), sep="\n")
            results["tasks"], results["tasks_limit"] = scores, arguments.limit
        if bundle := evaluation.core:
            scores = []
            for task in bundle.tasks:
                with _bar(accelerator.is_main_process, "question", len(task.questions), task.label) as progress:
                    scores.append(
                        evaluate_core_task(
                            accelerator,
                            Mesh.from_environment(),
                            model,
                            evaluation.tokenizer,
                            task,
                            batch_size=arguments.batch_size,
                            progress=progress,
                        )
                    )
                if accelerator.is_main_process:
                    show(*_core_lines(folder, bundle, scores), sep="\n")
            results["core"] = _core_results(bundle, scores)
    if arguments.output and accelerator.is_main_process:
        write_json(arguments.output, results)
        show(f"written: {arguments.output}")


def _text_lines(evaluation: "Evaluation", measured: "TextEvaluation") -> list[str]:
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


def _text_results(
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


def _task_lines(folder: str, scores: dict[str, dict[str, Any]], limit: int | None) -> list[str]:
    lines = []
    for name, metrics in scores.items():
        lines.append(f"{folder} on task {name}" + (f", first {limit} questions" if limit else ""))
        for metric, value in metrics.items():
            if not metric.endswith("_stderr"):
                lines.append(f"  {metric:<14} {_figure(value, metrics.get(f'{metric}_stderr', math.nan), 4)}")
    return lines


def _core_arguments(arguments: argparse.Namespace) -> tuple[str, str | None, int | None] | None:
    return (arguments.core, arguments.core_sha256, arguments.limit) if arguments.core else None


def _core_lines(folder: str, bundle: "CoreBundle", scores: list["CoreTaskScore"]) -> list[str]:
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


def _core_results(bundle: "CoreBundle", scores: list["CoreTaskScore"]) -> dict[str, Any]:
    from nanogpt_hf.evaluation.core import core_score

    tasks = {score.label: dataclasses.asdict(score) for score in scores}
    return {"score": core_score(scores), "tasks": tasks, "bundle": bundle.name, "bundle_sha256": bundle.sha256}


def _figure(value: float, error: float, digits: int) -> str:
    """3.1234 ± 0.0045"""
    return format_number(value, digits) + (f" ± {format_number(error, digits)}" if math.isfinite(error) else "")


def _lm_eval_version() -> dict[str, str]:
    from importlib.metadata import version

    return {"lm_eval": version("lm_eval")}


@contextmanager
def _bar(main_process: bool, unit: str, total: int | None = None, title: str = "") -> Iterator[Callable[[int], Any]]:
    """A live bar on the main process's terminal; yields its update function."""
    from tqdm import tqdm

    with tqdm(desc=title, total=total, unit=unit, disable=not (main_process and shows_bars()), leave=False) as bar:
        yield bar.update
