"""Objectives: (model, batch) -> the summed loss of a micro-batch and further metrics.

A row without targets (all of `shift_labels` -100) adds nothing: evaluations pad batches by such.
"""

from collections.abc import Callable

import torch

Metrics = dict[str, torch.Tensor]  # sums over the micro-batch's targets, by name
Objective = Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, Metrics]]


def next_token_loss(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], balance: float = 0.0
) -> tuple[torch.Tensor, Metrics]:
    """Cross-entropy of the next token, summed over the batch's targets, in nats.

    In training, a mixture of experts adds `balance` times its balance loss.
    """
    out = model(**batch, num_items_in_batch=1, skip_logits=True, use_cache=False)
    routing = getattr(out, "routing", None)
    if routing is None:
        assert not (balance and torch.is_grad_enabled()), "its routers do not show their logits"
        return out.loss, {}
    loss = out.loss + balance * routing.balance if balance else out.loss
    return loss, {
        "balance_loss": routing.balance,
        "router_entropy": routing.entropy,
        "expert_load": routing.load,
    }
