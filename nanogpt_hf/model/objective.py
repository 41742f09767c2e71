"""Objectives: (model, batch) -> the summed loss of a micro-batch and further metrics.

A row without targets (all of `shift_labels` -100) adds nothing: evaluations pad batches by such.
"""

from collections.abc import Callable

import torch

Metrics = dict[str, torch.Tensor]  # sums over the micro-batch's targets, by name
Objective = Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, Metrics]]


def next_token_loss(
    model: torch.nn.Module, batch: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, Metrics]:
    """Cross-entropy of the next token, summed over the batch's targets, in nats."""
    return model(**batch, num_items_in_batch=1, skip_logits=True, use_cache=False).loss, {}
