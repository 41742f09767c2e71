"""Load what an evaluation needs on every process: model, tokenizer, text, lm-eval tasks, questions, tasks of CORE."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.source import file_digest
from nanogpt_hf.data.tokenizer import Tokenizer, build_tokenizer, check_vocabulary
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation.core_bundle import CoreBundle, load_bundle
from nanogpt_hf.evaluation.corpus import Corpus, read_corpus
from nanogpt_hf.evaluation.questions import AnswerOptions, QuestionTask, load_question_tasks
from nanogpt_hf.evaluation.tasks import load_tasks
from nanogpt_hf.model.build import load_model


@dataclass(frozen=True)
class Evaluation:
    """A model, and the text or tasks to measure it on."""

    model: Any
    tokenizer: Tokenizer
    corpus: Corpus | None
    tasks: dict[str, Any] | None
    questions: list[QuestionTask]
    core: CoreBundle | None
    block_size: int
    stride: int


def load_evaluation(
    folder: str,
    text: DataSection | None,
    split: str | None,
    tasks: list[str],
    block_size: int | None,
    stride: int | None,
    *,
    questions: tuple[list[str], DataSection | None, AnswerOptions] | None = None,
    core: tuple[str, str | None, int | None] | None = None,
) -> tuple[Evaluation, dict[str, Any]]:
    """Everything that can fail for a user's mistake, and the facts that all processes must share.

    `questions` are the tasks, source and options of `load_question_tasks`, `core` the arguments of `load_bundle`.
    Raises UserError if anything given cannot be used.
    """
    bundle = load_bundle(*core) if core else None
    loaded_tasks = load_tasks(tasks) if tasks else None
    model, tokenizer = load_model(folder), build_tokenizer(folder, ())
    check_vocabulary(folder, tokenizer.vocab_size, model.config.vocab_size)
    facts: dict[str, Any] = {"model": {"name": folder, "sha256": weights_sha256(folder)}}
    positions = model.config.max_position_embeddings
    length: int = block_size or positions
    step = stride or length
    if length > positions:
        raise UserError(f"--block-size: {length} is more than the model's {positions} positions")
    if step > length:
        raise UserError(f"--stride: {step} is more than the block size {length}; tokens would be skipped")
    corpus = None
    if text:
        with tempfile.TemporaryDirectory() as scratch:
            corpus = read_corpus(text, split, tokenizer, Path(scratch))
        facts["tokens_sha256"] = corpus.stream.sha256()
    if bundle:
        facts["core_sha256"] = bundle.sha256
    asked = []
    if questions:
        names, source, options = questions
        asked = load_question_tasks(names, source, tokenizer.hf, positions, options)
        facts |= {f"questions of {task.name}": task.revision for task in asked}
    return Evaluation(model, tokenizer, corpus, loaded_tasks, asked, bundle, length, step), facts


def weights_sha256(folder: str) -> str | None:
    """The sha256 of model.safetensors, or of its shards in order; None for a model on the Hub."""
    files = sorted(Path(folder).glob("model*.safetensors")) if os.path.isdir(folder) else []
    return file_digest(files).removeprefix("sha256:") if files else None
