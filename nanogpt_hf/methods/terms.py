"""Loss on text: the cross-entropy of the next token, and the terms that a recipe adds to it."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.methods.distillation import DIVERGENCE
from nanogpt_hf.methods.slices import sum_of_slices
from nanogpt_hf.methods.term import RowValues, Term
from nanogpt_hf.model.architecture import Metrics, Objective
from nanogpt_hf.model.loss_gpt import IGNORED

# Mixtures of experts: how unequal the work of the experts is (model/experts.py).
BALANCE = Term(
    "balance_loss",
    knob="optim.balance_loss",
    weight=lambda config: config.optim.balance_loss,
    output=lambda out: out.routing.balance,
)
# A recipe may choose any of them; all that it chooses are added.
TERMS = [DIVERGENCE, BALANCE]
# The metric of the cross-entropy alone, which a loss with terms of rows has. It compares with the
# validation loss, and the loss of a step does not.
CROSS_ENTROPY = "cross_entropy"


def text_objective(config: Config, data: PreparedData) -> Objective:
    """Build the objective of a recipe on text: the cross-entropy with the chosen terms."""
    chosen = [term for term in TERMS if term.is_chosen(config)]
    of_rows = [term for term in chosen if term.rows]
    of_output = [term for term in chosen if term.output]
    # Without distillation the cross-entropy counts whole.
    share = math.prod(term.share(config) for term in of_rows)

    def objective(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        # Without terms the validation losses of all recipes compare.
        if not torch.is_grad_enabled():
            return next_token_loss(model, batch)
        if not of_rows:
            # The model has a faster cross-entropy of its own, if nothing else needs the logits.
            loss, metrics, out = _forward(model, batch)
        else:
            rows = [(term, term.rows(config, data, model, batch)) for term in of_rows if term.rows]
            row_loss = SummedTerms(config, share, rows)
            loss, metrics, out = _forward(model, batch | {"row_loss": row_loss})
            metrics |= row_loss.sums
        for term in of_output:
            assert term.output
            value = term.output(out)
            loss = loss + term.weight(config) * value
            metrics[term.name] = value
        return loss, metrics

    return objective


def loss_parts(config: Config) -> list[str]:
    """Names of the metrics whose weighted sum is the loss of a step on text.

    Empty if the loss is the model's own cross-entropy, which then has no metric of its own.
    """
    of_rows = [term.name for term in TERMS if term.rows and term.is_chosen(config)]
    of_output = [term.name for term in TERMS if term.output and term.is_chosen(config)]
    return [CROSS_ENTROPY, *of_rows, *of_output] if of_rows else []


def next_token_loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
    """Cross-entropy of the next token, summed over the batch's targets, in nats."""
    return _forward(model, batch)[:2]


def _forward(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Metrics, Any]:
    """Compute the summed loss of a batch, metrics of its experts, and the model's output."""
    out = model(**batch, num_items_in_batch=1, skip_logits=True, use_cache=False)
    routing = getattr(out, "routing", None)
    if routing is None:
        return out.loss, {}, out
    # Logged with any weight of the balance loss, 0 too: they show whether experts idle.
    metrics = {
        "balance_loss": routing.balance,
        "router_entropy": routing.entropy,
        "expert_load": routing.load,
    }
    return out.loss, metrics, out


class SummedTerms:
    """Loss of a micro-batch's rows from their logits: cross-entropy and terms.

    The model calls it for each chunk of rows, in place of its own cross-entropy. `sums` has the
    value of each part, summed over the targets so far.
    """

    def __init__(self, config: Config, share: float, terms: Sequence[tuple[Term, RowValues]]):
        self.config = config
        self.share = share
        self.terms = terms
        self.sums: Metrics = {}

    def __call__(self, chunk: slice, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum the loss of some rows from their logits (R, V) and targets (R,)."""
        return sum_of_slices(self._loss, chunk, logits, targets)

    def _loss(self, chunk: slice, logits: Tensor, targets: Tensor) -> Tensor:
        # Sums of exponentials over a vocabulary need float32, whatever the model computes in.
        logits = logits.float()
        counts = targets != IGNORED
        cross_entropy = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        self._add(CROSS_ENTROPY, cross_entropy)
        loss = self.share * cross_entropy
        for term, values_of in self.terms:
            value = values_of(chunk, logits).where(counts, 0.0).sum()
            self._add(term.name, value)
            loss = loss + term.weight(self.config) * value
        return loss

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0) + value.detach()
