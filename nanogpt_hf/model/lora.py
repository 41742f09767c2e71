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

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from nanogpt_hf.config.schema import FinetuneSection, LoraSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.model.architecture import architecture_of

_A = "lora_A.default.weight"  # (rank, in)
_B = "lora_B.default.weight"  # (out, rank)
_BLOCK = re.compile(r".*?\.\d+\.")  # such as transformer.h.3.


@contextmanager
def without_peft_warnings() -> Iterator[None]:
    """Context for calls of peft 0.21: it reads an attribute of models that transformers 5.23 has
    renamed, and transformers warns about it.
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
    with torch.random.fork_rng(devices=[]), without_peft_warnings():
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
    architecture = architecture_of(model_config)
    layers_on_disk = architecture.layers_on_disk if architecture.is_standard(model_config) else {}
    layers = layers_on_disk or {target: (target,) for target in section.targets}
    # Layer on disk -> how many of our layers in it are adapted.
    adapted = {}
    for on_disk, ours in layers.items():
        adapted[on_disk] = sum(name.rpartition(".")[2] in section.targets for name in ours)
    # The adapter of several layers has the rank times their number; alpha is multiplied too, so
    # that alpha / rank stays.
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
    save_adapter_weights(folder, layers_on_disk, weights)


def save_adapter_weights(
    folder: Path, layers_on_disk: dict[str, tuple[str, ...]], weights: dict[str, torch.Tensor]
) -> None:
    """Write the adapters among `weights` (our names) in peft's format, without a configuration."""
    save_file(
        standard_adapters(layers_on_disk, weights),
        folder / "adapter_model.safetensors",
        {"format": "pt"},
    )
