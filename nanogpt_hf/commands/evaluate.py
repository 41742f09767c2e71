"""Measure a model: loss, perplexity and bits a byte on text, and tasks through lm-eval.

Under `accelerate launch` the processes share the work; the answer is the same on any number of them.
"""

import argparse
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from nanogpt_hf.commands.arguments import add_model_argument, number
from nanogpt_hf.commands.console import show, shows_bars
from nanogpt_hf.commands.models import check_vocabulary
from nanogpt_hf.config.schema import KNOBS, DataSection
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import plural
from nanogpt_hf.runs.files import output_file, write_json
from nanogpt_hf.runs.find import find_model

_DATA_KNOBS = ("config", "split", "revision", "text_column", "sha256")  # what a source may need beside its name
_SPLIT = "split of a Hub data set, which must be named, or of prepared data (default there: validation)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--data", metavar="TEXT", help="python-docs, a file, folder, glob, URL, Hub data set, or prepared data"
    )
    parser.add_argument("--tasks", metavar="A,B", help="lm-eval tasks: names, patterns or YAML files, with commas")
    parser.add_argument(
        "--block-size", metavar="N", type=number(int, 1), help="tokens read at once (default: all of the model's)"
    )
    parser.add_argument(
        "--stride", metavar="N", type=number(int, 1), help="tokens from one window to the next (default: --block-size)"
    )
    parser.add_argument(
        "--batch-size", metavar="N", type=number(int, 1), default=8, help="windows in one forward pass; default 8"
    )
    parser.add_argument("--limit", metavar="N", type=number(int, 1), help="questions of each task, the first N")
    parser.add_argument(
        "--output", metavar="FILE", type=output_file, help="write all figures and the protocol as JSON; - is stdout"
    )
    meanings = {name: KNOBS[f"data.{name}"].meaning for name in _DATA_KNOBS} | {"split": _SPLIT}
    parser.epilog = "Of the text:\n\n" + "\n".join(f"  --data.{name:<15} {m}" for name, m in meanings.items())


def _check(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> tuple[list[str], dict[str, str]]:
    """The tasks, and what is said of the text. Raises UserError for what cannot be meant, before anything is loaded."""
    knobs = {}
    for key, value in overrides:
        section, _, name = key.partition(".")
        if section != "data" or name not in _DATA_KNOBS:
            known = ", ".join(f"--data.{name}" for name in _DATA_KNOBS)
            raise UserError(f"cli.py evaluate: --{key}: not a knob of evaluating; it has {known}")
        knobs[name] = value
    tasks = [name.strip() for name in (arguments.tasks or "").split(",") if name.strip()]
    if not arguments.data and not tasks:
        raise UserError("cli.py evaluate: nothing to measure: give --data TEXT, --tasks A,B or both")
    if knobs and not arguments.data:
        raise UserError(f"--data.{next(iter(knobs))}: says something of a text; give --data, too")
    if arguments.limit and not tasks:
        raise UserError("--limit: is of --tasks; a text is measured whole")
    for name in ("block_size", "stride"):
        if getattr(arguments, name) and not arguments.data:
            raise UserError(f"--{name.replace('_', '-')}: is of --data; a task has its own")
    return tasks, knobs


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    tasks, knobs = _check(arguments, overrides)

    import datasets
    from transformers.utils import logging

    from nanogpt_hf.data.tokenizer import build_tokenizer
    from nanogpt_hf.distributed.accelerator import build_evaluation_accelerator, describe_machine
    from nanogpt_hf.distributed.mesh import Mesh
    from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process, prepare_on_all_ranks
    from nanogpt_hf.evaluation.corpus import Corpus, read_corpus
    from nanogpt_hf.evaluation.loss import evaluate_text
    from nanogpt_hf.evaluation.tasks import load_tasks, run_tasks
    from nanogpt_hf.model.build import load_model

    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    folder = find_model(arguments.model)
    got: dict[str, Any] = {}

    def get_ready() -> dict[str, Any]:
        """Everything that a mistake can stop; what all processes must have alike."""
        got["tasks"] = load_tasks(tasks) if tasks else None
        got["model"] = model = load_model(folder)
        got["tokenizer"] = tokenizer = build_tokenizer(folder, ())
        check_vocabulary(folder, tokenizer.vocab_size, model.config.vocab_size)
        facts = {"model": {"name": folder, "sha256": weights_sha256(folder)}}
        if arguments.data:
            most = model.config.max_position_embeddings
            got["block_size"] = arguments.block_size or most
            got["stride"] = arguments.stride or got["block_size"]
            if got["block_size"] > most:
                raise UserError(f"--block-size: {arguments.block_size} is more than the model's {most} positions")
            if got["stride"] > got["block_size"]:
                raise UserError(
                    f"--stride: {got['stride']} is more than the block size {got['block_size']}; some would be skipped"
                )
            split = knobs.pop("split", None)
            data = DataSection(source=arguments.data, **knobs)
            with tempfile.TemporaryDirectory() as scratch:
                got["corpus"] = read_corpus(data, split, tokenizer, Path(scratch))
            facts["tokens_sha256"] = got["corpus"].stream.sha256()
        return facts

    facts = prepare_on_all_ranks(get_ready)
    with one_line_for_a_lost_process():
        accelerator = build_evaluation_accelerator()
        model = got["model"].to(accelerator.device)
        results = {
            "model": facts["model"],
            "machine": describe_machine(accelerator),
            "versions": _versions(bool(tasks)),
        }

        def say(text: str) -> None:
            if accelerator.is_main_process:
                show(text)

        if arguments.data:
            corpus: Corpus = got["corpus"]
            say(
                f"{folder} on {corpus.name}: {plural(corpus.documents, 'document')}, "
                f"{len(corpus.stream):,} tokens, {corpus.bytes:,} bytes"
            )
            with _bar(accelerator.is_main_process) as bar:
                measured = evaluate_text(
                    accelerator,
                    Mesh.from_environment(),
                    model,
                    corpus,
                    block_size=got["block_size"],
                    stride=got["stride"],
                    batch_size=arguments.batch_size,
                    progress=bar,
                )
            if not math.isfinite(measured.loss):
                say(f"  the loss is not finite ({measured.loss}): the model's training diverged, or it is damaged")
            least = got["block_size"] - got["stride"] + 1
            say(
                f"  loss           {_figure(measured.loss, measured.loss_error, 4)} nats a token\n"
                f"  perplexity     {_figure(measured.perplexity, measured.perplexity_error, 2)}\n"
                f"  bits per byte  {_figure(measured.bits_per_byte, measured.bits_per_byte_error, 4)}\n"
                f"  over {plural(measured.windows, 'window')} of {got['block_size']:,} tokens, stride "
                f"{got['stride']:,}: {measured.tokens:,} tokens, each predicted once, from at least {least:,} before "
                "it or all there are"
            )
            results["text"] = measured.figures() | {
                "documents": corpus.documents,
                "tokens": len(corpus.stream),
                "bytes": corpus.bytes,
                "data": corpus.name,
                "data_revision": corpus.revision,
                "tokens_sha256": facts["tokens_sha256"],
                "block_size": got["block_size"],
                "stride": got["stride"],
                "protocol": "documents joined by end-of-text; the first token is not predicted; bootstrap over windows",
            }
        if tasks:
            answers = run_tasks(
                accelerator,
                model,
                got["tokenizer"].hf,
                got["tasks"],
                batch_size=arguments.batch_size,
                limit=arguments.limit,
                show_progress=shows_bars(),
            )
            for name, metrics in answers.items():
                say(f"{folder} on task {name}" + (f", first {arguments.limit} questions" if arguments.limit else ""))
                for metric, value in metrics.items():
                    if not metric.endswith("_stderr"):
                        say(f"  {metric:<14} {_figure(value, metrics.get(f'{metric}_stderr', math.nan), 4)}")
            results["tasks"], results["tasks_limit"] = answers, arguments.limit
    if arguments.output and accelerator.is_main_process:
        write_json(arguments.output, results)
        show(f"written: {arguments.output}")


def weights_sha256(folder: str) -> str | None:
    """The sha256 of model.safetensors; of several such files, of them in order; None for a model on the Hub."""
    from nanogpt_hf.data.source import file_digest

    files = sorted(Path(folder).glob("model*.safetensors")) if os.path.isdir(folder) else []
    return file_digest(files).removeprefix("sha256:") if files else None


def _versions(tasks: bool) -> dict[str, str]:
    from importlib.metadata import version

    from nanogpt_hf.runs.machine import versions

    return versions() | ({"lm_eval": version("lm_eval")} if tasks else {})


def _figure(value: float, error: float, digits: int) -> str:
    """3.1234 ± 0.0045"""
    from nanogpt_hf.formatting import format_number

    return format_number(value, digits) + (f" ± {format_number(error, digits)}" if math.isfinite(error) else "")


class _bar:  # noqa: N801  (used as a function)
    """A live bar of windows on the main process's terminal, nothing elsewhere; call it with the windows done."""

    def __init__(self, main: bool):
        from tqdm import tqdm

        self._bar = tqdm(unit="window", disable=not (main and shows_bars()), leave=False)

    def __enter__(self) -> "_bar":
        return self

    def __call__(self, windows: int) -> None:
        self._bar.update(windows)

    def __exit__(self, *error: object) -> None:
        self._bar.close()
