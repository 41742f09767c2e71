"""Attention written out for bfloat16 on CPUs, where torch's fused kernel has a slow backward pass.

Forward and backward of one layer of 12 sequences of 64 tokens, 4 heads of 32, on one core with
AVX512_BF16 take 14.8 ms fused, 1.3 ms written out (docs/performance.md). The function is registered
in transformers' table of attention functions.

Shapes in comments: B rows, H heads, T positions, D values of a head.
"""

from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

WRITTEN_OUT = "written_out"


# The fused kernel takes 1.2 to 1.7 times this one's time at 512 to 1,024 positions, but the scores
# of all pairs of longer sequences would fill the memory.
MAX_POSITIONS = 512


def write_out_attention(model: PreTrainedModel) -> None:
    """Let a model with fused attention write it out where that is faster, in place."""
    # A mask is built as for the fused function, which takes over whenever there is one.
    if model.config._attn_implementation == "sdpa":
        ALL_ATTENTION_FUNCTIONS.register(WRITTEN_OUT, attend_written_out)
        ALL_MASK_ATTENTION_FUNCTIONS.register(WRITTEN_OUT, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        model.set_attn_implementation(WRITTEN_OUT)


def attend_written_out(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention in bfloat16: query (B, H, T, D), key and value (B, H or fewer, T, D)
    -> (B, T, H, D).

    Masks, generation with a cache, float32 and long sequences take the fused kernel.
    """
    batch, heads, positions, size = query.shape
    is_causal = options.get("is_causal")
    if (
        attention_mask is not None
        or not 1 < positions == key.shape[2] <= MAX_POSITIONS
        or not (torch.is_autocast_enabled("cpu") or query.dtype == torch.bfloat16)
        or not (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    ):
        fused: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
        options |= {"scaling": scaling, "dropout": dropout}
        return fused(module, query, key, value, attention_mask, **options)
    # (B, H, T, D); fewer heads of keys and values with grouped queries, until they are repeated
    q, k, v = (x.bfloat16() for x in (query, key, value))
    if k.shape[1] < heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    # Scores have the variance of one product times D. Scaled by 1/√D the softmax begins with
    # weights that are neither all equal nor all on one position.
    scale = size**-0.5 if scaling is None else scaling
    # (T, T): -inf above the diagonal, so that no position sees a later one. The product adds to it.
    future = q.new_full((positions, positions), -torch.inf).triu(1)
    scores = torch.baddbmm(future, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)  # (B·H, T, T)
    weights = scores.softmax(-1)
    if dropout:
        weights = F.dropout(weights, dropout)
    out = torch.bmm(weights, v.flatten(0, 1)).view(batch, heads, positions, -1)
    return out.transpose(1, 2).contiguous(), None
