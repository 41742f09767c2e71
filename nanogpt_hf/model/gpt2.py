"""GPT-2 as an Architecture: configuration from a recipe, loading, saving, positions, activations.

The model itself is in modeling_gpt.py, configuration_gpt.py, head_gpt.py, loss_gpt.py and
layout_gpt.py.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from nanogpt_hf.config.schema import KNOBS, ModelSection, kind_options
from nanogpt_hf.errors import did_you_mean
from nanogpt_hf.model.config_fields import padded_vocab_size
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.decoders import Architecture
from nanogpt_hf.model.layout_gpt import GPT2_LAYOUT, gpt2_state_dict, save_as_gpt2
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM

_KNOBS = ("n_layer", "n_head", "n_embd", "n_positions", "bias", "activation_function")


class GPT2Architecture(Architecture):
    """Our GPT-2, with nanoGPT's options."""

    layers_on_disk = GPT2_LAYOUT

    def __init__(self, config_class: type[GPTConfig]):
        self.config_class = config_class
        self.model_class = GPTForCausalLM
        self.name = "gpt2"
        self.title = "GPT-2"
        self._sizes = {}

    def config_from_recipe(
        self, section: ModelSection, vocab_size: int, end_of_text_id: int | None
    ) -> GPTConfig:
        names = self.config_class.new_fields()
        for name in section.extra:
            if name not in names:
                raise ValueError(
                    f"model.extra.{name}: gpt2 has no such field beside those of its knobs"
                    f"{did_you_mean(name, names)}; leave it out, or set another model.architecture"
                )
        with self.one_line_for_wrong_fields():
            return self.config_class(
                vocab_size=vocab_size,
                padded_vocab_size=padded_vocab_size(section, vocab_size),
                dropout=section.dropout,
                bos_token_id=end_of_text_id,
                eos_token_id=end_of_text_id,
                **{name: getattr(section, name) for name in _KNOBS},
                **section.extra,
            )

    def check_one_step(self, config: Any, model: Any = None) -> list[str]:
        self.check_fields(config)
        return []  # its loss gives all parameters gradients, so it need not try

    def memory_bound(self, model: Any, tokens: int, block_size: int) -> float:
        # In float32 a parameter has a weight, a gradient and two averages of AdamW; a checkpoint's
        # copy has three of these, and the rest is for casts, buffers of an update and the
        # gradients of a tied head.
        state = 12 * model.num_parameters()
        # A matrix reads a vector per token and writes one. Autograd keeps both, and what lies
        # between two matrices: norms, activation functions and dropout.
        vectors = sum(sum(matrix.shape) for matrix in model.parameters() if matrix.dim() == 2)
        # Attention with dropout, or in bf16, keeps matrices of (heads, T, T).
        heads = model.config.n_layer * model.config.n_head
        return 4.0 * (state + 4 * tokens * (vectors + heads * block_size))

    def recipe_knobs(self, config: GPTConfig) -> dict[str, Any]:
        """Knobs `model.*` that describe a model, without dropout.

        Raises ValueError if they cannot.
        """
        activations = kind_options(KNOBS["model.activation_function"].kind)
        if config.activation_function not in activations:
            raise ValueError(
                f"its activation_function {config.activation_function} is none of "
                f"{', '.join(activations)}"
            )
        knobs = {f"model.{name}": getattr(config, name) for name in _KNOBS}
        return {"model.architecture": self.name, **knobs}

    def write_model(
        self, folder: Path, config: GPTConfig, weights: dict[str, torch.Tensor]
    ) -> None:
        """Write `weights` (our names, in the dtype they have) as a plain GPT-2, or as our own type
        if that cannot represent the model.
        """
        if config.is_gpt2:
            save_as_gpt2(folder, config, weights, GenerationConfig.from_model_config(config))
        else:
            super().write_model(folder, config, weights)

    def standard_config(self, config: GPTConfig) -> PreTrainedConfig:
        return config.to_gpt2() if config.is_gpt2 else super().standard_config(config)

    def is_standard(self, config: GPTConfig) -> bool:
        return config.is_gpt2

    def on_meta(self, config: GPTConfig) -> PreTrainedModel:
        model = super().on_meta(config)
        if config.is_gpt2:
            # Raises ValueError at the start, not at the first save, for a parameter of another
            # model.
            gpt2_state_dict(config, model.state_dict())
        return model

    def resized_rope(self, config: GPTConfig, length: int, theta: float | None) -> None:
        if theta is not None:
            raise ValueError("finetune.rope_theta: GPT-2 has no rotary positions; leave it out")

    def resize_positions(self, model: GPTForCausalLM, length: int, theta: float | None) -> None:
        """Keep only the first `length` position embeddings, as nanoGPT's `crop_block_size` does, or
        repeat them to get more, as Longformer does (arXiv:2004.05150, section 5): the model stays
        what it is for texts of its old length.
        """
        known = model.transformer.wpe.weight.detach()  # (positions, C)
        if length == len(known):
            return
        # Whole copies, rounded up, and cut to the length: (length, C).
        weight = known.repeat(-(-length // len(known)), 1)[:length].clone()
        model.transformer.wpe = nn.Embedding.from_pretrained(weight, freeze=False)
        model.config.n_positions = length
