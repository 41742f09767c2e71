"""Attention of packed documents and conversations, which needs no mask of all pairs of positions.

On CUDA torch's flex attention skips the blocks of pairs that are of several documents. On a CPU,
where flex has no backward pass in torch 2.13, each document of a long sequence attends alone. The
functions are registered in transformers' table of attention functions.

Shapes in comments: B rows, H heads, T positions, D values of a head.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from nanogpt_hf.model.config_fields import size_of

FLEX_DEVICES = ["cuda"]
MIN_HEAD = 16  # values of a head in flex attention's kernels
MIN_POSITIONS = 512  # on a CPU, shorter sequences are as fast with a mask (docs/performance.md)


@dataclass(frozen=True)
class DocumentMask:
    """Where documents begin, in place of a mask of all pairs of positions.

    transformers hands it from `PackedAttention.build_mask` through the layers to
    `PackedAttention.attend`, as it would a tensor.
    """

    begins: list[list[int]]  # each row's first positions of documents, without 0


def attend_apart(model: PreTrainedModel) -> None:
    """Let packed documents attend without a mask where that is possible, in place.

    The mask stays on other devices, in training with dropout, in models that transformers does not
    run with flex attention, with heads too small for it, and on a CPU with windows of attention.
    """
    config: Any = model.config
    heads = size_of(config, "num_attention_heads", 1)
    if (
        not model._supports_flex_attn
        or (size_of(config, "head_dim") or config.hidden_size // heads) < MIN_HEAD
        or hasattr(config, "keep_window_size")  # each layer changes the mask
        or any("sinks" in name for name, _ in model.named_parameters())  # not on CPUs
    ):
        return
    has_dropout = any("drop" in knob and value for knob, value in config.to_dict().items())
    attention = PackedAttention(config._attn_implementation, has_dropout)
    ALL_ATTENTION_FUNCTIONS.register(attention.name, attention.attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(attention.name, attention.build_mask)
    model.set_attn_implementation(attention.name)


class PackedAttention:
    """An attention function of transformers and its mask, for rows of packed documents.

    If documents cannot attend apart, function and mask of `inner` are used.
    """

    def __init__(self, inner: str, has_dropout: bool):
        self._inner = inner
        self._has_dropout = has_dropout
        # Models of a name share the functions.
        self.name = f"documents_{inner}{'_evaluated' * has_dropout}"

    def build_mask(self, **options: Any) -> Any:
        """Mask of a batch: flex attention's blocks, a DocumentMask, or what `inner` takes."""
        if self._packs(options):
            device = torch.device(options["device"]).type
            if device in FLEX_DEVICES:
                return _block_mask(options)
            if device == "cpu" and self._inner != "eager" and _is_long_and_whole(options):
                documents = _document_mask(options)
                if documents is not None:
                    return documents
        return ALL_MASK_ATTENTION_FUNCTIONS[self._inner](**options)

    def _packs(self, options: dict[str, Any]) -> bool:
        """Whether rows are read from their first token, with documents in them."""
        # transformers does not skip the mask of a packed row, so it does not allow that here.
        packs = not options.get("allow_is_causal_skip", True) and not options.get("use_vmap")
        # Flex attention has no dropout.
        if self._has_dropout and torch.is_grad_enabled():
            packs = False
        has_padding = options.get("attention_mask") is not None
        return packs and not has_padding and options["kv_length"] == options["q_length"] > 1

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        """(B, H, T, D) -> (B, T, H, D), as all attention functions of transformers."""
        if isinstance(attention_mask, BlockMask):
            return _attend_by_blocks(module, query, key, value, attention_mask, **options)
        own: Any = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
        function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(self._inner, own)
        if isinstance(attention_mask, DocumentMask):
            qkv = (query, key, value)
            return _attend_by_documents(function, module, qkv, attention_mask, options), None
        return function(module, query, key, value, attention_mask, **options)


# On CUDA: flex attention, which skips blocks of pairs.


def _block_mask(options: dict[str, Any]) -> BlockMask:
    """Find the blocks of 128 x 128 pairs of positions with pairs that see each other."""
    make: Any = torch.compile(create_block_mask)  # else it computes all pairs
    length = options["q_length"]
    return make(
        options["mask_function"],
        options["batch_size"],
        None,  # the same for all heads
        length,
        length,
        device=options["device"],
    )


def _attend_by_blocks(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    device = query.device.type
    qkv = (query, key, value)
    # autocast knows the fused kernels and casts their inputs, but does not know flex attention.
    if torch.is_autocast_enabled(device):
        qkv = (x.to(torch.get_autocast_dtype(device)) for x in qkv)
    flex: Any = ALL_ATTENTION_FUNCTIONS["flex_attention"]
    return flex(module, *qkv, mask, **options)


# On a CPU: one document after another.


def _is_long_and_whole(options: dict[str, Any]) -> bool:
    """Whether a row is so long that its documents are worth it, and has no window of attention."""
    length = options["q_length"]
    window = options.get("local_size") or length
    return length >= MIN_POSITIONS and window >= length


def _document_mask(options: dict[str, Any]) -> DocumentMask | None:
    """Documents of a batch; None in a compiled model, whose mask has no values yet."""
    rows = torch.arange(options["batch_size"])[:, None]  # (B, 1)
    places = torch.arange(1, options["q_length"])  # (T - 1,)
    # A document begins at a token that does not see the one before it.
    sees = options["mask_function"](rows, 0, places, places - 1)  # (B, T - 1)
    if is_tracing(sees):
        return None
    return DocumentMask([(~row).nonzero()[:, 0].add(1).tolist() for row in sees])


def _attend_by_documents(
    function: Any,
    module: Any,
    qkv: tuple[torch.Tensor, ...],
    mask: DocumentMask,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention of each document alone, without a mask: T²/n pairs for n equal documents."""
    rows = []
    for row, begins in enumerate(mask.begins):
        # Query, key and value of the row, (1, H, T, D), each cut into its documents.
        documents = zip(*(x[row, None].tensor_split(begins, 2) for x in qkv), strict=True)
        alone = [function(module, *document, None, **options)[0] for document in documents]
        rows.append(torch.cat(alone, 1))  # (1, T, H, D)
    return torch.cat(rows)
