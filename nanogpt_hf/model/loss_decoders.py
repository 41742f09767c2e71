"""Our loss for the causal LMs of transformers, which holds no logits of the whole batch.

One forward pass of the model's own class on a tiny head decides whether our loss computes the
same: a product with the head, with or without soft-capping. If not, the cross-entropy is computed
from the model's own logits, which are then all in memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    masking_utils,
)
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from nanogpt_hf.model.experts import experts_of, routing_of, use_own_products
from nanogpt_hf.model.head_gpt import Head, SummedLoss, shifted_labels
from nanogpt_hf.model.loss_gpt import IGNORED, cap_logits, cross_entropy


def standard_class(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Class of transformers that AutoModelForCausalLM builds."""
    standard: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return standard


@cache
def model_class_of(config_class: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Class of transformers with our loss. It has the same name, which config.json records,
    and module, in whose source transformers looks for what it supports.
    """
    standard = standard_class(config_class)
    names = {"__module__": standard.__module__}
    return type(standard.__name__, (_WithSummedLoss, standard), names)


class _WithSummedLoss(SummedLoss, PreTrainedModel):
    """Mixin for a causal LM of transformers: the loss of loss_gpt.py, and a vocabulary that is
    padded in memory.

    `config.padded_vocab_size`, if set, is the number of rows of embedding and head; the added
    ones are never predicted.
    """

    def __init__(self, config: PreTrainedConfig):
        # transformers' classes read the rows of embedding and head from vocab_size.
        vocab_size = config.vocab_size
        config.vocab_size = getattr(config, "padded_vocab_size", vocab_size)
        super().__init__(config)
        config.vocab_size = vocab_size
        # Replace the class's products of experts, which know no autocast, and its head, which
        # computes no loss.
        self.has_experts = use_own_products(self)
        self.softcap = getattr(config, "final_logit_softcapping", None)
        self._is_linear = _head_is_linear(config, self.softcap)
        if self._is_linear:
            head: Any = self.get_output_embeddings()
            self.set_output_embeddings(Head.of(head, self.softcap))

    def row_losses(self, input_ids, targets):
        if self._is_linear:
            with _no_search_for_packing(None):
                return super().row_losses(input_ids, targets)
        # One text after another: their logits are never in memory together.
        losses = [
            self(ids[None], shift_labels=row[None], num_items_in_batch=1).loss
            for ids, row in zip(input_ids, targets, strict=True)
        ]
        return torch.stack(losses)

    def logits_of_rows(self, logits_to_keep=0, **inputs):
        with _no_search_for_packing(inputs.get("position_ids")):
            if self._is_linear:
                return super().logits_of_rows(logits_to_keep, **inputs)
            out = self(**inputs, use_cache=False, logits_to_keep=logits_to_keep)
            logits = out.logits.flatten(0, 1)
            return lambda rows: logits[rows]

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        labels=None,
        num_items_in_batch=None,
        skip_logits=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """Logits and loss as in GPTForCausalLM.forward.

        Models whose head does more than a (capped) product keep their own logits.
        """
        shift_labels, row_loss = shifted_labels(labels, kwargs)
        if shift_labels is None:
            # Generation, or a caller with its own loss: transformers' forward as it is.
            out = super().forward(
                input_ids=input_ids, use_cache=use_cache, logits_to_keep=logits_to_keep, **kwargs
            )
            out.logits = self._kept(out.logits, logits_to_keep)
            return out
        # The model without its head if we can compute the loss from the hidden states.
        # Labels of the last positions need no other logits.
        kept = shift_labels.shape[-1]
        compute = self.base_model
        if not self._is_linear:
            compute = partial(super().forward, logits_to_keep=kept)
        routes = self.training and self.has_experts
        if routes:
            kwargs["output_router_logits"] = True
        with _no_search_for_packing(kwargs.get("position_ids")):
            out = compute(input_ids=input_ids, use_cache=bool(use_cache), **kwargs)
        if self._is_linear:
            result = self.with_loss(
                out, shift_labels, num_items_in_batch, skip_logits, logits_to_keep, row_loss
            )
            return self._with_routing(result, out, shift_labels) if routes else result
        out.logits = self._kept(out.logits, kept)
        targets = shift_labels.reshape(-1).to(out.logits.device)  # (N,)
        items = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        logits = out.logits.flatten(0, 1)
        if first_pass := getattr(row_loss, "first_pass", None):
            with torch.no_grad():
                first_pass(slice(None), logits, targets)
        out.loss = (row_loss or cross_entropy)(slice(None), logits, targets) / items
        return self._with_routing(out, out, shift_labels) if routes else out

    def _kept(self, logits, kept):
        """The logits that were asked for, without the rows that pad the vocabulary.

        Some models (xlstm) do not know logits_to_keep, and compute those of all positions.
        """
        if isinstance(kept, int):
            logits = logits[:, -kept:]
        return logits[..., : self.config.vocab_size]

    def _with_routing(self, result, out, shift_labels):
        """Output with `routing`, if all routers show logits, and all positions have labels."""
        logits = getattr(out, "router_logits", None)
        if not logits or len(logits) != len(experts_of(self)):
            return result
        if logits[0].shape[:-1].numel() != shift_labels.numel():
            return result
        routing = routing_of(self, logits, shift_labels != IGNORED)
        return _RoutedOutput(loss=result.loss, logits=result.logits, routing=routing)


@dataclass
class _RoutedOutput(CausalLMOutputWithPast):
    routing: Any = None


@contextmanager
def _no_search_for_packing(position_ids: torch.Tensor | None) -> Iterator[None]:
    """Context for a forward pass: a caller without position ids packs no conversations.

    transformers' models look for restarts also in positions that they compute themselves, and
    the host waits for it.
    """
    # A private function of transformers, which has no argument for this (CONTRIBUTING.md).
    search = masking_utils.find_packed_sequence_indices
    if position_ids is None:
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search


class _Hidden(nn.Module):
    """A base model whose last hidden state is fixed."""

    def forward(self, *args: Any, **kwargs: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=_wave(1, 4, 8))


def _wave(*shape: int) -> torch.Tensor:
    """Fixed values between -3 and 3, without a random generator; on the CPU also while models
    are built elsewhere.
    """
    count = torch.Size(shape).numel()
    return 3 * torch.sin(torch.arange(count, dtype=torch.float32, device="cpu") ** 1.5).view(shape)


@torch.no_grad()
def _head_is_linear(config: PreTrainedConfig, softcap: float | None) -> bool:
    """Whether the logits of a model are the product with its head, capped by `softcap`: its
    forward on a tiny head.
    """
    # The class without its __init__, which would build the whole model: only its forward runs.
    standard = standard_class(type(config))
    probe: Any = standard.__new__(standard)
    nn.Module.__init__(probe)
    probe.config = config
    probe.vocab_size = 16
    head: Any = nn.utils.skip_init(nn.Linear, 8, 16, bias=False, device="cpu", dtype=torch.float32)
    head.weight.copy_(_wave(16, 8))
    setattr(probe, standard.base_model_prefix, _Hidden())
    probe.lm_head = head
    try:
        logits = probe(
            input_ids=torch.zeros(1, 4, dtype=torch.long, device="cpu"), return_dict=True
        ).logits
    except Exception:  # it reads more of the model than its head
        return False
    expected = cap_logits(head(_wave(1, 4, 8)), softcap)
    return logits.shape == expected.shape and torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)
