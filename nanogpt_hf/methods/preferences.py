"""Preference training: on pairs of a chosen and a rejected answer, or on answers that are labeled
alone.

A step's loss is the mean over its pairs or answers.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from nanogpt_hf.config import methods as recipes
from nanogpt_hf.config.schema import AlignSection
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.distributed.accelerator import sum_over_ranks
from nanogpt_hf.evaluation.loss import eval_mode, evaluation_indices
from nanogpt_hf.formatting import format_number
from nanogpt_hf.methods.method import Method
from nanogpt_hf.methods.pairs import (
    LabeledAnswers,
    full_answers,
    load_answers,
    load_pairs,
)
from nanogpt_hf.methods.preference_losses import (
    kto_objective,
    pair_log_probs,
    preference_objective,
)
from nanogpt_hf.methods.reference import batches_of, fill_reference, lost_reference
from nanogpt_hf.methods.run import Evaluated, Run
from nanogpt_hf.model.architecture import Metrics
from nanogpt_hf.runs.metrics import Score


def begin_pairs(run: Run, step: int) -> dict[str, float]:
    """Compute the log-probabilities before training, if a step needs them and has none yet."""
    fill_reference(run, lambda: False)
    return {}


def begin_answers(run: Run, step: int) -> dict[str, float]:
    """Estimate the KL divergence on the answers of `step`, which its loss compares with."""
    fill_reference(run, lambda: False)
    blocks: Any = run.data.train
    # One estimate for the whole step, the same on all processes: it is no part of the gradient.
    blocks.kl = divergence(run, blocks, run.batches.indices(step))
    return {"kl": blocks.kl}


def evaluate_pairs(run: Run, stopping: Callable[[], bool]) -> Evaluated | None:
    """Measure the loss on held-out pairs, how often the chosen answer has the higher reward, and
    the margin between the mean rewards; the same on all processes.
    """
    # An evaluation at step 0 comes before the first step, so the reference may not be there yet.
    if not fill_reference(run, stopping):
        return None
    blocks = run.data.validation
    indices = evaluation_indices(blocks, run.config.eval.tokens)
    means = _mean_metrics(run, blocks, indices, stopping)
    if means is None:
        return None
    return _evaluated("pairs", means, ("reward_chosen", "reward_rejected"))


def evaluate_answers(run: Run, stopping: Callable[[], bool]) -> Evaluated | None:
    """Measure the loss on held-out labeled answers, how often a reward is on the right side, and
    the margin between the mean rewards of good and bad ones, if both occur.
    """
    if not fill_reference(run, stopping):
        return None
    blocks: Any = run.data.validation
    indices = evaluation_indices(blocks, run.config.eval.tokens)
    blocks.kl = divergence(run, blocks, indices)
    means = _mean_metrics(run, blocks, indices, stopping)
    if means is None:
        return None
    means["kl"] = blocks.kl
    # The rewards of a label are summed over its own answers, and were divided by all of them.
    good = means.pop("desirable")
    sides = {"reward_desirable": good, "reward_undesirable": 1 - good}
    for name, share in sides.items():
        reward = means.pop(name)
        if share > 0:
            means[name] = reward / share
    return _evaluated("answers", means, tuple(sides))


def _evaluated(noun: str, means: dict[str, float], sides: tuple[str, ...]) -> Evaluated:
    """Describe an evaluation, with the margin between two rewards if both are known."""
    line = f"held-out {noun}: loss {format_number(means['loss'], 4)}, "
    line += f"accuracy {means['accuracy']:.3f}"
    if all(side in means for side in sides):
        means["margin"] = means[sides[0]] - means[sides[1]]
        line += f", margin {format_number(means['margin'], 4)}"
    metrics = {f"val/{name}": value for name, value in means.items()}
    return Evaluated(means["loss"], None, metrics, [line], [])


def _mean_metrics(
    run: Run, blocks: Blocks, indices: np.ndarray, stopping: Callable[[], bool]
) -> dict[str, float] | None:
    """Average the objective's loss and metrics over blocks; None if `stopping()` has ended it."""
    # Sums over this process's batches; one transfer from the device at the end.
    totals: Metrics = {}
    with torch.no_grad(), eval_mode(run.model):
        for _, batch in batches_of(run, blocks, indices):
            loss, metrics = run.objective(run.model, batch)
            for name, value in {"loss": loss, **metrics}.items():
                totals[name] = totals.get(name, 0) + value.float()
            if stopping():
                return None
    return {
        name: sum_over_ranks(run.accelerator, total).item() / len(indices)
        for name, total in totals.items()
    }


@torch.no_grad()
def divergence(run: Run, blocks: LabeledAnswers, indices: np.ndarray) -> float:
    """Estimate KTO's KL divergence: the mean log-ratio of mismatched pairs, or 0 if it is negative.

    An answer to another question says how far the model has moved as a whole.
    """
    total = torch.zeros((), device=run.accelerator.device)
    with eval_mode(run.model):
        for _, batch in batches_of(run, blocks, indices):
            # Side 1 of a block is the mismatched pair. Padding has no tokens, and counts 0.
            inputs = batch["input_ids"][:, 1:]
            labels = batch["shift_labels"][:, 1:]
            sums, lengths = pair_log_probs(run.model, inputs, labels)
            total += torch.where(lengths > 0, sums - batch["reference"][:, 1:], 0.0).sum()
    # A divergence is not negative; its estimate from few answers may be.
    return max(0.0, sum_over_ranks(run.accelerator, total).item() / len(indices))


PREFERENCES = Method(
    "preference training",
    recipe=recipes.PREFERENCES,
    load=load_pairs,
    objective=lambda config, _: preference_objective(config.align),
    evaluate=evaluate_pairs,
    describe_best=lambda score: f"best loss on held-out pairs {format_number(score, 4)}",
    score=Score("val/loss", "val loss", "loss on held-out preference pairs"),
    # Each loss has its own scale, which beta and the other weights change.
    scored_by=(*(f"align.{field.name}" for field in fields(AlignSection)), "data.tokenizer"),
    score_across=Score("val/accuracy", "accuracy", "accuracy on held-out preference pairs"),
    begin_step=begin_pairs,
    full_blocks=full_answers,
    noun="pairs",
    sequences=2,
    row_loss="tokens",
    resume_problem=lost_reference,
)
# `align.loss kto` reads rows with a label in place of pairs; all else is the same.
KTO = replace(
    PREFERENCES,
    name="preference training on single answers",
    is_meant=lambda config: config.align.loss == "kto",
    load=load_answers,
    objective=lambda config, _: kto_objective(config.align),
    evaluate=evaluate_answers,
    describe_best=lambda score: f"best loss on held-out answers {format_number(score, 4)}",
    score=Score("val/loss", "val loss", "loss on held-out labeled answers"),
    score_across=Score("val/accuracy", "accuracy", "accuracy on held-out labeled answers"),
    begin_step=begin_answers,
    noun="answers",
    # The mismatched pair of an answer is read without a gradient.
    sequences=1,
    forward_only=lambda config: 1,
)
