"""Architecture of a model, config, recipe or folder: our GPT-2, or any decoder of transformers.

Sizes are read from a config by the names that transformers gives every model: hidden_size,
num_hidden_layers, num_attention_heads, max_position_embeddings, vocab_size. No other room names the
classes or layers of a model, except the importers and exporters of one format.

A decoder of transformers needs no code (decoders.py). A model that is no class of transformers:
write a subclass of Architecture as in gpt2.py, and list it by its config class.

An objective is a function from a model and a batch to the summed loss of a micro-batch and further
metrics. A row without targets (all of `shift_labels` -100) adds nothing: evaluations pad batches
with such rows.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from nanogpt_hf.model.config_fields import config_class_of, padding_parameters, padding_rows
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.decoders import Architecture
from nanogpt_hf.model.gpt2 import GPT2Architecture

__all__ = ["Architecture", "padding_parameters", "padding_rows"]

Metrics = dict[str, torch.Tensor]  # sums over the micro-batch's targets, by name
Objective = Callable[[torch.nn.Module, dict[str, torch.Tensor]], tuple[torch.Tensor, Metrics]]

# Configs that are not in this table are of decoders of transformers.
ARCHITECTURES: dict[type, type[Architecture]] = {GPTConfig: GPT2Architecture}


# One object for each class of configs, which keeps what it has found out about its models.
@cache
def _architecture(config_class: type[PreTrainedConfig]) -> Architecture:
    """Raises ValueError if its models are not what we can train."""
    return ARCHITECTURES.get(config_class, Architecture)(config_class)


GPT2 = _architecture(GPTConfig)


def architecture_of(model_or_config: PreTrainedModel | PreTrainedConfig) -> Architecture:
    """Architecture of a model or of its config. Raises ValueError if it cannot be trained here."""
    return _architecture(type(getattr(model_or_config, "config", model_or_config)))


def architecture_of_type(model_type: str) -> Architecture:
    """Architecture of this name, as recipes and config.json files have it.

    Raises ValueError if there is none.
    """
    return GPT2 if model_type == GPT2.name else _architecture(config_class_of(model_type))


def architecture_on_disk(name: str, revision: str | None = None) -> Architecture:
    """Architecture of a model folder or of a model on the Hub. Raises ValueError if there is
    none.
    """
    raw, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    return architecture_of_type(raw.get("model_type", GPTConfig.model_type))


def count_parameters(config: PreTrainedConfig) -> int:
    """Parameters of the model as it is saved: padded vocabulary rows are not counted, a tied
    head counts once.
    """
    return architecture_of(config).count_parameters(config)


def saved_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Buffers that a model folder holds, by name: constants and running values.

    They are not trained, but without them the folder would open as another model.
    """
    # A buffer that is computed from the config, such as rotary frequencies, is not in the state.
    names = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in names}


_PARTS = (
    (r"\.lora_", "adapters"),
    (r"\.(wte|embed_tokens)\.|^lm_head\.", "token embedding and head"),
    (r"\.wpe\.", "position embedding"),
    (r"\.(attn|self_attn)\.", "attention"),
    (r"\.experts\.", "experts"),
    (r"\.mlp\.", "MLP"),
)


def part_of(name: str) -> str:
    """Part of a model that a parameter belongs to, for a table: `attention`, `MLP`, ..."""
    return next((part for pattern, part in _PARTS if re.search(pattern, name)), "norms")
