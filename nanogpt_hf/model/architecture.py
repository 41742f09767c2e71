"""Architecture: all that the rest of the package asks of a causal LM. GPT-2 is the first row.

Sizes are read from a config by the names that transformers gives every model: hidden_size, num_hidden_layers,
num_attention_heads, max_position_embeddings, vocab_size.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GPT2LMHeadModel, PreTrainedConfig, PreTrainedModel

from nanogpt_hf.config.schema import LORA_TARGETS
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.loss_gpt import loss_and_gradient
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM


@dataclass(frozen=True)
class Architecture:
    """How to reach the parts of a model, and what they cost. Functions take the model that is not prepared."""

    name: str
    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    blocks: Callable[[Any], nn.ModuleList]  # transformer blocks, lowest first
    embeddings: Callable[[Any], list[nn.Module]]  # of tokens, and of positions if they are learned
    final_norm: Callable[[Any], nn.Module]
    attention: Callable[[nn.Module], nn.Module]  # of a block: has q_proj, k_proj, v_proj, o_proj, scaling, head_dim
    mlp_layers: Callable[[nn.Module], tuple[nn.Linear, nn.Linear]]  # of a block: into the MLP and out of it
    lora_targets: tuple[str, ...]
    flops_per_token: Callable[[Any, int], float]  # (config, block_size): training, forward and backward
    compile_loss: Callable[..., None]  # (model, backend=..., mode=...)
    plain_model: Callable[[Any], PreTrainedModel]  # config -> transformers' own model of it, with new weights

    def attention_layers(self, block: nn.Module) -> tuple[nn.Linear, ...]:
        """The linear layers q, k, v and o of a block."""
        attention = self.attention(block)
        return attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj

    def depths(self, model: PreTrainedModel) -> dict[str, int]:
        """Parameter name -> depth: 0 for embeddings, 1, 2, ... for blocks, and one more for the layers above them."""
        blocks = self.blocks(model)
        depth = {id(p): 0 for module in self.embeddings(model) for p in module.parameters()}
        depth |= {id(p): index + 1 for index, block in enumerate(blocks) for p in block.parameters()}
        return {name: depth.get(id(p), len(blocks) + 1) for name, p in model.named_parameters()}

    def part_of(self, name: str) -> str:
        """The part of the model that a parameter belongs to, for a table: `attention`, `MLP`, ..."""
        return next((part for pattern, part in _PARTS if re.search(pattern, name)), "norms")


_PARTS = (
    (r"\.(wte|embed_tokens)\.|^lm_head\.", "token embedding and head"),
    (r"\.wpe\.", "position embedding"),
    (r"\.(attn|self_attn)\.", "attention"),
    (r"\.mlp\.", "MLP"),
)


def _compile_gpt2_loss(model: GPTForCausalLM, **options: Any) -> None:
    model.lm_head.loss_and_gradient = torch.compile(loss_and_gradient, **options)


def _gpt2_flops_per_token(config: GPTConfig, block_size: int) -> float:
    """6·N + 12·L·H·Q·T (PaLM, arXiv:2204.02311, appendix B); N without positions, as in nanoGPT's `estimate_mfu`."""
    parameters = count_parameters(config) - config.n_positions * config.n_embd
    return 6 * parameters + 12 * config.n_layer * config.n_embd * block_size


def _plain_gpt2(config: GPTConfig) -> GPT2LMHeadModel:
    gpt2 = config.to_gpt2()
    gpt2._attn_implementation = "sdpa"
    return GPT2LMHeadModel(gpt2)


GPT2 = Architecture(
    name="gpt2",
    config_class=GPTConfig,
    model_class=GPTForCausalLM,
    blocks=lambda model: model.transformer.h,
    embeddings=lambda model: [model.transformer.wte, model.transformer.wpe],
    final_norm=lambda model: model.transformer.ln_f,
    attention=lambda block: block.attn,
    mlp_layers=lambda block: (block.mlp.fc, block.mlp.proj),
    lora_targets=tuple(LORA_TARGETS),
    flops_per_token=_gpt2_flops_per_token,
    compile_loss=_compile_gpt2_loss,
    plain_model=_plain_gpt2,
)


def count_parameters(config: PreTrainedConfig) -> int:
    """Parameters of the model as it is saved: padded vocabulary rows are not counted, a tied head counts once."""
    with torch.device("meta"):
        model = architecture_of(config).model_class(config)
    padding = (getattr(config, "padded_vocab_size", None) or config.vocab_size) - config.vocab_size
    matrices = 1 if config.tie_word_embeddings else 2
    return model.num_parameters() - matrices * padding * config.hidden_size


def architecture_of(model_or_config: PreTrainedModel | PreTrainedConfig) -> Architecture:
    """The row of a model or of its config. Raises ValueError if there is none."""
    config = getattr(model_or_config, "config", model_or_config)
    if not isinstance(config, GPT2.config_class):
        raise ValueError(f"{type(config).__name__} is none of the supported architectures: {GPT2.name}")
    return GPT2
