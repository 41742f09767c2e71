"""Losses of preference training: of pairs (DPO, IPO, hinge, SimPO, ORPO), and of answers that are
labeled alone (KTO).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanogpt_hf.config.schema import AlignSection, Config
from nanogpt_hf.methods.pairs import NO_TARGET
from nanogpt_hf.model.architecture import Metrics, Objective
from nanogpt_hf.model.loss_gpt import token_losses

Batch = dict[str, Tensor]


class PairLoss(NamedTuple):
    """A loss of pairs: a row of LOSSES."""

    # From the section `align` and the scores (n,) of chosen and rejected answers, the losses (n,).
    loss: Callable[[AlignSection, Tensor, Tensor], Tensor]
    # Scores are differences to the model before training.
    uses_reference: bool = True
    # Scores are means over the tokens of an answer, not sums.
    per_token: bool = False


def _dpo(align: AlignSection, chosen: Tensor, rejected: Tensor) -> Tensor:
    x = align.beta * (chosen - rejected)
    smoothing = align.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(x) - smoothing * F.logsigmoid(-x)


def _simpo(align: AlignSection, chosen: Tensor, rejected: Tensor) -> Tensor:
    margin = 0.5 if align.margin is None else align.margin
    return -F.logsigmoid(align.beta * (chosen - rejected) - margin)


def _orpo(align: AlignSection, chosen: Tensor, rejected: Tensor) -> Tensor:
    return -chosen - align.beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(score: Tensor) -> Tensor:
    """log(p / (1 - p)) of answers whose log-probability is `score`."""
    # An answer of probability 1 has infinite odds.
    score = score.clamp(max=-1e-7)
    return score - torch.log(-torch.expm1(score))


# c and r are the scores of the chosen and the rejected answer: the log-probabilities of their
# tokens, summed or averaged, minus the same of the model before training if the row says so.
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
    """Build the objective: the summed loss of the pairs of a batch, which `train_step` divides by
    the pairs of a step.

    Metrics: the implicit rewards, β times the scores of the answers, and how often the chosen
    answer has the higher one.
    """
    row = LOSSES[align.loss or "dpo"]

    def objective(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        # Both are (n, 2): the chosen answer is side 0.
        scores, lengths = pair_log_probs(model, batch["input_ids"], batch["shift_labels"])
        if row.uses_reference:
            scores = scores - batch["reference"]
        if row.per_token:
            scores = scores / lengths.clamp(min=1)
        # Evaluations pad a batch by rows without tokens. Any score will do for them.
        is_pair = lengths[:, 0] > 0
        chosen, rejected = torch.where(is_pair[:, None], scores, -1.0).unbind(1)
        values = {
            "loss": row.loss(align, chosen, rejected),
            # Equal scores count half.
            "accuracy": ((chosen - rejected).sign() + 1) / 2,
            "reward_chosen": align.beta * chosen,
            "reward_rejected": align.beta * rejected,
        }
        return _summed(values, is_pair)

    return objective


def kto_objective(align: AlignSection) -> Objective:
    """Build the objective of KTO: the sum of w·(1 - σ(±β·(r - kl))) over the answers of a batch.

    r is the log-ratio of the answer to the model before training; the label of the answer decides
    the weight w and the sign (Ethayarajh et al. 2024, arXiv:2402.01306).

    Metrics: rewards β·r of both labels, and whether the reward is on the right side of the
    estimate.
    """

    def objective(model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        # Side 0 is the answer. Side 1, the mismatched pair, was used for batch["kl"].
        scores, lengths = pair_log_probs(
            model, batch["input_ids"][:, :1], batch["shift_labels"][:, :1]
        )
        scores = (scores - batch["reference"][:, :1])[:, 0]
        good = batch["desirable"]
        margin = torch.where(good, scores - batch["kl"], batch["kl"] - scores)
        weight = torch.where(good, align.desirable_weight, align.undesirable_weight)
        values = {
            "loss": weight * (1 - torch.sigmoid(align.beta * margin)),
            "accuracy": (margin.sign() + 1) / 2,
            "desirable": good.float(),
            "reward_desirable": align.beta * scores * good,
            "reward_undesirable": align.beta * scores * ~good,
        }
        loss, sums = _summed(values, lengths[:, 0] > 0)
        if torch.is_grad_enabled():
            # A step may have answers of one label only, so the others have no mean.
            sums = {"accuracy": sums["accuracy"]}
        return loss, sums

    return objective


def _summed(values: Batch, is_row: Tensor) -> tuple[Tensor, Metrics]:
    """Sum loss and metrics over the rows that are no padding."""
    sums = {name: torch.where(is_row, value, 0.0).sum() for name, value in values.items()}
    return sums.pop("loss"), sums


def pair_log_probs(
    model: nn.Module, input_ids: Tensor, shift_labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of answers, summed over their tokens, and count these: (n, 2).

    Both inputs are (n, 2, T), or (n, 1, T) of one side. Sequences are padded at their end, which
    needs no mask. The logits are in memory for a chunk of tokens at a time.
    """
    # (n, 2, T) -> (2n, T): both sides are rows of one forward pass.
    rows = input_ids.flatten(0, 1)
    labels = shift_labels.flatten(0, 1)
    # The cross-entropy of a token is its negative log-probability.
    options = {"num_items_in_batch": 1, "row_loss": token_losses, "skip_logits": True}
    losses = model(input_ids=rows, shift_labels=labels, use_cache=False, **options).loss
    shape = input_ids.shape[:2]
    counts = (labels != NO_TARGET).sum(1)
    return -losses.view(labels.shape).sum(1).view(shape), counts.view(shape)


def needs_reference(config: Config) -> bool:
    """Whether a run compares with the model before training, in preference training."""
    name = config.align.loss
    # KTO is no row of LOSSES, and has a reference.
    return name is not None and (name not in LOSSES or LOSSES[name].uses_reference)
