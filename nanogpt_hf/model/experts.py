"""Mixtures of experts of transformers: which modules hold experts, their products and balance.

Shapes in comments: B rows, T positions, E experts in a layer, k experts for a token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

_OWN = "grouped_mm_autocast"


def experts_of(module: torch.nn.Module) -> list[Any]:
    """Modules that hold experts: transformers' interface for their products marks them.

    Their weights have one matrix per expert, (E, rows, columns).
    """
    return [part for part in module.modules() if hasattr(part, "is_concatenated")]


class View:
    """A module of experts with changed parameters, and with `others` in place of attributes."""

    def __init__(self, experts: Any, change: Callable[[torch.Tensor], torch.Tensor], **others: Any):
        vars(self).update(others, experts=experts, change=change)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.experts, name)
        return self.change(value) if torch.is_tensor(value) else value


def products(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: Any) -> Any:
    """transformers' grouped products, in autocast's dtype: torch does not cast their inputs.

    Notes the experts that were `chosen`, (B·T, k). distributed/expert_parallel.py sets `exchanged`,
    for experts that are shared by processes.
    """
    experts.chosen = chosen  # `routing_of` reads it after the forward pass
    device = hidden.device.type
    casts = device != "meta" and torch.is_autocast_enabled(device)
    if casts:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if exchanged := getattr(experts, "exchanged", None):
        return exchanged(hidden, chosen, weights)
    if casts:
        # Weights stay float32 in memory and are cast where they are used, as autocast does.
        experts = View(experts, lambda parameter: parameter.to(hidden.dtype))
    return grouped_mm_experts_forward(experts, hidden, chosen, weights)


ALL_EXPERTS_FUNCTIONS.register(_OWN, products)


def use_own_products(model: PreTrainedModel) -> bool:
    """Let the experts of a model, if it has any, compute by `products`. Return whether it has."""
    if has_experts := bool(experts_of(model)):
        model.set_experts_implementation(_OWN)
    return has_experts


@contextmanager
def shapes_only() -> Iterator[None]:
    """Context in which torch's grouped product takes tensors without values: all tokens go to the
    first expert. It keeps as much for the backward pass as the real product.
    """
    # rows (N, C), weights (E, C, F), offs (E,): ends of the rows of each expert.
    product = F.grouped_mm
    F.grouped_mm = lambda rows, weights, offs: rows @ weights[0]
    try:
        yield
    finally:
        F.grouped_mm = product


class Routing(NamedTuple):
    """Routing of a micro-batch to its experts: sums over its targets, so that they add up over
    micro-batches and processes.
    """

    balance: torch.Tensor  # the loss that is smallest, 1 per target, if all experts have equal work
    entropy: torch.Tensor  # entropy of the router's softmax in nats, mean over layers
    load: torch.Tensor  # (layers, E): targets that an expert has, divided by k


def routing_of(model: PreTrainedModel, logits: Any, counted: torch.Tensor) -> Routing:
    """Routing of the last forward pass, for its routers' `logits`, (B·T, E) of each layer.

    `counted` (B, T) marks the targets. The balance loss of a sequence is DeepSeek-V3's
    (arXiv:2412.19437, equations 17 to 20), for the softmax of the logits, times its targets:
    E · Σ_e (share of choices that are e) · (Σ_t probability of e), mean over layers.
    """
    experts = experts_of(model)
    counted = counted.to(logits[0].device)
    balance = torch.zeros((), device=counted.device)
    entropy = torch.zeros((), device=counted.device)
    loads = []
    for module, scores in zip(experts, logits, strict=True):
        log_p = scores.float().view(*counted.shape, -1).log_softmax(-1)  # (B, T, E)
        p = log_p.exp() * counted[..., None]
        chosen = module.chosen.view(*counted.shape, -1)  # (B, T, k) numbers of experts
        # 1 for each chosen expert, (B, T, E); rows that are no targets have none.
        choices = torch.zeros_like(p).scatter_(-1, chosen, 1.0) * counted[..., None]
        load = choices.sum(1) / chosen.shape[-1]  # (B, E)
        share = load / counted.sum(1, keepdim=True).clamp(min=1)
        # The choices have no gradient, so the balance loss learns by the probabilities p alone.
        balance = balance + p.shape[-1] * (share * p.sum(1)).sum() / len(experts)
        entropy = entropy - (p.detach() * log_p.detach()).sum() / len(experts)
        loads.append(load.sum(0))
    return Routing(balance, entropy, torch.stack(loads))


def load_figures(load: torch.Tensor) -> dict[str, float]:
    """Figures of a step's load, (layers, E): the largest of an expert, as a multiple of equal work,
    and the number of experts that no token has chosen.
    """
    # Each layer's loads add up to the targets, so equal work is their sum by the number of experts.
    largest = load.max() * load.shape[1] / load[0].sum()
    return {"expert_load_max": largest.item(), "unused_experts": int((load == 0).sum())}
