"""Measure a model: loss and bits per byte on a text, lm-eval's tasks, pass@k of its answers, and the CORE score.

Under `accelerate launch` the processes share the work; the results do not depend on their number.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanogpt_hf.commands.arguments import add_model_argument, number
from nanogpt_hf.commands.console import show
from nanogpt_hf.commands.evaluation_lines import (
    answer_lines,
    answer_results,
    core_lines,
    core_results,
    task_lines,
    text_lines,
    text_results,
)
from nanogpt_hf.config.schema import KNOBS, DataSection
from nanogpt_hf.data.progress import shows_bars
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import plural
from nanogpt_hf.runs.files import output_file, write_json
from nanogpt_hf.runs.find import find_model

if TYPE_CHECKING:
    from accelerate import Accelerator

    from nanogpt_hf.distributed.mesh import Mesh
    from nanogpt_hf.evaluation.load import Evaluation
    from nanogpt_hf.evaluation.questions import AnswerOptions

QUESTIONS = "rl:"  # prefix of the tasks of the `rl` command; lm-eval has some of the same names
_DATA_KNOBS = ("config", "split", "revision", "text_column", "sha256")  # that a source may need
_SPLIT = "split of a Hub data set, which must be named, or of prepared data (default there: validation)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--data", metavar="TEXT", help="python-docs, a file, folder, glob, URL, Hub data set, or prepared data"
    )
    parser.add_argument(
        "--tasks",
        metavar="A,B",
        help="lm-eval tasks: names, patterns or YAML files; or rl:NAME, a task of the `rl` command, for pass@k",
    )
    parser.add_argument("--questions", metavar="ROWS", help="questions of rl:gsm8k and others: as --data")
    parser.add_argument("--samples", metavar="K", type=number(int, 1), help="rl: answers to each question (default 1)")
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=number(float, 0),
        help="rl: default 0 for one answer, 1 for several",
    )
    parser.add_argument(
        "--max-new-tokens", metavar="N", type=number(int, 1), help="rl: tokens of an answer (default: at most 256)"
    )
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
    parser.add_argument("--limit", metavar="N", type=number(int, 1), help="questions of each task")
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
    if knobs and not (arguments.data or arguments.questions):
        raise UserError(f"--data.{next(iter(knobs))}: describes a text or questions; give --data or --questions too")
    if knobs and arguments.data and arguments.questions:
        raise UserError(f"--data.{next(iter(knobs))}: would describe --data and --questions; measure them in two calls")
    sampled = any(name.startswith(QUESTIONS) for name in tasks)
    for name in ("questions", "samples", "temperature", "max_new_tokens"):
        if getattr(arguments, name) is not None and not sampled:
            raise UserError(f"--{name.replace('_', '-')}: applies to tasks such as --tasks {QUESTIONS}arithmetic")
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
    lm_eval = [name for name in tasks if not name.startswith(QUESTIONS)]

    import datasets
    from transformers.utils import logging

    from nanogpt_hf.distributed.accelerator import build_evaluation_accelerator, describe_machine
    from nanogpt_hf.distributed.mesh import Mesh
    from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process, prepare_on_all_ranks
    from nanogpt_hf.evaluation.load import load_evaluation
    from nanogpt_hf.runs.machine import versions

    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    folder, split = find_model(arguments.model), knobs.pop("split", None)
    text = DataSection(source=arguments.data, **knobs) if arguments.data else None
    questions = _questions(arguments, tasks, knobs | ({"split": split} if split else {}))
    core = (arguments.core, arguments.core_sha256, arguments.limit) if arguments.core else None
    sizes = (arguments.block_size, arguments.stride)
    evaluation, facts = prepare_on_all_ranks(
        lambda: load_evaluation(folder, text, split, lm_eval, *sizes, questions=questions, core=core)
    )
    with one_line_for_a_lost_process():
        accelerator = build_evaluation_accelerator()
        evaluation.model.to(accelerator.device)
        results: dict[str, Any] = {
            "model": facts["model"],
            "machine": describe_machine(accelerator),
            "versions": versions() | (_lm_eval_version() if lm_eval else {}),
        }
        measurement = _Measurement(folder, arguments, evaluation, accelerator, Mesh.from_environment())
        results |= measurement.text(facts) | measurement.tasks() | measurement.answers() | measurement.core()
    if arguments.output and accelerator.is_main_process:
        write_json(arguments.output, results)
        show(f"written: {arguments.output}")


def _questions(
    arguments: argparse.Namespace, tasks: list[str], knobs: dict[str, Any]
) -> "tuple[list[str], DataSection | None, AnswerOptions] | None":
    """The tasks rl:NAME, their source and how answers are sampled."""
    names = [name for name in tasks if name.startswith(QUESTIONS)]
    if not names:
        return None
    from nanogpt_hf.evaluation.questions import AnswerOptions

    data = DataSection(source=arguments.questions, format="chat", **knobs) if arguments.questions else None
    samples = arguments.samples or 1
    temperature = arguments.temperature if arguments.temperature is not None else float(samples > 1)
    options = AnswerOptions(
        samples, temperature, arguments.max_new_tokens, batch_size=arguments.batch_size, limit=arguments.limit
    )
    return names, data, options


@dataclass(frozen=True)
class _Measurement:
    """What is measured, one method for each kind; the main process prints, and all return the figures for JSON."""

    folder: str
    arguments: argparse.Namespace
    evaluation: "Evaluation"
    accelerator: "Accelerator"
    mesh: "Mesh"

    def text(self, facts: dict[str, Any]) -> dict[str, Any]:
        corpus = self.evaluation.corpus
        if corpus is None:
            return {}
        from nanogpt_hf.evaluation.loss import evaluate_text

        size = f"{len(corpus.stream):,} tokens, {corpus.bytes:,} bytes"
        self._print([f"{self.folder} on {corpus.name}: {plural(corpus.documents, 'document')}, {size}"])
        with self._bar("window") as progress:
            measured = evaluate_text(
                self.accelerator,
                self.mesh,
                self.evaluation.model,
                corpus,
                block_size=self.evaluation.block_size,
                stride=self.evaluation.stride,
                batch_size=self.arguments.batch_size,
                progress=progress,
            )
        self._print(text_lines(self.evaluation, measured))
        return {"text": text_results(self.evaluation, corpus, measured, facts["tokens_sha256"])}

    def tasks(self) -> dict[str, Any]:
        if self.evaluation.tasks is None:
            return {}
        from nanogpt_hf.evaluation.tasks import run_tasks

        scores = run_tasks(
            self.accelerator,
            self.evaluation.model,
            self.evaluation.tokenizer.hf,
            self.evaluation.tasks,
            batch_size=self.arguments.batch_size,
            limit=self.arguments.limit,
            show_progress=shows_bars(),
        )
        self._print(task_lines(self.folder, scores, self.arguments.limit))
        return {"tasks": scores, "tasks_limit": self.arguments.limit}

    def answers(self) -> dict[str, Any]:
        results = {}
        for task in self.evaluation.questions:
            from nanogpt_hf.evaluation.questions import evaluate_questions

            with self._bar("question", len(task.questions), task.name) as progress:
                scores = evaluate_questions(self.accelerator, self.mesh, self.evaluation.model, task, progress=progress)
            self._print(answer_lines(self.folder, task, scores))
            results[task.name] = answer_results(task, scores)
        return {"answers": results} if results else {}

    def core(self) -> dict[str, Any]:
        bundle = self.evaluation.core
        if bundle is None:
            return {}
        from nanogpt_hf.evaluation.core import evaluate_core_task

        scores = []
        for task in bundle.tasks:
            with self._bar("question", len(task.questions), task.label) as progress:
                scores.append(
                    evaluate_core_task(
                        self.accelerator,
                        self.mesh,
                        self.evaluation.model,
                        self.evaluation.tokenizer,
                        task,
                        batch_size=self.arguments.batch_size,
                        progress=progress,
                    )
                )
            self._print(core_lines(self.folder, bundle, scores))
        return {"core": core_results(bundle, scores)}

    def _print(self, lines: list[str]) -> None:
        if self.accelerator.is_main_process:
            show(*lines, sep="\n")

    @contextmanager
    def _bar(self, unit: str, total: int | None = None, title: str = "") -> Iterator[Callable[[int], Any]]:
        """A live bar on the main process's terminal; yields its update function."""
        from tqdm import tqdm

        hidden = not (self.accelerator.is_main_process and shows_bars())
        with tqdm(desc=title, total=total, unit=unit, disable=hidden, leave=False) as bar:
            yield bar.update


def _lm_eval_version() -> dict[str, str]:
    from importlib.metadata import version

    return {"lm_eval": version("lm_eval")}
