"""Attention of packed documents and conversations without a mask of all pairs of positions.

On CUDA torch's flex attention skips the blocks of pairs that are of several documents. On a CPU,
where flex has no backward pass in torch 2.13, long sequences attend document by document.
"""

import sys
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from nanogpt_hf.model.config_fields import size_of

FLEX_DEVICES = ["cuda"]
MIN_HEAD = 16  # values of a head in its kernels
MIN_POSITIONS = 512  # on a CPU, shorter sequences are as fast with a mask (docs/performance.md)


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
