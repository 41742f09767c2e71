"""Weight layout on disk: GPT-2's names for our layers, and its transposed matrices.

Imports only its neighbors, so that these pages can be read and copied alone.
"""

import copy
import os
import re
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig, GPT2LMHeadModel, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    ConversionOps,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from .configuration_gpt import GPTConfig
from .head_gpt import Head

# GPT-2's name for a layer -> ours. GPT-2 stores (in, out) matrices, with q, k and v concatenated in
# one.
GPT2_LAYOUT = {
    "attn.c_attn": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "attn.c_proj": ("attn.o_proj",),
    "mlp.c_fc": ("mlp.fc",),
    "mlp.c_proj": ("mlp.proj",),
}
# Parameters with the same name and layout in both.
_SAME_NAME = re.compile(r"transformer\.(wpe|ln_f|h\.\d+\.ln_[12])\.(weight|bias)")


def _loading_rules() -> list[WeightConverter | WeightRenaming]:
    """transformers' rules for GPT-2's files: matrices are transposed, q, k and v are cut apart."""
    rules = []
    for gpt2, ours in GPT2_LAYOUT.items():
        split: list[ConversionOps] = [Chunk(dim=0)] if len(ours) > 1 else []
        weights = [f"{name}.weight" for name in ours]
        biases = [f"{name}.bias" for name in ours]
        rules.append(
            WeightConverter(f"{gpt2}.weight", weights, operations=[Transpose(0, 1), *split])
        )
        if split:
            rules.append(WeightConverter(f"{gpt2}.bias", biases, operations=split))
        else:
            rules.append(WeightRenaming(f"{gpt2}.bias", biases[0]))
    return rules


# Overwritten, since the module may be imported twice: a copy of these pages beside the package, or
# again in a notebook.
register_checkpoint_conversion_mapping(GPTConfig.model_type, _loading_rules(), overwrite=True)


def gpt2_state_dict(
    config: GPTConfig, state_dict: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Our weights by GPT-2's names and in its layout; missing biases become zeros, and padded
    rows are cut off.
    """
    ours = dict(state_dict)
    if not ours:
        raise ValueError("state_dict: is empty; give the state_dict() of the model")
    result = {}
    # Embedding and head: GPT-2's file has one matrix if they are tied.
    if config.tie_word_embeddings:
        ours.pop("lm_head.weight", None)
    else:
        result["lm_head.weight"] = ours.pop("lm_head.weight")[: config.vocab_size]
    result["transformer.wte.weight"] = ours.pop("transformer.wte.weight")[: config.vocab_size]
    for number in range(config.n_layer):
        block = f"transformer.h.{number}."
        for gpt2, names in GPT2_LAYOUT.items():
            weight = torch.cat([ours.pop(f"{block}{name}.weight") for name in names])  # (out, in)
            biases = []
            for name in names:
                bias = ours.pop(f"{block}{name}.bias", None)
                if bias is not None:
                    biases.append(bias)
            result[f"{block}{gpt2}.weight"] = weight.T  # (in, out)
            result[f"{block}{gpt2}.bias"] = (
                torch.cat(biases) if biases else weight.new_zeros(len(weight))
            )
    # Positions and LayerNorms have the same names and layout.
    if new := [name for name in ours if not _SAME_NAME.fullmatch(name)]:
        raise ValueError(
            f"GPT-2 has no {new[0]}; a change of the model needs a field of GPTConfig, with a "
            "default that leaves it out"
        )
    result |= ours
    for name, weight in ours.items():
        if ".ln_" in name and name.endswith(".weight"):
            bias_name = name.removesuffix("weight") + "bias"
            result.setdefault(bias_name, torch.zeros_like(weight))
    return {name: weight.contiguous() for name, weight in result.items()}


def from_gpt2_state_dict(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Invert gpt2_state_dict, for load_state_dict; weights with our names are unchanged."""
    result = {}
    for name, tensor in state_dict.items():
        # transformer.h.3.attn.c_attn.weight -> block transformer.h.3., layer attn.c_attn
        path, _, kind = name.rpartition(".")
        layers = [layer for layer in GPT2_LAYOUT if path.endswith(f".{layer}")]
        if not layers:
            result[name] = tensor
            continue
        block = path.removesuffix(layers[0])
        names = GPT2_LAYOUT[layers[0]]
        if kind == "weight":
            tensor = tensor.T  # (in, out) -> (out, in)
        for ours, part in zip(names, tensor.chunk(len(names)), strict=True):
            result[f"{block}{ours}.{kind}"] = part
    return result


def drop_zero_biases(model: PreTrainedModel) -> None:
    """Remove the biases of a model if all of them are zero.

    Biases that were trained since are kept.
    """
    layers = [
        m for m in model.modules() if isinstance(m, nn.Linear | nn.LayerNorm) and m.bias is not None
    ]
    # One bias that is not zero means that the model has biases.
    if not any(layer.bias.any() for layer in layers):
        for layer in layers:
            layer.register_parameter("bias", None)
        model.config.bias = False


def check_loaded(name: Any, kind: str, info: dict[str, Any]) -> None:
    """Raises ValueError if loading a model found missing, unexpected or misshapen weights."""
    wrong = [
        f"{problem.replace('_', ' ')}: {sorted(map(str, keys))[:3]}"
        for problem, keys in info.items()
        if keys
    ]
    if wrong:
        raise ValueError(f"{name} is not a {kind} checkpoint; {'; '.join(wrong)}")


def save_as_gpt2(
    folder: Any,
    config: GPTConfig,
    weights: dict[str, torch.Tensor],
    generation: GenerationConfig | None,
    **kwargs,
) -> Any:
    """Write `weights` (our names) as a plain GPT-2."""
    weights = gpt2_state_dict(config, weights)
    # transformers' own class writes the files, so that they are what any tool expects.
    with torch.device("meta"):
        gpt2: Any = GPT2LMHeadModel(config.to_gpt2())
        gpt2 = gpt2.to(weights["transformer.wte.weight"].dtype)
    # transformers would write a part of a model without a word.
    shapes = {name: weight.shape for name, weight in weights.items()}
    if config.tie_word_embeddings:
        shapes["lm_head.weight"] = shapes["transformer.wte.weight"]
    for name, weight in gpt2.state_dict().items():
        if shapes.get(name) != weight.shape:
            found = f"has {list(shapes[name])}" if name in shapes else "is missing"
            raise ValueError(
                f"state_dict: {name} of GPT-2's names {found}, not {list(weight.shape)}; give the "
                "state_dict() of the model"
            )
    gpt2.generation_config = generation
    return gpt2.save_pretrained(folder, state_dict=weights, **kwargs)


class GPT2Files(PreTrainedModel if TYPE_CHECKING else object):
    """Mixin of a model with our names, head and padded rows that reads and writes GPT-2's files."""

    config: Any

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, pretrained_model_name_or_path, *args, output_loading_info=False, **kwargs
    ) -> Any:
        """Load as in transformers, but raise ValueError for a missing, unexpected or misshapen
        weight.

        With output_loading_info it is in the information, and the caller checks it.
        """
        if isinstance(pretrained_model_name_or_path, str):
            pretrained_model_name_or_path = os.path.expanduser(pretrained_model_name_or_path)
        # None would ask on a terminal.
        kwargs["trust_remote_code"] = False
        raw, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **kwargs)
        # A GPT-2 on disk has biases, which are all zero if the model has none: load them, then
        # remove them if they are.
        zeros_for_no_bias = raw.get("model_type") == "gpt2" and raw.get("bias") is False
        if zeros_for_no_bias and isinstance(kwargs.get("config"), GPTConfig):
            kwargs["config"] = copy.deepcopy(kwargs["config"])
            kwargs["config"].bias = True
        elif zeros_for_no_bias:
            kwargs["bias"] = True
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
        )
        model, info = loaded
        if not output_loading_info:
            check_loaded(pretrained_model_name_or_path, "GPT-2", info)
        if zeros_for_no_bias:
            drop_zero_biases(model)
        return (model, info) if output_loading_info else model

    def resize_token_embeddings(self, *args, **kwargs):
        self.config.padded_vocab_size = None  # exactly the size that was asked for
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        # transformers replaces our head by a plain layer, which knows no loss.
        if type(self.lm_head) is nn.Linear:
            self.lm_head = Head.of(self.lm_head)
        return embeddings

    def load_state_dict(self, state_dict, *args, **kwargs):
        return super().load_state_dict(from_gpt2_state_dict(state_dict), *args, **kwargs)

    def save_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, save_directory, state_dict=None, **kwargs
    ) -> Any:
        """Write a plain GPT-2, or our own type if GPT-2 cannot represent the model; the adapters
        alone, if the model has peft's.

        `state_dict` has our names. A new folder is removed if it cannot be written whole, unless it
        is to be pushed as well.
        """
        folder = os.path.expanduser(save_directory)
        # For a file transformers logs a line, and returns.
        if os.path.lexists(folder) and not os.path.isdir(folder):
            raise FileExistsError(f"{folder}: is no folder, or a link to none; name another")
        # Of several processes the main one writes.
        is_new = kwargs.get("is_main_process", True) and not os.path.isdir(folder)
        try:
            return self._save(folder, state_dict, **kwargs)
        except BaseException:
            if is_new and kwargs.get("push_to_hub"):
                # A push that fails comes after the last file: the model is whole.
                with suppress(OSError):
                    os.rmdir(folder)
            elif is_new:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _save(self, folder: str, state_dict: Any, **kwargs) -> Any:
        if getattr(self, "_hf_peft_config_loaded", False) or not self.config.is_gpt2:
            return super().save_pretrained(folder, state_dict=state_dict, **kwargs)
        weights = self.state_dict() if state_dict is None else state_dict
        # With FSDP2 accelerate's get_state_dict gives them to the main process alone.
        if not weights and not kwargs.get("is_main_process", True):
            return None
        return save_as_gpt2(folder, self.config, weights, self.generation_config, **kwargs)
