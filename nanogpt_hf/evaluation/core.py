"""The CORE score: accuracy in 22 tasks above that of guessing (DataComp-LM, arXiv:2406.11794), as
nanochat computes it: `evaluate --core BUNDLE`.

Each question follows solved examples of its task. Of several options the model chooses the one
with the smallest mean loss per token: of the choices after the same question (multiple_choice),
or of the same continuation after each context (schema). A text to continue (language_modeling)
counts if each token of the continuation is the most probable one.
"""

import argparse
import random
from collections.abc import Iterator
from functools import partial
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any

from nanogpt_hf.evaluation.base import LIMIT, Evaluation, Loaded, Request, Result, Subject
from nanogpt_hf.evaluation.tasks import prefix_token_id
from nanogpt_hf.formatting import plural

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from nanogpt_hf.data.tokenizer import Tokenizer
    from nanogpt_hf.evaluation.core_bundle import CoreBundle, CoreTask

_GPT2_SCORE = 0.256525  # GPT-2 1.6B's, as stated by nanochat's README
_EXAMPLE_SEED = 1234  # nanochat's; the number of the question is added
_AT_ONCE = 16  # questions that share batches: the same ones on any number of processes


class CoreScore(Evaluation):
    asked_by = "--core BUNDLE"
    options = {  # noqa: RUF012
        "--core": {
            "metavar": "BUNDLE",
            "help": "the CORE score: a folder with core.yaml, or a zip of one",
        },
        **LIMIT,
    }

    def wanted(self, arguments: argparse.Namespace) -> bool:
        return bool(arguments.core)

    def load(self, request: Request) -> Loaded:
        from nanogpt_hf.evaluation.core_bundle import load_bundle

        bundle = load_bundle(request.arguments.core, request.arguments.limit)
        return Loaded(partial(_measure, bundle, request.tokenizer), {"core_sha256": bundle.sha256})


def _measure(bundle: "CoreBundle", tokenizer: "Tokenizer", subject: Subject) -> Iterator[Result]:
    yield Result([f"{subject.name} on CORE, {plural(len(bundle.tasks), 'task')} of {bundle.name}"])
    width = max(len(task.label) for task in bundle.tasks)
    scores = {}
    for task in bundle.tasks:
        score = scores[task.label] = _score_task(subject, tokenizer, task)
        yield Result(
            [
                f"  {task.label:<{width}}  {task.num_fewshot:>2} examples  accuracy "
                f"{score['accuracy']:.4f}  centered {score['centered']:7.4f}  "
                f"{plural(len(task.questions), 'question')}"
            ]
        )
    mean = sum(score["centered"] for score in scores.values()) / len(scores)
    figures = {
        "score": mean,
        "tasks": scores,
        "bundle": bundle.name,
        "bundle_sha256": bundle.sha256,
    }
    yield Result(
        [f"  CORE {mean:.4f}  (GPT-2 1.6B on DCLM's 22 tasks: {_GPT2_SCORE:.4f})"],
        {"core": figures},
    )


def _score_task(subject: Subject, tokenizer: "Tokenizer", task: "CoreTask") -> dict[str, Any]:
    """The accuracy in a task of a model that is whole on every process, and how much of the way
    from guessing to all questions that is.

    The processes share the questions in groups, and no batch has texts of two groups: so the
    batches, and all digits of the result, are the same on any number of processes.
    """
    import torch

    from nanogpt_hf.distributed.accelerator import sum_over_ranks
    from nanogpt_hf.evaluation.loss import eval_mode

    mesh, accelerator, model = subject.mesh, subject.accelerator, subject.model
    count, together = len(task.questions), mesh.dp_size * _AT_ONCE
    positions = model.config.max_position_embeddings
    correct = torch.zeros(count, dtype=torch.int64)
    with (
        subject.bar("question", count, task.label) as progress,
        torch.no_grad(),
        eval_mode(model),
        accelerator.autocast(),
    ):
        for first in range(0, count, together):
            numbers = range(count)[first + mesh.dp_rank * _AT_ONCE :][:_AT_ONCE]
            texts = [_scored_texts(task, number, tokenizer, positions) for number in numbers]
            values = iter(_score(model, task.kind, list(chain(*texts)), subject.batch_size))
            for number, own in zip(numbers, texts, strict=True):
                found = [next(values) for _ in own]
                is_best = found.index(min(found)) == task.questions[number].gold
                correct[number] = found[0] if task.kind == "language_modeling" else is_best
            progress(min(together, count - first))
    correct = sum_over_ranks(accelerator, mesh, correct.to(accelerator.device))
    accuracy = correct.sum().item() / count
    return {
        "label": task.label,
        "kind": task.kind,
        "num_fewshot": task.num_fewshot,
        "questions": count,
        "accuracy": accuracy,
        "centered": (accuracy - task.baseline) / (1 - task.baseline),
    }


def _prompts(task: "CoreTask", number: int) -> list[str]:
    """The texts of a question, one per option; of language_modeling also, as the first, the one
    without an answer.
    """
    others = range(len(task.questions) - 1)
    examples = ""
    for other in random.Random(_EXAMPLE_SEED + number).sample(others, task.num_fewshot):
        question = task.questions[other + (other >= number)]
        context, continuation = question.options[question.gold]
        examples += f"{context}{task.delimiter}{continuation}\n\n"
    options = task.questions[number].options
    texts = [
        f"{examples}{context}{task.delimiter}{continuation}" for context, continuation in options
    ]
    if task.kind == "language_modeling":
        # the white space before an answer is usually a part of the answer's first token
        texts.insert(0, f"{examples}{options[0][0]}{task.delimiter}".strip())
    return texts


def _scored_texts(
    task: "CoreTask", number: int, tokenizer: "Tokenizer", positions: int
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


def _score(
    model: "PreTrainedModel", kind: str, texts: list[tuple[list[int], int]], batch_size: int
) -> list[float]:
    """For each text its mean loss per scored token, or of language_modeling 1 if the model would
    write these tokens.
    """
    import torch
    from torch.nn import functional as F

    # texts of similar lengths need little padding
    order = sorted(range(len(texts)), key=lambda number: len(texts[number][0]))
    values = [0.0] * len(texts)
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        ids = torch.zeros(len(numbers), len(texts[numbers[-1]][0]), dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        for row, number in enumerate(numbers):
            text, start = texts[number]
            ids[row, : len(text)] = torch.tensor(text)
            labels[row, start - 1 : len(text) - 1] = torch.tensor(text[start:])
        # logits of the tokens before would cost time and memory
        kept = ids.shape[1] - int((labels != -100).any(0).float().argmax())
        wanted = labels[:, -kept:].to(model.device)
        logits = model(
            input_ids=ids.to(model.device), use_cache=False, logits_to_keep=kept
        ).logits.float()
        if kind == "language_modeling":
            scores = ((logits.argmax(-1) == wanted) | (wanted == -100)).all(1)
        else:
            losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
            scores = losses.view_as(wanted).sum(1) / (wanted != -100).sum(1)
        for number, value in zip(numbers, scores.tolist(), strict=True):
            values[number] = value
    return values
