"""Attention functions beside those of transformers, registered in its table.

Written out for bfloat16 on CPUs, where torch's fused kernel has a slow backward pass: forward and
backward of one layer of 12 sequences of 64 tokens, 4 heads of 32, on one core with AVX512_BF16 take
14.8 ms fused, 1.3 ms written out (docs/performance.md).

Of packed documents and conversations, without a mask of all pairs of positions: on CUDA torch's
flex attention skips the blocks of pairs that are of several documents. On a CPU, where flex has no
backward pass in torch 2.13, long sequences attend document by document.
"""

import sys
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from nanogpt_hf.model.config_fields import size_of

WRITTEN_OUT = "written_out"
# The fused kernel takes 1.2 to 1.7 times this one's time at 512 to 1,024 positions, but the scores
# of all pairs of longer sequences would fill the memory.
MAX_POSITIONS = 512

FLEX_DEVICES = ["cuda"]
MIN_HEAD = 16  # values of a head in flex attention's kernels
MIN_POSITIONS = 512  # on a CPU, shorter sequences are as fast with a mask (docs/performance.md)


def write_out_attention(model: PreTrainedModel) -> None:
    """Let a model with fused attention write it out where that is faster, in place."""
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
    q, k, v = (x.bfloat16() for x in (query, key, value))
    if k.shape[1] < heads:  # grouped queries
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    future = q.new_full((positions, positions), -torch.inf).triu(1)
    scale = size**-0.5 if scaling is None else scaling
    scores = torch.baddbmm(future, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
    weights = scores.softmax(-1)
    if dropout:
        weights = F.dropout(weights, dropout)
    out = torch.bmm(weights, v.flatten(0, 1)).view(batch, heads, positions, -1)
    return out.transpose(1, 2).contiguous(), None


def attend_apart(model: PreTrainedModel) -> None:
    """Let packed documents attend without a mask where that is possible, in place.

    The mask stays on other devices, in training with dropout, in models that transformers does not
    run with flex attention, with heads too small for it, and on a CPU with windows of attention.
    """
    config: Any = model.config
    inner = config._attn_implementation
    heads = size_of(config, "num_attention_heads", 1)
    if (
        not model._supports_flex_attn
        or (size_of(config, "head_dim") or config.hidden_size // heads) < MIN_HEAD
        or hasattr(config, "keep_window_size")  # each layer changes the mask
        or any("sinks" in name for name, _ in model.named_parameters())  # not on CPUs
    ):
        return
    drops = any("drop" in knob and value for knob, value in config.to_dict().items())

    def build_mask(**options: Any) -> Any:
        length, device = options["q_length"], torch.device(options["device"]).type
        packs = not options.get("allow_is_causal_skip", True) and not options.get("use_vmap")
        packs = packs and not (drops and torch.is_grad_enabled())
        if packs and options.get("attention_mask") is None and options["kv_length"] == length > 1:
            if device in FLEX_DEVICES:
                make: Any = torch.compile(create_block_mask)  # else it computes all pairs
                sizes = options["batch_size"], None, length, length
                return make(options["mask_function"], *sizes, device=options["device"])
            is_whole = (options.get("local_size") or length) >= length
            if device == "cpu" and inner != "eager" and length >= MIN_POSITIONS and is_whole:
                # a document begins at a token that does not see the one before
                rows, place = torch.arange(options["batch_size"])[:, None], torch.arange(1, length)
                sees = options["mask_function"](rows, 0, place, place - 1)
                if not is_tracing(sees):
                    return [(~row).nonzero()[:, 0].add(1).tolist() for row in sees]
        return ALL_MASK_ATTENTION_FUNCTIONS[inner](**options)

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        """(B, H, T, D) -> (B, T, H, D), as all attention functions of transformers."""
        qkv, device = (query, key, value), query.device.type
        if isinstance(attention_mask, BlockMask):
            if torch.is_autocast_enabled(device):  # as it casts for the fused kernels
                qkv = (x.to(torch.get_autocast_dtype(device)) for x in qkv)
            flex: Any = ALL_ATTENTION_FUNCTIONS["flex_attention"]
            return flex(module, *qkv, attention_mask, **options)
        own: Any = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
        function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(inner, own)
        if not isinstance(attention_mask, list):
            return function(module, *qkv, attention_mask, **options)
        rows = []
        for row, begins in enumerate(attention_mask):
            parts = zip(*(x[row, None].tensor_split(begins, 2) for x in qkv), strict=True)
            alone = [function(module, *part, None, **options)[0] for part in parts]
            rows.append(torch.cat(alone, 1))
        return torch.cat(rows), None

    name = f"documents_{inner}{'_evaluated' * drops}"  # models of a name share the functions
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, build_mask)
    model.set_attn_implementation(name)
