"""The CORE score: accuracy in 22 tasks, 0 for guessing and 1 for all questions (DataComp-LM,
arXiv:2406.11794), as nanochat computes it: `evaluate --core BUNDLE`.

Each question follows solved examples of its task. Among several options the model chooses the one
with the smallest mean loss per token. The options are different continuations of the same question
(multiple_choice), or different contexts of the same continuation (schema). A text to continue
(language_modeling) counts if each token of the continuation is the most probable one.
"""

import csv
import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
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

# GPT-2 1.6B, to compare with; the number is from nanochat's README.
_GPT2_SCORE = 0.256525
# nanochat's seeds, so that examples, and the questions that --limit takes, are the same.
_EXAMPLE_SEED = 1234  # the number of the question is added
_SHUFFLE_SEED = 1337


class CoreScore(Evaluation):
    options = (Option("--core BUNDLE", "compute the CORE score: a folder with core.yaml"), LIMIT)

    def load(self, request: Request) -> Loaded:
        arguments = request.arguments
        tasks, digest = load_bundle(arguments.core, arguments.limit)
        facts = {"core_sha256": digest}
        measure = partial(_measure, arguments.core, tasks, digest, request.tokenizer)
        return Loaded(measure, facts)


class CoreTask(NamedTuple):
    """A task of CORE."""

    label: str
    kind: str  # multiple_choice, schema or language_modeling: a key of _OPTIONS
    num_fewshot: int  # solved examples that precede each question
    delimiter: str  # between context and continuation
    baseline: float  # the accuracy of guessing
    # For each question: its options, (context, continuation) each, and the number of the right one.
    questions: list[tuple[list[tuple[str, str]], int]]


# The options of a question, context and continuation each, by the type of its task.
_OPTIONS: dict[str, Callable[[dict[str, Any]], list[tuple[str, str]]]] = {
    "multiple_choice": lambda row: [(row["query"], choice) for choice in row["choices"]],
    "schema": lambda row: [(context, row["continuation"]) for context in row["context_options"]],
    "language_modeling": lambda row: [(row["context"].strip(), row["continuation"])],
}


def load_bundle(source: str, limit: int | None = None) -> tuple[list[CoreTask], str]:
    """Load the tasks of a bundle, at most `limit` questions of each, and the sha256 of its files.

    A bundle is a folder with core.yaml, eval_meta_data.csv and eval_data/*.jsonl. Raises DataError,
    one line, if there is no such bundle, or a file cannot be read.
    """
    from nanogpt_hf.data.manifest import file_digest

    path = Path(os.path.expanduser(source))
    try:
        tasks, files = _read(path, limit)
        digest = file_digest(files)
    except Exception as error:  # csv, yaml and json raise many types
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise DataError(f"--core: {source}: no bundle of CORE: {reason}") from None
    for task in tasks:
        # The examples are other questions of the task.
        if len(task.questions) <= task.num_fewshot:
            raise DataError(
                f"--limit: {task.label}: {task.num_fewshot} solved examples precede each "
                f"question; there must be more questions than {len(task.questions)}"
            )
    return tasks, digest


def _read(folder: Path, limit: int | None) -> tuple[list[CoreTask], list[Path]]:
    """Read the tasks of a folder; return them and the paths of their files."""
    table = folder / "core.yaml"
    metadata = folder / "eval_meta_data.csv"
    tasks = []
    files = [table, metadata]
    baselines = {}
    with metadata.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            # in percent
            baseline = baselines[row["Eval Task"]] = 0.01 * float(row["Random baseline"])
            if not 0 <= baseline < 1:
                raise ValueError(f"a random baseline of {row['Random baseline']} percent")
    for entry in yaml.safe_load(table.read_text(encoding="utf-8"))["icl_tasks"]:
        path = folder / "eval_data" / entry["dataset_uri"]
        files.append(path)
        label = entry["label"]
        kind = entry["icl_task_type"]
        with path.open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        questions = [_question(kind, row) for row in rows]
        # Also without --limit, since the order decides which questions are the examples.
        random.Random(_SHUFFLE_SEED).shuffle(questions)
        task = CoreTask(
            label=label,
            kind=kind,
            num_fewshot=entry["num_fewshot"][0],
            delimiter=entry.get("continuation_delimiter", " "),
            baseline=baselines[label],
            questions=questions[:limit],
        )
        tasks.append(task)
    if not tasks:
        raise ValueError(f"{table.name} lists no task")
    return tasks, files


def _question(kind: str, row: dict[str, Any]) -> tuple[list[tuple[str, str]], int]:
    """The options of a question, and the number of the right one. Raises ValueError if it is none
    of them.
    """
    options = _OPTIONS[kind](row)
    gold = row.get("gold", 0)
    if gold not in range(len(options)):
        raise ValueError(f"gold {gold!r:.40} is the number of none of {len(options)} options")
    return options, gold


def _measure(
    name: str, tasks: list[CoreTask], digest: str, tokenizer: "Tokenizer", subject: Subject
) -> Iterator[Result]:
    yield Result([f"{subject.name} on CORE, {plural(len(tasks), 'task')} of {name}"])
    width = max(len(task.label) for task in tasks)
    scores = {}
    for task in tasks:
        score = _score_task(subject, tokenizer, task)
        scores[task.label] = score
        line = f"  {task.label:<{width}}  {task.num_fewshot:>2} examples  accuracy "
        line += f"{score['accuracy']:.4f}  centered {score['centered']:7.4f}  "
        yield Result([line + plural(len(task.questions), "question")])
    mean = sum(score["centered"] for score in scores.values()) / len(scores)
    figures = {"score": mean, "tasks": scores, "bundle": name, "bundle_sha256": digest}
    line = f"  CORE {mean:.4f}  (GPT-2 1.6B on DCLM's 22 tasks: {_GPT2_SCORE:.4f})"
    yield Result([line], {"core": figures})


def _score_task(subject: Subject, tokenizer: "Tokenizer", task: CoreTask) -> dict[str, Any]:
    """Compute the accuracy in a task, and its centered value: 0 for guessing, 1 for all questions.
    The model is whole on every process.

    The processes share the questions, and the texts of a question are one batch: so all digits of
    the result are the same on any number of processes.
    """
    import torch
    from tqdm import tqdm

    from nanogpt_hf.distributed.accelerator import sum_over_ranks
    from nanogpt_hf.evaluation.loss import eval_mode

    mesh = subject.mesh
    accelerator = subject.accelerator
    model = subject.model
    count = len(task.questions)
    right = 0
    bar = tqdm(
        desc=task.label,
        total=count,
        unit="question",
        disable=not subject.shows_bars,
        leave=False,
    )
    with bar, torch.no_grad(), eval_mode(model), accelerator.autocast():
        for number in range(mesh.dp_rank, count, mesh.dp_size):
            texts = _scored_texts(task, number, tokenizer, model.config.max_position_embeddings)
            values = _score(model, task.kind, texts)
            if task.kind == "language_modeling":
                right += values[0]
            else:
                _, gold = task.questions[number]
                right += values.index(min(values)) == gold
            bar.update(min(mesh.dp_size, count - number))
    # Counts are whole numbers, so their sum is exact in any order of the processes.
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
    """The texts of a question, one per option. For language_modeling the first text is the question
    without an answer.
    """
    # Draw from the other questions: numbers from this question's on mean the question after.
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
        # The white space before an answer is usually a part of the answer's first token.
        texts.insert(0, f"{examples}{options[0][0]}{task.delimiter}".strip())
    return texts


def _scored_texts(
    task: CoreTask, number: int, tokenizer: "Tokenizer", positions: int
) -> list[tuple[list[int], int]]:
    """Encode the texts of a question, after the token that starts a document. Return each with the
    number of its first token that is scored. Texts longer than `positions` are cut at their start.
    """
    start = prefix_token_id(tokenizer.hf)
    texts = tokenizer.encode_batch(_prompts(task, number))
    tokens = [[start, *ids.tolist()] for ids in texts]
    # Tokens, not characters, decide where a continuation begins: a token may span the border. What
    # all texts share is the question, or in a schema the continuation.
    if task.kind == "schema":
        suffix = _common_start([ids[::-1] for ids in tokens])
        starts = [len(ids) - suffix for ids in tokens]
    else:
        starts = [_common_start(tokens)] * len(tokens)
    if task.kind == "language_modeling":
        # The question without an answer has served its purpose.
        tokens = tokens[1:]
        starts = starts[1:]
    scored = []
    for ids, start in zip(tokens, starts, strict=True):
        cut = max(0, len(ids) - positions)
        # The first token that is left has nothing before it and cannot be predicted.
        scored.append((ids[cut:], max(1, start - cut)))
    return scored


def _common_start(sequences: list[list[int]]) -> int:
    """Count the tokens at the start that all sequences have in common."""
    count = 0
    for column in zip(*sequences, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


def _score(model: "PreTrainedModel", kind: str, texts: list[tuple[list[int], int]]) -> list[float]:
    """Compute for each text its mean loss per scored token. For language_modeling: 1 if each scored
    token is the most probable one, else 0.
    """
    import torch
    from torch.nn import functional as F

    # (texts, T), filled up at the end, where causal attention ignores it
    ids = torch.zeros(len(texts), max(len(text) for text, _ in texts), dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, (text, start) in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        # The logits at position t predict the token at t + 1.
        labels[row, start - 1 : len(text) - 1] = torch.tensor(text[start:])
    # Compute logits from the first label on. Those of the question would cost time and memory.
    kept = ids.shape[1] - int((labels != -100).any(0).float().argmax())
    wanted = labels[:, -kept:].to(model.device)
    ids = ids.to(model.device)
    # (texts, kept, vocabulary)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits.float()
    if kind == "language_modeling":
        return ((logits.argmax(-1) == wanted) | (wanted == -100)).all(1).int().tolist()
    # Ignored labels have loss 0, so the sum over a row divided by its labels is the mean.
    losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return (losses.view_as(wanted).sum(1) / (wanted != -100).sum(1)).tolist()
