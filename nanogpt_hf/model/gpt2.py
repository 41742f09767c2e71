"""GPT-2 behind the seam of architecture.py: configuration from a recipe, loading, saving, cropping,
activations.

The model itself is in modeling_gpt.py, configuration_gpt.py, loss_gpt.py and layout_gpt.py.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanogpt_hf.config.schema import KNOBS, ModelSection, kind_options
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM

_KNOBS = ("n_layer", "n_head", "n_embd", "n_positions", "bias", "activation_function")


def config_from_recipe(
    section: ModelSection, vocab_size: int, end_of_text_id: int | None
) -> GPTConfig:
    """The configuration that a recipe describes, for a tokenizer of `vocab_size` tokens."""
    rows = -(-vocab_size // section.pad_vocab_to_multiple_of) * section.pad_vocab_to_multiple_of
    return GPTConfig(
        vocab_size=vocab_size,
        padded_vocab_size=rows if rows > vocab_size else None,
        dropout=section.dropout,
        bos_token_id=end_of_text_id,
        eos_token_id=end_of_text_id,
        **{name: getattr(section, name) for name in _KNOBS},
    )


def recipe_knobs(config: GPTConfig) -> dict[str, Any]:
    """The knobs `model.*` that describe a model, without dropout.

    Raises ValueError if they cannot.
    """
    activations = kind_options(KNOBS["model.activation_function"].kind)
    if config.activation_function not in activations:
        raise ValueError(
            f"its activation_function {config.activation_function} is none of "
            f"{', '.join(activations)}"
        )
    return {"model.architecture": "gpt2"} | {
        f"model.{name}": getattr(config, name) for name in _KNOBS
    }


def read_config(name: str, revision: str | None = None) -> GPTConfig:
    """The configuration of a model folder or of a model on the Hub."""
    return GPTConfig.from_pretrained(name, revision=revision or "main", trust_remote_code=False)


def read_model(name: str, revision: str | None = None, **options: Any) -> GPTForCausalLM:
    """The model in a folder or on the Hub in float32.

    Raises ValueError if its weights do not fit.
    """
    # So that our from_pretrained names the misshapen weights: transformers' own error does not.
    options |= {"dtype": torch.float32, "ignore_mismatched_sizes": True}
    model = GPTForCausalLM.from_pretrained(
        name, revision=revision, trust_remote_code=False, **options
    )
    assert isinstance(model, GPTForCausalLM)  # a pair only with output_loading_info
    return model


def write_model(
    folder: Path, config: GPTConfig, weights: dict[str, torch.Tensor], max_shard_size: str
) -> None:
    """Write `weights` (our names, in the dtype they have) as a plain GPT-2."""
    with torch.device("meta"):
        model = GPTForCausalLM(config)
    model.save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)


def crop_positions(model: GPTForCausalLM, length: int) -> None:
    """Keep only the first `length` position embeddings, as nanoGPT's `crop_block_size` does."""
    if length < model.config.n_positions:
        weight = model.transformer.wpe.weight[:length].detach().clone()
        model.transformer.wpe = nn.Embedding.from_pretrained(weight, freeze=False)
        model.config.n_positions = length


def row_losses(
    model: GPTForCausalLM, input_ids: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """(B, T), (B, T) -> the summed loss of each row, (B,)."""
    hidden = model.transformer(input_ids, use_cache=False).last_hidden_state
    return torch.stack([model.summed_loss(*row) for row in zip(hidden, targets, strict=True)])
