"""KTO: preference training on answers that are labeled alone, good or bad (Ethayarajh et al. 2024,
arXiv:2402.01306).

A block is an answer, and its prompt with the answer of the row before it: the mean log-ratio of
those of a step estimates the KL divergence to the model before training, without a gradient.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nanogpt_hf.config.schema import AlignSection, Config
from nanogpt_hf.data.conversations import Labeled, labeled_of
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.distributed.accelerator import sum_over_ranks
from nanogpt_hf.errors import DataError
from nanogpt_hf.evaluation.loss import eval_mode, evaluation_indices, rank_batches
from nanogpt_hf.formatting import format_number
from nanogpt_hf.model.architecture import Metrics, Objective
from nanogpt_hf.training.preferences import (
    Pairs,
    encode_answer,
    fill_reference,
    load_rows,
    mean_metrics,
    pair_log_probs,
)
from nanogpt_hf.training.run import Evaluated, Run, StepResult
from nanogpt_hf.training.step import train_step


class LabeledAnswers(Pairs):
    """Answers as blocks, with the mismatched pair of each; `desirable` (n), and `kl` (n), the
    estimate for all of them.
    """

    def __init__(self, pairs: list[Any], block_size: int, desirable: list[bool]):
        super().__init__(pairs, block_size)
        self.desirable, self.kl = torch.tensor(desirable), 0.0

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        desirable = self.desirable[torch.from_numpy(indices)]
        kl = torch.full((len(indices),), self.kl)
        return super().batch(indices) | {"desirable": desirable, "kl": kl}


def load_answers(config: Config) -> PreparedData:
    """The labeled answers of data.source, split and encoded, with the model's tokenizer.

    Raises UserError if they cannot be read, or none fits into a block.
    """
    return load_rows(config, labeled_of, _encoded, "labeled answers")


def _encoded(
    rows: list[Labeled], tokenizer: Any, chat: Any, block_size: int
) -> tuple[LabeledAnswers | None, int]:
    """The blocks, and how many answers are left out. Only the mismatched pairs are cut."""
    kept = []
    for messages, label in rows:
        encoded = encode_answer(messages, tokenizer, chat)
        if len(encoded[0]) <= block_size + 1:
            kept.append((encoded, messages, label))
    if len(kept) == 1:
        raise DataError("data.source: one answer alone has no mismatched pair; add rows")
    pairs = []
    for row, (encoded, messages, _) in enumerate(kept):
        mismatched = [*messages[:-1], kept[row - 1][1][-1]]
        ids, prompt = encode_answer(mismatched, tokenizer, chat)
        pairs.append((encoded, (ids[: block_size + 1], prompt)))
    blocks = LabeledAnswers(pairs, block_size, [label for *_, label in kept]) if pairs else None
    return blocks, len(rows) - len(kept)


def kto_objective(align: AlignSection) -> Objective:
    """The summed loss of the answers of a batch: w·(1 - σ(±β·(r - kl))), r being the log-ratio of
    the answer to the model before training, and w and the sign those of its label.

    Metrics: rewards β·r of both labels, and whether the reward is on the right side of the
    estimate.
    """

    def objective(
        model: torch.nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, Metrics]:
        scores, lengths = pair_log_probs(
            model, batch["input_ids"][:, :1], batch["shift_labels"][:, :1]
        )
        scores, good = (scores - batch["reference"][:, :1])[:, 0], batch["desirable"]
        margin = torch.where(good, scores - batch["kl"], batch["kl"] - scores)
        weight = torch.where(good, align.desirable_weight, align.undesirable_weight)
        values = {
            "loss": weight * (1 - torch.sigmoid(align.beta * margin)),
            "accuracy": (margin.sign() + 1) / 2,
            "desirable": good.float(),
            "reward_desirable": align.beta * scores * good,
            "reward_undesirable": align.beta * scores * ~good,
        }
        is_row = lengths[:, 0] > 0  # evaluations pad batches by empty rows
        sums = {name: torch.where(is_row, value, 0.0).sum() for name, value in values.items()}
        return sums.pop("loss"), sums

    return objective


def kto_step(run: Run, step: int, learning_rate: float) -> StepResult:
    """Estimate the KL divergence on the answers of `step`, and take an optimizer step on them."""
    blocks: Any = run.data.train
    with run.batches.waiting():
        fill_reference(run, lambda: False)
        blocks.kl = divergence(run, blocks, run.batches.indices(step))
    result = train_step(run, step, learning_rate)
    accuracy = {"accuracy": result.metrics["accuracy"]}
    return result._replace(metrics=accuracy, figures={"kl": blocks.kl})


def evaluate_answers(run: Run, stopping: Callable[[], bool]) -> Evaluated | None:
    """The loss on held-out answers, the share whose reward is on the right side, and the margin
    between the mean rewards of both labels if both occur; the same on all processes.
    """
    if not fill_reference(run, stopping):
        return None
    blocks: Any = run.data.validation
    indices = evaluation_indices(blocks, run.config.eval.tokens)
    blocks.kl = divergence(run, blocks, indices)
    means = mean_metrics(run, indices, stopping)
    if means is None:
        return None
    share = means.pop("desirable")
    for name, part in (("reward_desirable", share), ("reward_undesirable", 1 - share)):
        reward = means.pop(name)
        if part > 0:
            means[name] = reward / part
    means["kl"] = blocks.kl
    line = f"held-out answers: loss {format_number(means['loss'], 4)}, "
    line += f"accuracy {means['accuracy']:.3f}"
    if 0 < share < 1:
        means["margin"] = means["reward_desirable"] - means["reward_undesirable"]
        line += f", margin {format_number(means['margin'], 4)}"
    metrics = {f"val/{name}": value for name, value in means.items()}
    return Evaluated(means["loss"], None, metrics, [line], [])


@torch.no_grad()
def divergence(run: Run, blocks: LabeledAnswers, indices: np.ndarray) -> float:
    """The mean log-ratio of the mismatched pairs of all processes, or 0 if it is negative."""
    accelerator, mesh, total = run.accelerator, run.mesh, torch.zeros(())
    size = run.batches.micro_batch_size
    with eval_mode(run.model):
        for _, batch in rank_batches(accelerator, mesh, blocks, indices, size, pad=True):
            sums, lengths = pair_log_probs(
                run.model, batch["input_ids"][:, 1:], batch["shift_labels"][:, 1:]
            )
            ratios = torch.where(lengths > 0, sums - batch["reference"][:, 1:], 0.0)
            total = total.to(ratios.device) + ratios.sum()
    return max(0.0, sum_over_ranks(accelerator, mesh, total).item() / len(indices))
