"""GPT: attention, MLP, block and model; its head is in head_gpt.py, its loss in loss_gpt.py.

In memory q, k and v are separate nn.Linear layers; on disk it is a plain GPT-2 (layout_gpt.py),
which any tool opens. Imports only its neighbors, so that the five files can be read and copied
alone.

Shapes in comments: B batch, T positions, C n_embd, H heads, D = C / H, V vocabulary, N = B·T rows.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_gpt import GPTConfig
from .head_gpt import CACHE, Head, SummedLoss, shifted_labels
from .layout_gpt import GPT2Files


def eager_attention_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs
):
    """Attention written out; query, key, value (B, H, T, D), an additive mask (B, 1, T, T).

    Returns (B, T, H, D).
    """
    weights = query @ key.transpose(-1, -2) * scaling  # (B, H, T, T)
    if attention_mask is not None:
        weights = weights + attention_mask  # -inf where a position must not look
    # In float32, since the sum of many small exponentials is rounded badly in bf16.
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(value.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def is_plain(layer):
    """Whether a layer's output is its product alone: it is no adapter, is not quantized, and no
    hook gathers its weight or adds up its outputs.
    """
    return type(layer) is nn.Linear and not (layer._forward_pre_hooks or layer._forward_hooks)


class Attention(nn.Module):
    """Causal self-attention with H heads: (B, T, C) -> (B, T, C), and the weights if they exist."""

    def __init__(self, config: GPTConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.n_embd // config.n_head
        # A product of D independent values of variance 1 has variance D. Divided by √D the scores
        # keep variance 1, so that the softmax does not begin with all weight on one position.
        self.scaling = self.head_dim**-0.5
        self.dropout = config.dropout
        self.is_causal = True
        # Three layers where GPT-2 has one of three times the width: tensor parallelism and LoRA
        # then need no knowledge of how the three lie in it.
        self.q_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.k_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.v_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.o_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        # `_init_weights` reads this mark.
        self.o_proj.writes_residual = True  # pyright: ignore[reportArgumentType]

    def forward(self, x, attention_mask=None, **kwargs):
        # (B, T, C) -> (B, T, H, D) -> (B, H, T, D): each head attends by itself. The number of
        # heads is -1, since tensor parallelism leaves fewer than n_head on a process.
        heads = (*x.shape[:-1], -1, self.head_dim)
        query, key, value = (part.view(heads).transpose(1, 2) for part in self.project(x))
        if (cache := kwargs.pop(CACHE, None)) is not None:
            # In generation: keys and values of all earlier positions come from the cache.
            key, value = cache.update(key, value, self.layer_idx)
        # The fused kernel, flex attention or another function, by the config.
        kind = str(self.config._attn_implementation)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(kind, eager_attention_forward)
        dropout = self.dropout if self.training else 0.0
        out, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs
        )
        # (B, T, H, D) -> (B, T, C): the heads side by side, mixed by the last matrix.
        return self.o_proj(out.reshape(*x.shape[:-1], -1)), weights

    def project(self, x):
        """(B, T, C) -> queries, keys and values, each (B, T, C)."""
        layers = (self.q_proj, self.k_proj, self.v_proj)
        if not torch.compiler.is_dynamo_compiling() or not all(map(is_plain, layers)):
            return [layer(x) for layer in layers]
        # A compiled step takes one product instead of three, so that the host starts fewer kernels.
        # The copy of the matrices is part of their cast to bf16. Exported graphs have no such cast.
        weight = torch.cat([layer.weight for layer in layers])
        bias = torch.cat([layer.bias for layer in layers]) if self.config.bias else None
        return F.linear(x, weight, bias).chunk(3, dim=-1)


class MLP(nn.Module):
    """Two matrices with an activation function between them, applied to each position alone."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.fc = nn.Linear(config.n_embd, config.inner_size, bias=config.bias)
        # torch's tanh form of GELU is one kernel instead of gelu_new's seven; they differ by
        # rounding.
        self.act = ACT2FN[config.activation_function.replace("gelu_new", "gelu_pytorch_tanh")]
        self.proj = nn.Linear(config.inner_size, config.n_embd, bias=config.bias)
        self.proj.writes_residual = True  # pyright: ignore[reportArgumentType]  (for _init_weights)

    def forward(self, x):
        # (B, T, C) -> (B, T, 4·C) -> (B, T, C); inner_size is 4·C unless n_inner is set
        return self.proj(self.act(self.fc(x)))


class Block(GradientCheckpointingLayer):
    """A layer of the transformer: attention mixes positions, then the MLP computes on each."""

    def __init__(self, config: GPTConfig, layer_idx: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=config.bias)
        self.attn = Attention(config, layer_idx)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=config.bias)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, attention_mask=None, **kwargs):
        # Each part reads a normalized copy and adds to x, the residual stream. So gradients reach
        # the lowest block through sums alone (pre-norm, GPT-2 paper, section 2.3).
        attended, _ = self.attn(self.ln_1(x), attention_mask, **kwargs)
        x = x + self.drop(attended)
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPTPreTrainedModel(PreTrainedModel):
    """Configuration, supported features and initial weights of both models below."""

    config: GPTConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    config_class = GPTConfig
    base_model_prefix = "transformer"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    builds_no_mask_in_graphs = True  # read where a run is compiled
    _can_record_outputs = {"hidden_states": Block, "attentions": Attention}  # noqa: RUF012
    # Old GPT-2 files have causal masks as buffers.
    _keys_to_ignore_on_load_unexpected = [r"\.attn\.bias$", r"\.attn\.masked_bias$"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module):
        # transformers' own: normal with std initializer_range; biases zero; LayerNorm one.
        super()._init_weights(module)
        if getattr(module, "writes_residual", False):
            # 2·n_layer projections add to the residual stream. Divided by the square root of their
            # number, its variance does not grow with the depth (GPT-2 paper, section 2.3).
            std = self.config.initializer_range / math.sqrt(2 * self.config.n_layer)
            init.normal_(module.weight, mean=0.0, std=std)


class GPTModel(GPTPreTrainedModel):
    """Transformer without its head: input_ids (B, T) -> last_hidden_state (B, T, C)."""

    _input_embed_layer = "wte"

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        # Rows of the embedding may be padded to a multiple that is fast; no token uses the others.
        self.wte = nn.Embedding(config.padded_vocab_size or config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([Block(config, i) for i in range(config.n_layer)])
        # The residual stream is never normalized itself, so the last block is followed by a norm.
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, bias=config.bias)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        cache=None,
        **kwargs,
    ):
        cache = past_key_values if cache is None else cache  # the argument's two names (CACHE)
        if inputs_embeds is None:
            inputs_embeds = self.wte(input_ids)  # (B, T) -> (B, T, C)
        length = inputs_embeds.shape[1]
        past = cache.get_seq_length() if cache is not None else 0
        # A static cache counts on the device, and the host would have to wait.
        tokens = length + past if isinstance(past, int) else length
        if tokens > (limit := self.config.n_positions):
            raise ValueError(f"{tokens} tokens are more than the model's {limit} positions")
        # In generation each pass adds the keys and values of its tokens to the cache, (B, H, T, D)
        # in each layer, so that the next pass reads new tokens alone.
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        # Restarts at 0 separate packed conversations. Only a caller's positions can have them, and
        # to look for them the host must wait, so our own are computed after this.
        given = (attention_mask, cache, position_ids)
        # transformers leaves out a mask that only orders positions, which sdpa's kernels do in half
        # of the time, but not in a compiled graph before torch 2.14.
        fused = self.config._attn_implementation == "sdpa" and torch.compiler.is_dynamo_compiling()
        mask = None
        if not fused or any(each is not None for each in given):
            mask = create_causal_mask(self.config, inputs_embeds, *given)
        if position_ids is None:
            places = torch.arange(length, device=inputs_embeds.device)
            position_ids = (places + past)[None]  # (1, T), the same for all rows
        # Learned positions are added to the tokens: (B, T, C) + (1, T, C).
        x = self.drop(inputs_embeds + self.wpe(position_ids))
        for block in self.h:
            x = block(x, attention_mask=mask, position_ids=position_ids, **{CACHE: cache}, **kwargs)
        returned: Any = {CACHE: cache if use_cache else None}
        return BaseModelOutputWithPast(last_hidden_state=self.ln_f(x), **returned)


class GPTForCausalLM(  # pyright: ignore[reportIncompatibleMethodOverride]
    GPT2Files, SummedLoss, GPTPreTrainedModel, GenerationMixin
):
    """A GPT that predicts the next token; reads and writes GPT-2 checkpoints (layout_gpt.py)."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.transformer = GPTModel(config)
        rows = config.padded_vocab_size or config.vocab_size
        self.lm_head = Head(config.n_embd, rows, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        num_items_in_batch=None,
        skip_logits=None,
        use_cache=None,
        logits_to_keep=0,
        cache=None,
        **kwargs,
    ):
        """Logits (B, T, V), and the loss if labels (B, T) are given; label -100 is not counted.

        `labels` are the input ids, shifted here by one; `shift_labels` are already shifted.
        `with_loss` (head_gpt.py) describes the other arguments.
        """
        cache = past_key_values if cache is None else cache
        shift_labels, row_loss = shifted_labels(labels, kwargs)
        if use_cache is None and shift_labels is not None:
            use_cache = False  # training reads each text once
        others = (attention_mask, cache, inputs_embeds, row_loss)
        if skip_logits and not kwargs and all(each is None for each in others):
            batch = (input_ids, shift_labels, position_ids, num_items_in_batch)
            if (out := self.one_graph_output(*batch)) is not None:
                return out
        out = self.transformer(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return self.with_loss(
            out, shift_labels, num_items_in_batch, skip_logits, logits_to_keep, row_loss
        )


AutoConfig.register(GPTConfig.model_type, GPTConfig, exist_ok=True)
AutoModel.register(GPTConfig, GPTModel, exist_ok=True)
AutoModelForCausalLM.register(GPTConfig, GPTForCausalLM, exist_ok=True)
