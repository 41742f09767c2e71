"""Load an adapter of LoRA, merged into its base model. Refuse files that peft would read as another
adapter.
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForCausalLM, PeftConfig, load_peft_weights, set_peft_model_state_dict
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from nanogpt_hf.config.names import folder_or_hub_id
from nanogpt_hf.errors import one_line
from nanogpt_hf.model.architecture import architecture_on_disk
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.generation_file import check_generation_file
from nanogpt_hf.model.layout_gpt import check_loaded
from nanogpt_hf.model.lora import without_peft_warnings


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _is_rank(value: Any) -> bool:
    return _is_whole(value) and value > 0


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _one_or_several(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return value is None or all(map(is_valid, value if isinstance(value, list) else [value]))


def _pattern(value: Any, is_valid: Callable[[Any], bool]) -> bool:
    return value is None or (isinstance(value, dict) and all(map(is_valid, value.values())))


# Fields of adapter_config.json that decide what is loaded, what each has to be, and a test of it.
# peft accepts any value and fails later, or computes something else.
_NEEDED = ("peft_type", "base_model_name_or_path")


_ADAPTER_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "peft_type": ('"LORA"; no other adapters of peft are read', lambda value: value == "LORA"),
    "base_model_name_or_path": ("a folder or Hub id", _is_name),
    "r": ("a whole number from 1", _is_rank),
    "lora_alpha": ("a finite number", _is_finite),
    "lora_dropout": ("a number from 0 to 1", lambda value: _is_finite(value) and 0 <= value <= 1),
    "rank_pattern": ("an object of whole numbers from 1", lambda value: _pattern(value, _is_rank)),
    "alpha_pattern": ("an object of finite numbers", lambda value: _pattern(value, _is_finite)),
    "target_modules": (
        "a name, a list of names, or null",
        lambda value: _one_or_several(value, _is_name),
    ),
    "exclude_modules": (
        "a name, a list of names, or null",
        lambda value: _one_or_several(value, _is_name),
    ),
    "layers_to_transform": (
        "a whole number, a list of such, or null",
        lambda value: _one_or_several(value, _is_whole),
    ),
}


def _check_adapter_files(folder: Path) -> None:
    """Raises ValueError if adapter_config.json does not describe LoRA, or there are no weights."""
    try:
        fields = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CONFIG_NAME} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{CONFIG_NAME} is not a JSON object")
    for name, (expected, is_valid) in _ADAPTER_FIELDS.items():
        if name in _NEEDED and name not in fields:
            raise ValueError(f"{CONFIG_NAME} has no {name}; expected {expected}")
        if name in fields and not is_valid(fields[name]):
            value = one_line(json.dumps(fields[name]), 100)
            raise ValueError(f"{CONFIG_NAME}: {name} {value} is not {expected}")
    # peft would ask the Hub for weights that are missing.
    if not any((folder / name).is_file() for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME)):
        raise ValueError(f"there is no {SAFETENSORS_WEIGHTS_NAME} beside {CONFIG_NAME}")


def _check_whole(folder: str, opened: Any) -> None:
    """Raises ValueError if the weights in `folder` are not the ones that the adapter of `opened`
    trains: peft starts missing ones at random and leaves out unknown ones.
    """
    weights = load_peft_weights(folder, device="cpu")
    if wrong := [name for name, weight in weights.items() if not weight.is_floating_point()]:
        raise ValueError(
            f"its {wrong[0]} is {weights[wrong[0]].dtype}, not a floating-point number"
        )
    loaded = set_peft_model_state_dict(opened, weights)
    trained = {name for name, parameter in opened.named_parameters() if parameter.requires_grad}
    keys = {
        "missing_keys": trained.intersection(loaded.missing_keys),
        "unexpected_keys": loaded.unexpected_keys,
    }
    check_loaded(folder, "whole LoRA", keys)


def load_merged(folder: str) -> PreTrainedModel:
    """Base model of the adapter in `folder`, with the adapter merged in, in float32.

    Raises ValueError if the folder is not a whole adapter of LoRA.
    """
    # peft asks the Hub for a relative path whose folder lacks a tokenizer.
    folder = str(Path(folder).resolve())
    _check_adapter_files(Path(folder))
    # The base model is loaded twice: with our class, and with transformers' own, into which peft
    # merges the adapter. The weights of the second go into the first.
    adapter = PeftConfig.from_pretrained(folder)
    base = folder_or_hub_id(str(adapter.base_model_name_or_path))
    check_generation_file(Path(base))
    model = architecture_on_disk(base, adapter.revision).read_model(base, adapter.revision)
    with without_peft_warnings():
        # Missing tensors are refused below, in one line.
        warnings.filterwarnings("ignore", "Found missing adapter keys")
        try:
            # is_trainable marks the weights that belong to the adapter.
            opened = AutoPeftModelForCausalLM.from_pretrained(
                folder, is_trainable=True, dtype=torch.float32, trust_remote_code=False
            )
        # adapter_config.json names a whole layer, or rows of tokens, and they are missing.
        except KeyError as error:
            check_loaded(folder, "whole LoRA", {"missing_keys": error.args})
            raise
        _check_whole(folder, opened)
        whole = opened.merge_and_unload()
    state = whole.state_dict()
    if isinstance(model.config, GPTConfig) and not model.config.bias:
        # A GPT-2 on disk has biases, which are zeros if ours has none; LoRA does not change them.
        # The field `bias` of another type, such as Falcon's, is not about all biases.
        state = {name: weight for name, weight in state.items() if not name.endswith(".bias")}
    model.load_state_dict(state)
    if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
        # It has the ends of turns that the adapter has learned.
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.name_or_path = folder
    return model
