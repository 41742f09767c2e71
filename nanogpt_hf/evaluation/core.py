"""The CORE score: accuracy in 22 tasks above that of guessing (DataComp-LM, arXiv:2406.11794), as
nanochat computes it: `evaluate --core BUNDLE`.

Each question follows solved examples of its task. Of several options the model chooses the one
with the smallest mean loss per token: of the choices after the same question (multiple_choice),
or of the same continuation after each context (schema). A text to continue (language_modeling)
counts if each token of the continuation is the most probable one.
"""

import csv
import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from nanogpt_hf.errors import DataError, one_line
from nanogpt_hf.evaluation.base import LIMIT, Evaluation, Loaded, Option, Request, Result, Subject
from nanogpt_hf.evaluation.tasks import prefix_token_id
from nanogpt_hf.formatting import plural

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nanogpt_hf.data.tokenizer import Tokenizer

_GPT2_SCORE = 0.256525  # GPT-2 1.6B's, as stated by nanochat's README
_EXAMPLE_SEED = 1234  # nanochat's; the number of the question is added
_SHUFFLE_SEED = 1337  # nanochat's, so that --limit takes the same questions


class CoreScore(Evaluation):
    asked_by = "--core BUNDLE"
    options = (Option(asked_by, "compute the CORE score: a folder with core.yaml"), LIMIT)

    def load(self, request: Request) -> Loaded:
        arguments = request.arguments
        tasks, digest = load_bundle(arguments.core, arguments.limit)
        facts = {"core_sha256": digest}
        measure = partial(_measure, arguments.core, tasks, digest, request.tokenizer)
        return Loaded(measure, facts)


class CoreTask(NamedTuple):
    """A task of CORE."""

    label: str
    kind: str  # multiple_choice, schema or language_modeling
    num_fewshot: int  # solved examples that precede each question
    delimiter: str  # between context and continuation
    baseline: float  # the accuracy of guessing
    # contexts, each with its continuation, and the number of the right one
    questions: list[tuple[list[tuple[str, str]], int]]


# The options of a question by the type of its task.
_OPTIONS: dict[str, Callable[[dict[str, Any]], list[tuple[str, str]]]] = {
    "multiple_choice": lambda row: [(row["query"], choice) for choice in row["choices"]],
    "schema": lambda row: [(context, row["continuation"]) for context in row["context_options"]],
    "language_modeling": lambda row: [(row["context"].strip(), row["continuation"])],
}


def load_bundle(source: str, limit: int | None = None) -> tuple[list[CoreTask], str]:
    """The tasks of a bundle, core.yaml, eval_meta_data.csv and eval_data/*.jsonl in a folder, at
    most `limit` questions of each, and the sha256 of the files.

    Raises DataError, one line, if there is no such bundle, or a file cannot be read.
    """
    from nanogpt_hf.data.files import file_digest

    path = Path(os.path.expanduser(source))
    try:
        tasks, files = _read(path, limit)
        digest = file_digest(files)
    except Exception as error:  # csv, yaml and json raise many types
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise DataError(f"--core: {source}: no bundle of CORE: {reason}") from None
    for task in tasks:
        if len(task.questions) <= task.num_fewshot:
            raise DataError(
                f"--limit: {task.label}: {task.num_fewshot} solved examples precede each "
                f"question; there must be more questions than {len(task.questions)}"
            )
    return tasks, digest


def _read(folder: Path, limit: int | None) -> tuple[list[CoreTask], list[Path]]:
    """The tasks of a folder, and their files."""
    tasks, files = [], [folder / "core.yaml", folder / "eval_meta_data.csv"]
    with files[1].open(encoding="utf-8", newline="") as file:
        baselines = {
            row["Eval Task"]: 0.01 * float(row["Random baseline"]) for row in csv.DictReader(file)
        }
    for entry in yaml.safe_load(files[0].read_text(encoding="utf-8"))["icl_tasks"]:
        files.append(folder / "eval_data" / entry["dataset_uri"])
        label, kind, shots = entry["label"], entry["icl_task_type"], entry["num_fewshot"][0]
        with files[-1].open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        questions = [(_OPTIONS[kind](row), row.get("gold", 0)) for row in rows]
        random.Random(_SHUFFLE_SEED).shuffle(questions)  # in nanochat's order
        delimiter = entry.get("continuation_delimiter", " ")
        tasks.append(CoreTask(label, kind, shots, delimiter, baselines[label], questions[:limit]))
    return tasks, files


def _measure(
    name: str, tasks: list[CoreTask], digest: str, tokenizer: "Tokenizer", subject: Subject
) -> Iterator[Result]:
    yield Result([f"{subject.name} on CORE, {plural(len(tasks), 'task')} of {name}"])
    width = max(len(task.label) for task in tasks)
    scores = {}
    for task in tasks:
        score = scores[task.label] = _score_task(subject, tokenizer, task)
        line = f"  {task.label:<{width}}  {task.num_fewshot:>2} examples  accuracy "
        line += f"{score['accuracy']:.4f}  centered {score['centered']:7.4f}  "
        yield Result([line + plural(len(task.questions), "question")])
    mean = sum(score["centered"] for score in scores.values()) / len(scores)
    figures = {"score": mean, "tasks": scores, "bundle": name, "bundle_sha256": digest}
    line = f"  CORE {mean:.4f}  (GPT-2 1.6B on DCLM's 22 tasks: {_GPT2_SCORE:.4f})"
    yield Result([line], {"core": figures})


def _score_task(subject: Subject, tokenizer: "Tokenizer", task: CoreTask) -> dict[str, Any]:
    """The accuracy in a task of a model that is whole on every process, and how much of the way
    from guessing to all questions that is.

    The processes share the questions, and the texts of a question are one batch: so all digits of
    the result are the same on any number of processes.
    """
    import torch

    from nanogpt_hf.distributed.accelerator import sum_over_ranks
    from nanogpt_hf.evaluation.loss import eval_mode

    mesh, accelerator, model = subject.mesh, subject.accelerator, subject.model
    count, right = len(task.questions), 0
    with (
        subject.bar("question", count, task.label) as progress,
        torch.no_grad(),
        eval_mode(model),
        accelerator.autocast(),
    ):
        for number in range(mesh.dp_rank, count, mesh.dp_size):
            texts = _scored_texts(task, number, tokenizer, model.config.max_position_embeddings)
            values = _score(model, task.kind, texts)
            is_best = values.index(min(values)) == task.questions[number][1]
            right += values[0] if task.kind == "language_modeling" else is_best
            progress(min(mesh.dp_size, count - number))
    total = sum_over_ranks(accelerator, torch.tensor(right, device=accelerator.device))
    accuracy = total.item() / count
    return {
        "kind": task.kind,
        "num_fewshot": task.num_fewshot,
        "questions": count,
        "accuracy": accuracy,
        "centered": (accuracy - task.baseline) / (1 - task.baseline),
    }


def _prompts(task: CoreTask, number: int) -> list[str]:
    """The texts of a question, one per option; of language_modeling also, as the first, the one
    without an answer.
    """
    others = range(len(task.questions) - 1)
    examples = ""
    for other in random.Random(_EXAMPLE_SEED + number).sample(others, task.num_fewshot):
        options, gold = task.questions[other + (other >= number)]
        context, continuation = options[gold]
        examples += f"{context}{task.delimiter}{continuation}\n\n"
    options, _ = task.questions[number]
    texts = [
        f"{examples}{context}{task.delimiter}{continuation}" for context, continuation in options
    ]
    if task.kind == "language_modeling":
        # the white space before an answer is usually a part of the answer's first token
        texts.insert(0, f"{examples}{options[0][0]}{task.delimiter}".strip())
    return texts


def _scored_texts(
    task: CoreTask, number: int, tokenizer: "Tokenizer", positions: int
) -> list[tuple[list[int], int]]:
    """The texts of a question as tokens, after the token that starts a document, cut at their
    start to `positions`; each with the number of its first token that is scored.
    """
    start = prefix_token_id(tokenizer.hf)
    texts = tokenizer.encode_batch(_prompts(task, number))
    tokens = [[start, *ids.tolist()] for ids in texts]
    if task.kind == "schema":
        suffix = _common_start([ids[::-1] for ids in tokens])
        starts = [len(ids) - suffix for ids in tokens]
    else:
        starts = [_common_start(tokens)] * len(tokens)
    if task.kind == "language_modeling":
        tokens, starts = tokens[1:], starts[1:]
    cuts = [max(0, len(ids) - positions) for ids in tokens]
    return [
        (ids[cut:], max(1, start - cut))
        for ids, start, cut in zip(tokens, starts, cuts, strict=True)
    ]


def _common_start(sequences: list[list[int]]) -> int:
    """How many tokens at the start of all sequences are equal."""
    columns = zip(*sequences, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _score(model: "PreTrainedModel", kind: str, texts: list[tuple[list[int], int]]) -> list[float]:
    """For each text its mean loss per scored token, or of language_modeling 1 if the model would
    write these tokens.
    """
    import torch
    from torch.nn import functional as F

    ids = torch.zeros(len(texts), max(len(text) for text, _ in texts), dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, (text, start) in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        labels[row, start - 1 : len(text) - 1] = torch.tensor(text[start:])
    # logits of the tokens before would cost time and memory
    kept = ids.shape[1] - int((labels != -100).any(0).float().argmax())
    wanted, ids = labels[:, -kept:].to(model.device), ids.to(model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits.float()
    if kind == "language_modeling":
        return ((logits.argmax(-1) == wanted) | (wanted == -100)).all(1).int().tolist()
    losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return (losses.view_as(wanted).sum(1) / (wanted != -100).sum(1)).tolist()
