"""Head of a GPT, and what a model makes of its hidden states: logits, or the loss of its labels.

From a forward pass to the loss: `with_loss` -> `summed_loss` -> `Head.forward` -> `whole_loss`,
`chunked_loss` or `recomputed_loss` (loss_gpt.py). Imports only its neighbors, so that these pages
can be read and copied alone.

Shapes in comments: B rows, T positions, C n_embd, V vocabulary, N = B·T.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .loss_gpt import (
    IGNORED,
    cap_logits,
    chunk_loss,
    chunk_row_loss,
    chunked_loss,
    recomputed_loss,
    rows_of_a_chunk,
    token_losses,
    whole_loss,
)

# The cache of keys and values, as an argument of a model and its blocks and in their outputs.
# transformers 5.24 has renamed it.
_FIELDS = CausalLMOutputWithPast.__dataclass_fields__
CACHE = "cache" if "cache" in _FIELDS else "past_key_values"


class Head(nn.Linear):
    """Last layer: hidden (..., C) -> logits (..., V), or the summed loss if targets are given.

    The loss is computed in this forward pass because FSDP2 and ZeRO-3 gather the whole weight
    for it.
    """

    # The loss of a chunk, and of all rows at once; `compile_loss` gives a head compiled ones.
    chunk_loss: Any = staticmethod(chunk_loss)
    whole_loss: Any = staticmethod(whole_loss)
    # Without targets, logits are returned before they are capped: the model caps them.
    softcap: float | None = None

    @classmethod
    def of(cls, layer: nn.Linear, softcap: float | None = None) -> "Head":
        """A head with the parameters of `layer`."""
        # On the meta device, since its own parameters are replaced at once.
        has_bias = layer.bias is not None
        head: Any = cls(layer.in_features, layer.out_features, has_bias, device="meta")
        head.weight = layer.weight
        head.bias = layer.bias
        head.softcap = softcap
        return head

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden, targets=None, vocab_size=0, row_loss=None
    ):
        compute = super().forward
        if targets is None:
            return compute(hidden)
        if first_pass := getattr(row_loss, "first_pass", None):
            # In the same call of the layer: FSDP2 would take a second one for another forward pass.
            with torch.no_grad():
                Head.forward(self, hidden, targets, vocab_size, first_pass)
        # An evaluation and another loss than the cross-entropy do not call the compiled functions.
        # The losses of single tokens have no common gradient before the caller has combined them.
        is_training = torch.is_grad_enabled() and row_loss is not token_losses
        is_compiled = self.chunk_loss is not chunk_loss and row_loss is None and is_training
        size = rows_of_a_chunk(len(hidden), vocab_size, hidden.device.type, is_compiled=is_compiled)
        if size == len(hidden):
            loss = self.whole_loss if is_compiled else whole_loss
            inputs = (hidden, self.weight, self.bias)
            return loss(*inputs, targets, vocab_size, self.softcap, row_loss)
        if is_training:
            loss_of = self.chunk_loss if row_loss is None else chunk_row_loss
            if self.softcap is not None:
                loss_of = partial(loss_of, softcap=self.softcap)
            return chunked_loss(
                hidden, self.weight, self.bias, targets, vocab_size, size, loss_of, row_loss
            )
        return recomputed_loss(compute, hidden, targets, vocab_size, self.softcap, row_loss)


def compile_loss(head: nn.Module | None, **options: Any) -> None:
    """Compile the product with our head and the cross-entropy; `options` are torch.compile's."""
    if isinstance(head, Head):
        head.chunk_loss = torch.compile(chunk_loss, **options)
        head.whole_loss = torch.compile(whole_loss, **options)


def batch_loss(model, input_ids, targets, position_ids):
    """(B, T) tokens, targets and positions, or None -> their summed loss; compiled, it is one graph
    from the tokens to the loss.
    """
    out = model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    return model.summed_loss(out.last_hidden_state.flatten(0, 1), targets.flatten())


class SummedLoss(PreTrainedModel if TYPE_CHECKING else object):
    """Mixin that computes logits and loss from hidden states, for a causal LM whose logits are the
    product with its head, capped or not.
    """

    config: Any
    softcap: float | None = None
    # `batch_loss`, compiled, of a model that is compiled with its loss.
    compiled_batch_loss: Any = None

    def one_graph_output(self, input_ids, targets, position_ids, num_items_in_batch):
        """The output of a call with these arguments alone if it is one compiled graph, or None: in
        training, if all logits are computed at once.

        A graph of several chunks might compute the logits of the next before it frees these.
        """
        if self.compiled_batch_loss is None or targets is None or not torch.is_grad_enabled():
            return None
        rows = targets.numel()
        device = input_ids.device.type
        chunk = rows_of_a_chunk(rows, self.config.vocab_size, device, is_compiled=True)
        if rows != chunk or not isinstance(self.get_output_embeddings(), Head):
            return None
        loss = self.compiled_batch_loss(self, input_ids, targets, position_ids)
        return CausalLMOutputWithPast(loss=loss_per_item(loss, targets, num_items_in_batch))

    def summed_loss(self, hidden, targets, row_loss=None):
        """(N, C), (N,) -> sum of the cross-entropies in float32, without N × V logits in memory.

        A head that replaces ours (an adapter, a quantized one) computes only logits.
        """
        head: Any = self.get_output_embeddings()
        size = self.config.vocab_size
        if isinstance(head, Head):
            return head(hidden, targets, size, row_loss)
        if first_pass := getattr(row_loss, "first_pass", None):
            with torch.no_grad():
                recomputed_loss(head, hidden, targets, size, self.softcap, first_pass)
        return recomputed_loss(head, hidden, targets, size, self.softcap, row_loss)

    def logits_of_rows(self, logits_to_keep=0, **inputs):
        """A function that computes the logits (R, V) of some of the B · T rows, or of the B · K
        rows of the last K = `logits_to_keep` positions.
        """
        hidden = self.base_model(**inputs, use_cache=False).last_hidden_state
        hidden = hidden[:, -logits_to_keep:].flatten(0, 1)
        head: Any = self.get_output_embeddings()
        size = self.config.vocab_size
        return lambda rows: cap_logits(head(hidden[rows]), self.softcap)[:, :size]

    def row_losses(self, input_ids, targets):
        """(B, T), (B, T) -> the summed loss of each row, (B,)."""
        hidden = self.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return torch.stack([self.summed_loss(*row) for row in zip(hidden, targets, strict=True)])

    def with_loss(
        self, out, shift_labels, num_items_in_batch, skip_logits, logits_to_keep, row_loss
    ):
        """Make the model's output: the loss if there are labels, and logits.

        The loss is the mean over the labels that are counted, or their sum divided by
        `num_items_in_batch`; `row_loss` replaces the cross-entropy. Fewer labels than positions,
        (B, K), are the labels of the last K positions. `skip_logits` (default: when
        training on labels) omits the logits to save memory.
        """
        hidden = out.last_hidden_state  # (B, T, C)
        loss = None
        logits = None
        if skip_logits is None:
            skip_logits = self.training and shift_labels is not None
        if shift_labels is not None:
            targets = shift_labels.reshape(-1).to(hidden.device)  # (N,)
            labeled = hidden
            if shift_labels.shape[-1] < hidden.shape[1]:
                labeled = hidden[:, -shift_labels.shape[-1] :]
            loss = self.summed_loss(labeled.reshape(len(targets), -1), targets, row_loss)
            loss = loss_per_item(loss, targets, num_items_in_batch)
        if not skip_logits:
            # A number of last positions, or a tensor that lists positions.
            kept = logits_to_keep
            if isinstance(logits_to_keep, int):
                kept = slice(-logits_to_keep, None)
            head: Any = self.get_output_embeddings()
            # Without padded rows, so that they are never sampled and saving loses nothing.
            logits = cap_logits(head(hidden[:, kept]), self.softcap)[..., : self.config.vocab_size]
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            # A model without attention has no such field.
            **{name: getattr(out, name, None) for name in (CACHE, "hidden_states", "attentions")},
        )


def shifted_labels(labels, arguments):
    """Take `shift_labels` and `row_loss` out of the `arguments` and return them. Without
    shift_labels, the `labels` are shifted by one.
    """
    # They are no arguments of forward, since the Trainer would require them in every batch.
    shift_labels = arguments.pop("shift_labels", None)
    row_loss = arguments.pop("row_loss", None)
    if shift_labels is None and labels is not None:
        # The target at position t is token t + 1; the last position has none.
        shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    return shift_labels, row_loss


def loss_per_item(loss, targets, num_items_in_batch) -> Any:
    """Divide a summed loss by `num_items_in_batch`, or by the number of counted targets."""
    items = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    # A tensor is not compared, since the host would wait for its value.
    is_one = not torch.is_tensor(items) and items == 1
    return loss if is_one else loss / items
