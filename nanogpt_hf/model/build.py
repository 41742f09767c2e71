"""Build the model that a recipe describes: with initial weights, or loaded and prepared for
fine-tuning; on the meta device too.
"""

import logging
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from nanogpt_hf.config.finetune import frozen_layers_at
from nanogpt_hf.config.schema import Config, ModelSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.errors import UserError, one_line
from nanogpt_hf.model.architecture import GPT2, architecture_of, architecture_of_type
from nanogpt_hf.model.load import load_base_config, load_start_model
from nanogpt_hf.model.look_back import check_look_back, look_back
from nanogpt_hf.model.vocabulary import extend_vocabulary

logger = logging.getLogger(__name__)


def build_config(
    section: ModelSection, vocab_size: int, end_of_text_id: int | None = None
) -> PreTrainedConfig:
    """Model configuration that a recipe describes, for a tokenizer of `vocab_size` tokens.

    Raises UserError if there is no such architecture, or model.extra does not fit it.
    """
    try:
        architecture = architecture_of_type(section.architecture)
    except ValueError as error:
        raise UserError(f"model.architecture: {error}") from None
    try:
        config = architecture.config_from_recipe(section, vocab_size, end_of_text_id)
    except ValueError as error:
        raise UserError(one_line(error)) from None
    if section.init == "look_back":
        check_look_back(config)
    return config


def build_model(config: PreTrainedConfig, seed: int, init: str = "own") -> PreTrainedModel:
    """A model with initial weights, the same for the same seed on every process and machine.

    `init` is model.init. With zero_residual each block starts as the identity; look_back.py
    describes look_back. All other weights are as in `own`.
    """
    architecture = architecture_of(config)
    # Weights are drawn from a seed of their own. The generator of the process stays where it was,
    # so that later draws do not depend on the size of the model.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights"))
        model = architecture.model_class(config)
        if init == "look_back":
            look_back(model, architecture.attention(architecture.blocks(model)[0]))
        # GPT-2's own weights are initialized in this way already.
        elif init != "own" and not (init == "gpt2" and architecture is GPT2):
            # Two additions to the residual stream in each layer, as in modeling_gpt.py.
            std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
            for block in architecture.blocks(model):
                for weight in architecture.residual_weights(block):
                    if init == "zero_residual":
                        nn.init.zeros_(weight)
                    else:
                        nn.init.normal_(weight, std=std)
    return model


def start_model(
    config: Config,
    vocab_size: int,
    end_of_text_id: int | None,
    step: int = 0,
    learned: Sequence[int] | None = None,
) -> PreTrainedModel:
    """Model that a run starts with: with initial weights, or `finetune.model` with the layers that
    are frozen at `step`. If the tokenizer has more tokens than that model, `learned` are the ids of
    the model's own tokens.

    Raises UserError if that cannot be loaded, or does not fit the recipe or a tokenizer of
    `vocab_size` tokens.
    """
    finetune = config.finetune
    lora = config.lora
    if finetune.model is None:
        model_config = build_config(config.model, vocab_size, end_of_text_id)
        model = build_model(model_config, config.train.seed, config.model.init)
    else:
        options: dict[str, Any] = {}
        if config.model.architecture == GPT2.name:
            options["dropout"] = config.model.dropout
        if lora.quantize:
            # nf4 is the type of the QLoRA paper, arXiv:2305.14314.
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_8bit=lora.quantize == "8bit",
                load_in_4bit=lora.quantize == "4bit",
                bnb_4bit_quant_type="nf4",
            )
        model = load_resized(config, vocab_size, learned, **options)
        _freeze_and_adapt(model, config, step)
    if idle := _freeze_idle(model):
        logger.info(f"frozen, since the loss gives no gradient: {', '.join(idle)}")
    return model


def _freeze_idle(model: PreTrainedModel) -> list[str]:
    """Freeze parameters that the loss gives no gradient, such as scores that only choose. Return
    their names.
    """
    idle = architecture_of(model).check_one_step(model.config)
    for name, parameter in model.named_parameters():
        if re.sub(r"\.lora_[AB]\.default", "", name) in idle:
            parameter.requires_grad_(False)
    return idle


def load_resized(
    config: Config, vocab_size: int, learned: Sequence[int] | None, **options: Any
) -> PreTrainedModel:
    """The model that a recipe starts from, with the context of the recipe, and rows for the new
    tokens of its tokenizer (`start_model`). `options` are arguments of Architecture.read_model.
    """
    model = load_start_model(config.finetune, **options)
    # methods/finetuning.py has checked that the tokenizer keeps all tokens of the model.
    if learned is not None or vocab_size > model.config.vocab_size:
        extend_vocabulary(model, vocab_size, learned)
    _resize_positions(model, config)
    return model


def _resize_positions(model: PreTrainedModel, config: Config) -> None:
    theta = config.finetune.rope_theta
    architecture_of(model).resize_positions(model, config.model.n_positions, theta)


def _freeze_and_adapt(model: PreTrainedModel, config: Config, step: int) -> None:
    """Freeze layers of a loaded model, and add adapters, in place."""
    architecture_of(model).freeze(model, frozen_layers_at(step, config.finetune))
    if config.lora.rank:
        from nanogpt_hf.model.lora import add_adapters

        add_adapters(model, config.lora, config.train.seed)


def meta_model(config: Config, base: PreTrainedConfig, step: int = 0) -> PreTrainedModel:
    """Model that a run has at `step`, on the meta device, with its frozen layers."""
    model = architecture_of(base).on_meta(base)
    if config.finetune.model:
        with torch.device("meta"):
            _resize_positions(model, config)
            _freeze_and_adapt(model, config, step)
    _freeze_idle(model)
    return model


def model_of_run(config: Config, vocab_size: int) -> PreTrainedModel:
    """Model that a run starts with, on the meta device, for fine-tuning too."""
    if not config.finetune.model:
        return meta_model(config, build_config(config.model, vocab_size))
    base: Any = load_base_config(config.finetune.model, config.finetune.revision)[0]
    if config.model.architecture == GPT2.name:
        base.dropout = config.model.dropout
    return meta_model(config, base)


def describe_trainable(model: PreTrainedModel, config: Config) -> str:
    """A line such as `trains 100,864 of 211,712 parameters, dropout 0.1`."""
    trained = model.num_parameters(only_trainable=True)
    line = f"trains {trained:,} of {model.num_parameters():,} parameters"
    if config.model.architecture == GPT2.name:
        line += f", dropout {config.model.dropout:g}"
    return line
