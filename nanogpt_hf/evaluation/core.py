"""The CORE score: accuracy in 22 tasks above that of guessing (DataComp-LM, arXiv:2406.11794), as
nanochat computes it: `evaluate --core BUNDLE`.

Each question follows solved examples of its task. Of several options the model chooses the one
with the smallest mean loss per token: of the choices after the same question (multiple_choice),
or of the same continuation after each context (schema). A text to continue (language_modeling)
counts if each token of the continuation is the most probable one.
"""

import argparse
import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nanogpt_hf.evaluation.base import LIMIT, Evaluation, Loaded, Request, Result, Subject
from nanogpt_hf.evaluation.tasks import prefix_token_id
from nanogpt_hf.formatting import plural

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from nanogpt_hf.data.tokenizer import Tokenizer
    from nanogpt_hf.evaluation.core_bundle import CoreBundle, CoreTask

_GPT2_SCORE = 0.256525  # GPT-2 1.6B's, as stated by nanochat's README
_EXAMPLE_SEED = 1234  # nanochat's; the number of the question is added
_AT_ONCE = 16  # questions that share batches: the same ones on any number of processes


@dataclass(frozen=True)
class CoreTaskScore:
    """The accuracy in a task, and how much of the way from guessing to all questions that is."""

    label: str
    kind: str
    num_fewshot: int
    questions: int
    accuracy: float
    centered: float


@dataclass(frozen=True)
class ScoredText:
    """Token ids of a prompt; the tokens from `start` on are scored."""

    ids: "np.ndarray"
    start: int


class CoreScore(Evaluation):
    asked_by = "--core BUNDLE"
    options = {  # noqa: RUF012
        "--core": {
            "metavar": "BUNDLE",
            "help": "the CORE score: a folder with core.yaml, or the URL of such a folder as a zip",
        },
        "--core-sha256": {"metavar": "HEX", "help": "expected sha256 of the zip at a URL"},
        **LIMIT,
    }

    def wanted(self, arguments: argparse.Namespace) -> bool:
        return bool(arguments.core)

    def load(self, request: Request) -> Loaded:
        from nanogpt_hf.evaluation.core_bundle import load_bundle

        arguments = request.arguments
        bundle = load_bundle(arguments.core, arguments.core_sha256, arguments.limit)
        return Loaded(partial(_measure, bundle, request.tokenizer), {"core_sha256": bundle.sha256})


def _measure(bundle: "CoreBundle", tokenizer: "Tokenizer", subject: Subject) -> Iterator[Result]:
    yield Result([f"{subject.name} on CORE, {plural(len(bundle.tasks), 'task')} of {bundle.name}"])
    width = max(len(task.label) for task in bundle.tasks)
    scores = {}
    for task in bundle.tasks:
        with subject.bar("question", len(task.questions), task.label) as progress:
            score = evaluate_core_task(subject, tokenizer, task, progress=progress)
        scores[task.label] = dataclasses.asdict(score)
        yield Result(
            [
                f"  {task.label:<{width}}  {task.num_fewshot:>2} examples  accuracy "
                f"{score.accuracy:.4f}  centered {score.centered:7.4f}  "
                f"{plural(score.questions, 'question')}"
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


def evaluate_core_task(
    subject: Subject,
    tokenizer: "Tokenizer",
    task: "CoreTask",
    progress: Callable[[int], object] = lambda questions: None,
) -> CoreTaskScore:
    """Measure a model, whole on every process, in a task.

    The processes share the questions in groups, and no batch has texts of two groups: so the
    batches, and all digits of the result, are the same on any number of processes. `progress` is
    called with the number of questions done.
    """
    import torch

    from nanogpt_hf.distributed.accelerator import sum_over_ranks
    from nanogpt_hf.evaluation.loss import eval_mode

    mesh, accelerator, model = subject.mesh, subject.accelerator, subject.model
    count, positions = len(task.questions), model.config.max_position_embeddings
    correct = torch.zeros(count, dtype=torch.int64)
    with torch.no_grad(), eval_mode(model), accelerator.autocast():
        for first in range(mesh.dp_rank * _AT_ONCE, count, mesh.dp_size * _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, count))
            texts = [scored_texts(task, number, tokenizer, positions) for number in numbers]
            together = [text for own in texts for text in own]
            values = iter(_score(model, task.kind, together, subject.batch_size))
            for number, own in zip(numbers, texts, strict=True):
                correct[number] = _is_correct(task, number, [next(values) for _ in own])
            progress(min(mesh.dp_size * _AT_ONCE, count - (first - mesh.dp_rank * _AT_ONCE)))
    if mesh.world_size > 1:
        correct = sum_over_ranks(accelerator, mesh, correct.to(accelerator.device)).cpu()
    accuracy = correct.sum().item() / count
    centered = (accuracy - task.baseline) / (1 - task.baseline)
    return CoreTaskScore(task.label, task.kind, task.num_fewshot, count, accuracy, centered)


def example_numbers(number: int, count: int, num_fewshot: int) -> list[int]:
    """Which of `count` questions precede question `number` as solved examples."""
    others = random.Random(_EXAMPLE_SEED + number).sample(range(count - 1), num_fewshot)
    return [other + (other >= number) for other in others]


def prompts(task: "CoreTask", number: int) -> list[str]:
    """The texts of a question, one per option; of language_modeling also, as the first, the one
    without an answer.
    """
    examples = ""
    for other in example_numbers(number, len(task.questions), task.num_fewshot):
        question = task.questions[other]
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


def scored_texts(
    task: "CoreTask", number: int, tokenizer: "Tokenizer", positions: int
) -> list[ScoredText]:
    """The texts of a question as tokens, after the token that starts a document, cut at their
    start to `positions`.
    """
    import numpy as np

    start = [prefix_token_id(tokenizer.hf)]
    tokens = [
        np.concatenate((start, ids)).astype(np.int64)
        for ids in tokenizer.encode_batch(prompts(task, number))
    ]
    if task.kind == "schema":
        suffix = common_prefix_length([ids[::-1] for ids in tokens])
        starts = [len(ids) - suffix for ids in tokens]
    else:
        starts = [common_prefix_length(tokens)] * len(tokens)
    if task.kind == "language_modeling":
        tokens, starts = tokens[1:], starts[1:]
    cuts = [max(0, len(ids) - positions) for ids in tokens]
    return [
        ScoredText(ids[cut:], max(1, s - cut))
        for ids, s, cut in zip(tokens, starts, cuts, strict=True)
    ]


def common_prefix_length(sequences: "list[np.ndarray]") -> int:
    import numpy as np

    length = min(map(len, sequences))
    equal = np.all([ids[:length] == sequences[0][:length] for ids in sequences], axis=0)
    return length if equal.all() else int(equal.argmin())


def _is_correct(task: "CoreTask", number: int, values: list[float]) -> bool:
    if task.kind == "language_modeling":
        return bool(values[0])
    return min(range(len(values)), key=values.__getitem__) == task.questions[number].gold


def _score(
    model: "PreTrainedModel", kind: str, texts: list[ScoredText], batch_size: int
) -> list[float]:
    """For each text its mean loss per scored token, or of language_modeling 1 if the model would
    write these tokens.
    """
    import numpy as np
    import torch

    # texts of similar lengths need little padding
    order = sorted(range(len(texts)), key=lambda n: len(texts[n].ids))
    values = [0.0] * len(texts)
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        batch = [texts[number] for number in numbers]
        ids = np.zeros((len(batch), max(len(text.ids) for text in batch)), dtype=np.int64)
        targets = np.full_like(ids, -100)
        for row, text in enumerate(batch):
            end = len(text.ids)
            ids[row, :end] = text.ids
            targets[row, text.start - 1 : end - 1] = text.ids[text.start :]
        inputs, labels = (torch.from_numpy(array).to(model.device) for array in (ids, targets))
        for number, value in zip(
            numbers, _score_rows(model, kind, inputs, labels).tolist(), strict=True
        ):
            values[number] = value
    return values


def _score_rows(
    model: "PreTrainedModel", kind: str, input_ids: "torch.Tensor", labels: "torch.Tensor"
) -> "torch.Tensor":
    from torch.nn import functional as F

    # logits of the tokens before would cost time and memory
    first = int((labels != -100).any(0).float().argmax())
    logits = model(
        input_ids=input_ids, use_cache=False, logits_to_keep=input_ids.shape[1] - first
    ).logits.float()
    wanted = labels[:, first:]
    if kind == "language_modeling":
        return ((logits.argmax(-1) == wanted) | (wanted == -100)).all(1)
    losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view_as(
        wanted
    )
    return losses.sum(1) / (wanted != -100).sum(1)
