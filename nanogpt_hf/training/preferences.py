"""Preference training: pairs of a chosen and a rejected answer, their losses (DPO, IPO, hinge,
SimPO, ORPO), and their evaluation.

A block is a pair, padded at the end; a step's loss is the mean over its pairs.
"""

import dataclasses
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from nanogpt_hf.config.schema import AlignSection, Config
from nanogpt_hf.config.sources import is_mixture
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.conversations import Conversation, Pair, pair_of
from nanogpt_hf.data.prepare import split_documents
from nanogpt_hf.data.prepared import PreparedData, in_memory
from nanogpt_hf.data.source import load_documents
from nanogpt_hf.data.tokenizer import (
    build_tokenizer,
    encode_ordinary,
    end_of_text_id_of,
    prompt_ids,
    unknown_characters_named,
)
from nanogpt_hf.distributed.accelerator import sum_over_ranks
from nanogpt_hf.errors import DataError
from nanogpt_hf.evaluation.loss import eval_mode, evaluation_indices, rank_batches
from nanogpt_hf.formatting import format_number
from nanogpt_hf.model.architecture import Metrics, Objective
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.training.run import Evaluated, Run, StepResult, start_model_of
from nanogpt_hf.training.step import train_step

logger = logging.getLogger(__name__)
_NO_TARGET = -100
Encoded = tuple[list[int], int]  # token ids, and how many of them are the prompt


class Pairs(Blocks):
    """Preference pairs as blocks: input_ids and shift_labels (n, 2, T), the chosen answer first,
    and `reference` (n, 2), the log-probabilities of the answers under the model before training.
    """

    def __init__(self, pairs: list[tuple[Encoded, Encoded]], block_size: int):
        self.pairs, self.block_size = pairs, block_size
        self.width = max(len(ids) for pair in pairs for ids, _ in pair) - 1
        self.reference = torch.zeros(len(pairs), 2)

    def __len__(self) -> int:
        return len(self.pairs)

    def num_targets(self, indices: np.ndarray) -> int:
        """The pairs at `indices`: each counts the same, however long its answers are."""
        return len(indices)

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """The pairs at `indices`; shift_labels is -100 but for the tokens of the answers."""
        inputs = torch.zeros(len(indices), 2, self.width, dtype=torch.int64)
        labels = torch.full_like(inputs, _NO_TARGET)
        for row, index in enumerate(indices.tolist()):
            for side, (ids, prompt) in enumerate(self.pairs[index]):
                inputs[row, side, : len(ids) - 1] = torch.tensor(ids[:-1])
                labels[row, side, prompt - 1 : len(ids) - 1] = torch.tensor(ids[prompt:])
        reference = self.reference[torch.from_numpy(indices)]
        return {"input_ids": inputs, "shift_labels": labels, "reference": reference}


def load_pairs(config: Config) -> PreparedData:
    """The preference pairs of data.source, split and encoded, with the model's tokenizer.

    Raises UserError if they cannot be read, or none fits into a block.
    """
    return load_rows(config, pair_of, _encoded, "preference pairs")


def load_rows(
    config: Config,
    parse: Callable[..., Any],
    encode: Callable[..., tuple[Pairs | None, int]],
    noun: str,
) -> PreparedData:
    """The rows of data.source as `parse` reads each and `encode` makes blocks of those that fit,
    or None, and the number of others.

    Raises UserError if they cannot be read, or none fits into a block.
    """
    data = dataclasses.replace(config.data, format="chat")
    if is_mixture(data):
        raise DataError(f"data.source: {noun} come from one source; a list is not supported")
    tokenizer = build_tokenizer(data.tokenizer, ()).hf
    chat = ChatFormat(tokenizer, fixed_day=True) if tokenizer.chat_template else None
    with tempfile.TemporaryDirectory() as scratch:
        documents = load_documents(data, Path(scratch), parse)
        splits = [
            encode(rows, tokenizer, chat, data.block_size)
            for rows in split_documents(documents, data)
        ]
    found = []
    for name, (blocks, left_out) in zip(("train", "validation"), splits, strict=True):
        if not blocks:
            raise DataError(
                f"data.block_size: {data.block_size} tokens are too few for all {noun} of {name}"
            )
        line = f"  {name:<10} {len(blocks):,} {noun}"
        if left_out:
            line += f"; {left_out:,} are longer than data.block_size {data.block_size}, left out"
        logger.info(line)
        found.append(blocks)
    train, validation = found
    return in_memory(
        train,
        validation,
        tokenizer,
        source=data.source,
        revision=documents.revision,
        end_of_turn_id=chat and chat.end_of_turn_id(),
    )


def _encoded(
    pairs: list[Pair], tokenizer: PreTrainedTokenizerBase, chat: ChatFormat | None, block_size: int
) -> tuple[Pairs | None, int]:
    """The blocks of the pairs, and how many are left out: a pair without the end of an answer would
    prefer one that never ends.
    """
    kept = []
    for pair in pairs:
        answers = [encode_answer(messages, tokenizer, chat) for messages in pair]
        if all(len(ids) <= block_size + 1 for ids, _ in answers):
            kept.append(tuple(answers))
    return Pairs(kept, block_size) if kept else None, len(pairs) - len(kept)


def encode_answer(messages: Conversation, tokenizer: Any, chat: ChatFormat | None) -> Encoded:
    """The token ids of a conversation whose last answer is trained, and where that begins.

    Without a chat template the answer continues the last question as text, and the token that
    ends a text ends it.
    """
    if chat is None:
        if len(messages) > 2:
            raise DataError(
                "the model has no chat template, so a pair is one question with two answers; "
                f"the one that starts {messages[0]['content']!r:.40} has more messages"
            )
        prompt = prompt_ids(tokenizer, messages[0]["content"])
        end = end_of_text_id_of(tokenizer)
        answer = encode_ordinary(tokenizer, messages[1]["content"])
        return [*prompt, *answer, *([] if end is None else [end])], len(prompt)
    with unknown_characters_named(tokenizer, [message["content"] for message in messages]):
        example = chat.examples([messages])[-1]
    counts = np.array([0, *example.assistant_mask])
    begins = np.flatnonzero(np.diff(counts) == 1)
    end = int(np.flatnonzero(counts)[-1])
    return example.input_ids[:end], int(begins[-1])


class PairLoss(NamedTuple):
    """Row of LOSSES: the loss of pairs, from the scores of their chosen and rejected answers."""

    loss: Callable[[AlignSection, torch.Tensor, torch.Tensor], torch.Tensor]
    uses_reference: bool = True  # scores are differences to the model before training
    per_token: bool = False  # scores are means over the tokens of an answer


def _dpo(align: AlignSection, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    x, smoothing = align.beta * (chosen - rejected), align.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(x) - smoothing * F.logsigmoid(-x)


def _simpo(align: AlignSection, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    margin = 0.5 if align.margin is None else align.margin
    return -F.logsigmoid(align.beta * (chosen - rejected) - margin)


def _orpo(align: AlignSection, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    # an answer of probability 1 has infinite odds
    scores = (score.clamp(max=-1e-7) for score in (chosen, rejected))
    log_odds = [score - torch.log(-torch.expm1(score)) for score in scores]
    return -chosen - align.beta * F.logsigmoid(log_odds[0] - log_odds[1])


# With c and r the scores of the chosen and the rejected answer: sums of the log-probabilities of
# their tokens, or means; and minus those of the model before training, if the row says so.
LOSSES = {
    # -log σ(β·(c - r)); with label smoothing ε (1 - ε) times it, plus -ε·log σ(-β·(c - r))
    # (Rafailov et al. 2023, arXiv:2305.18290; ε as in Mitchell's note on conservative DPO)
    "dpo": PairLoss(_dpo),
    # (c - r - 1 / (2β))² (Azar et al. 2023, arXiv:2310.12036)
    "ipo": PairLoss(lambda align, c, r: (c - r - 1 / (2 * align.beta)) ** 2, per_token=True),
    # max(0, 1 - β·(c - r)) (SLiC, Zhao et al. 2023, arXiv:2305.10425)
    "hinge": PairLoss(lambda align, c, r: torch.relu(1 - align.beta * (c - r))),
    # -log σ(β·(c - r) - margin) (Meng et al. 2024, arXiv:2405.14734)
    "simpo": PairLoss(_simpo, uses_reference=False, per_token=True),
    # -c - β·log σ(log odds(c) - log odds(r)), odds(c) = eᶜ / (1 - eᶜ): with the loss of
    # supervised fine-tuning (Hong et al. 2024, arXiv:2403.07691)
    "orpo": PairLoss(_orpo, uses_reference=False, per_token=True),
}


def preference_objective(align: AlignSection) -> Objective:
    """The summed loss of the pairs of a batch, which `train_step` divides by the pairs of a step.

    Metrics: the implicit rewards, β times the scores of the answers, and how often that of the
    chosen one is higher.
    """
    row = LOSSES[align.loss or "dpo"]

    def objective(
        model: torch.nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Metrics]:
        labels = batch["shift_labels"]
        scores, lengths = pair_log_probs(model, batch["input_ids"], labels)
        if row.uses_reference:
            scores = scores - batch["reference"]
        if row.per_token:
            scores = scores / lengths.clamp(min=1)
        is_pair = lengths[:, 0] > 0  # evaluations pad batches by empty rows
        chosen, rejected = torch.where(is_pair[:, None], scores, -1.0).unbind(1)
        values = {
            "loss": row.loss(align, chosen, rejected),
            "accuracy": ((chosen - rejected).sign() + 1) / 2,  # equal ones count half
            "reward_chosen": align.beta * chosen,
            "reward_rejected": align.beta * rejected,
        }
        sums = {name: torch.where(is_pair, value, 0.0).sum() for name, value in values.items()}
        return sums.pop("loss"), sums

    return objective


def pair_log_probs(
    model: torch.nn.Module, input_ids: torch.Tensor, shift_labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of answers, summed over their tokens, and their tokens: (n, 2) each.

    Both inputs are (n, 2, T), or (n, 1, T) of one side. Sequences are padded at their end, which
    needs no mask.
    """
    rows, labels = input_ids.flatten(0, 1), shift_labels.flatten(0, 1)
    logits = model(input_ids=rows, use_cache=False).logits.float()
    counts = labels != _NO_TARGET
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    shape = input_ids.shape[:2]
    return (chosen * counts).sum(1).view(shape), counts.sum(1).view(shape)


def preference_step(run: Run, step: int, learning_rate: float) -> StepResult:
    """Take one optimizer step on the pairs of `step`."""
    with run.batches.waiting():
        fill_reference(run, lambda: False)
    return train_step(run, step, learning_rate)


def evaluate_pairs(run: Run, stopping: Callable[[], bool]) -> Evaluated | None:
    """The loss on held-out pairs, the share whose chosen answer has the higher reward, and the
    margin; the same on all processes.
    """
    if not fill_reference(run, stopping):
        return None
    indices = evaluation_indices(run.data.validation, run.config.eval.tokens)
    means = mean_metrics(run, indices, stopping)
    if means is None:
        return None
    means["margin"] = means["reward_chosen"] - means["reward_rejected"]
    line = (
        f"held-out pairs: loss {format_number(means['loss'], 4)}, accuracy "
        f"{means['accuracy']:.3f}, margin {format_number(means['margin'], 4)}"
    )
    metrics = {f"val/{name}": value for name, value in means.items()}
    return Evaluated(means["loss"], None, metrics, [line], [])


def mean_metrics(
    run: Run, indices: np.ndarray, stopping: Callable[[], bool]
) -> dict[str, float] | None:
    """The means of the objective's loss and metrics over validation blocks; None if `stopping()`
    has ended it.
    """
    blocks, accelerator = run.data.validation, run.accelerator
    totals: Metrics = {}
    with torch.no_grad(), eval_mode(run.model):
        for _, batch in rank_batches(
            accelerator, run.mesh, blocks, indices, run.batches.micro_batch_size, pad=True
        ):
            loss, metrics = run.objective(run.model, batch)
            for name, value in {"loss": loss, **metrics}.items():
                totals[name] = totals.get(name, 0) + value.float()
            if stopping():
                return None
    return {
        name: sum_over_ranks(accelerator, run.mesh, total).item() / len(indices)
        for name, total in totals.items()
    }


@torch.no_grad()
def fill_reference(run: Run, stopping: Callable[[], bool]) -> bool:
    """Compute the log-probabilities of all rows under the model before training, once: they are
    kept in the run folder. Returns whether they are there; not if `stopping()` has ended it.

    At step 0 that is the model of the run; later, if the file was lost, it is loaded again.
    """
    splits: dict[str, Any] = {"train": run.data.train, "validation": run.data.validation}
    row = LOSSES.get(run.config.align.loss or "dpo")  # none of KTO
    if (row and not row.uses_reference) or splits["train"].reference.any():
        return True
    file, accelerator, mesh = run.folder.reference, run.accelerator, run.mesh
    saved = _read_reference(file, splits) if mesh.is_main else {}
    is_saved: list[bool] = broadcast_object_list([bool(saved)], from_process=0)
    filled = {}
    for name, blocks in splits.items():
        found = saved.get(name, torch.zeros(len(blocks), 2)).to(accelerator.device)
        if not is_saved[0]:
            logger.info(f"log-probabilities of {len(blocks):,} {name} rows before training ...")
            model = run.model if run.state.step == 0 else start_model_of(run)
            every, size = np.arange(len(blocks)), run.batches.micro_batch_size
            with eval_mode(model):
                for rows, batch in rank_batches(accelerator, mesh, blocks, every, size, pad=True):
                    with accelerator.autocast():
                        sums, _ = pair_log_probs(model, batch["input_ids"], batch["shift_labels"])
                    found[torch.from_numpy(rows).to(found.device)] = sums[: len(rows)].float()
                    if stopping():
                        return False
        filled[name] = sum_over_ranks(accelerator, mesh, found).cpu()
    run.start_model = None  # frees its memory
    if mesh.is_main and not is_saved[0]:
        with written_whole(file) as partial:
            partial.write_bytes(save(filled))
    for name, reference in filled.items():
        splits[name].reference = reference
    return True


def _read_reference(file: Path, splits: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The saved log-probabilities; {} if there are none, or they are damaged or of other pairs."""
    try:
        saved = load_file(file)
    except (OSError, SafetensorError):
        return {}
    shapes = {name: (len(blocks), 2) for name, blocks in splits.items()}
    return saved if {name: tuple(t.shape) for name, t in saved.items()} == shapes else {}
