"""LoRA (Hu et al. 2021, arXiv:2106.09685) by peft: adapters on our layers, and the same for the
standard model.

An adapter adds alpha / rank · B·A to the frozen matrix of a layer: A is (rank, in), B is (out,
rank). B begins at zero, so that training begins at the model itself.

GPT-2 has our layers q, k and v in one, c_attn. Its adapter is exact: the A matrices stacked, and
the B matrices on a block diagonal, which makes three times the rank:

    [ B_q·A_q ]   [ B_q  0    0   ]   [ A_q ]
    [ B_k·A_k ] = [ 0    B_k  0   ] · [ A_k ]
    [ B_v·A_v ]   [ 0    0    B_v ]   [ A_v ]
"""

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftConfig,
    inject_adapter_in_model,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from nanogpt_hf.config.names import folder_or_hub_id
from nanogpt_hf.config.schema import FinetuneSection, LoraSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.errors import one_line
from nanogpt_hf.model.architecture import architecture_of, architecture_on_disk
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.generation_file import check_generation_file
from nanogpt_hf.model.layout_gpt import check_loaded

_A = "lora_A.default.weight"  # (rank, in)
_B = "lora_B.default.weight"  # (out, rank)
_BLOCK = re.compile(r".*?\.\d+\.")  # such as transformer.h.3.


@contextmanager
def _unwarned() -> Iterator[None]:
    """peft 0.21 reads a model's attribute that transformers 5.23 has renamed, and transformers
    warns about it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield


def _sizes(section: LoraSection) -> tuple[int, Any]:
    """Rank and alpha; alpha / rank is the factor of B·A."""
    assert section.rank is not None, "lora.rank is not set"
    return section.rank, 2 * section.rank if section.alpha is None else section.alpha


def _peft_config(section: LoraSection, **options: Any) -> LoraConfig:
    rank, alpha = _sizes(section)
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=section.dropout,
        task_type="CAUSAL_LM",
        **options,
    )


def add_adapters(model: PreTrainedModel, section: LoraSection, seed: int) -> None:
    """Add an adapter to every target and freeze the rest.

    The same seed draws the same adapters everywhere.
    """
    # peft draws A, and B is zero. The generator of the process stays where it was.
    config = _peft_config(section, target_modules=list(section.targets))
    with torch.random.fork_rng(devices=[]), _unwarned():
        torch.manual_seed(derive_seed(seed, "weights"))
        inject_adapter_in_model(config, model)


def merged_weights(
    weights: dict[str, torch.Tensor], section: LoraSection
) -> dict[str, torch.Tensor]:
    """Weights of a model with adapters -> the weights of an equal model without adapters. Names
    are ours.
    """
    # peft names the frozen layer LAYER.base_layer, its adapter LAYER.lora_A and LAYER.lora_B.
    merged = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    rank, alpha = _sizes(section)
    for name in list(merged):
        if name.endswith(".base_layer.weight"):
            layer = name.removesuffix("base_layer.weight")
            merged[name] = merged[name] + alpha / rank * weights[layer + _B] @ weights[layer + _A]
    return {name.replace(".base_layer.", "."): weight for name, weight in merged.items()}


def standard_adapters(
    layers_on_disk: dict[str, tuple[str, ...]], weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Adapters among `weights` (our names) for the standard model, by peft's names."""
    adapters = {name: weight for name, weight in weights.items() if name.endswith((_A, _B))}
    if not layers_on_disk:
        return {
            f"base_model.model.{name.replace('.default.', '.')}": weight
            for name, weight in adapters.items()
        }
    result = {}
    blocks = [match[0] for name in adapters if (match := _BLOCK.match(name))]
    for block in dict.fromkeys(blocks):  # each once, in order
        for on_disk, ours in layers_on_disk.items():
            adapted = [i for i, name in enumerate(ours) if f"{block}{name}.{_A}" in adapters]
            if not adapted:
                continue
            # A stacked, and B on the diagonal; a layer without adapter has rows of zeros.
            a = torch.cat([adapters[f"{block}{ours[i]}.{_A}"] for i in adapted])
            parts = {i: adapters[f"{block}{ours[i]}.{_B}"] for i in adapted}
            out, rank = parts[adapted[0]].shape
            b = parts[adapted[0]].new_zeros(out * len(ours), rank * len(adapted))
            for column, i in enumerate(adapted):
                b[i * out : (i + 1) * out, column * rank : (column + 1) * rank] = parts[i]
            layer = f"base_model.model.{block}{on_disk}"
            result |= {f"{layer}.lora_A.weight": a.contiguous(), f"{layer}.lora_B.weight": b}
    return result


def save_adapter(
    folder: Path,
    model_config: PreTrainedConfig,
    section: LoraSection,
    finetune: FinetuneSection,
    weights: dict[str, torch.Tensor],
) -> None:
    """Write the adapters among `weights` (our names) in peft's format, for the standard model
    they were trained on.
    """
    assert finetune.model is not None, "adapters are trained on finetune.model"
    layers_on_disk = architecture_of(model_config).layers_on_disk
    layers = layers_on_disk or {target: (target,) for target in section.targets}
    # Layer on disk -> how many of our layers in it are adapted.
    adapted = {}
    for on_disk, ours in layers.items():
        adapted[on_disk] = sum(name.rpartition(".")[2] in section.targets for name in ours)
    # Their adapter has so many times the rank; alpha is multiplied too, so that alpha / rank stays.
    several = {layer: count for layer, count in adapted.items() if count > 1}
    base = Path(finetune.model)
    rank, alpha = _sizes(section)
    config = _peft_config(
        section,
        target_modules=[layer for layer, count in adapted.items() if count],
        rank_pattern={layer: count * rank for layer, count in several.items()},
        alpha_pattern={layer: count * alpha for layer, count in several.items()},
        fan_in_fan_out=bool(layers_on_disk),  # GPT-2's matrices are (in, out)
        inference_mode=True,
        base_model_name_or_path=str(base.resolve()) if base.is_dir() else finetune.model,
        revision=finetune.revision,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    save_file(
        standard_adapters(layers_on_disk, weights),
        folder / "adapter_model.safetensors",
        {"format": "pt"},
    )


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
    with _unwarned():
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
