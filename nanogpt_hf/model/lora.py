"""LoRA (Hu et al. 2021, arXiv:2106.09685) by peft: adapters on our layers, and the same adapters for a plain GPT-2.

In memory q, k and v are three layers with an adapter each; GPT-2 has them in one, c_attn. Its adapter is exact: the A
matrices lie one above the other and the B matrices on a diagonal, which makes three times the rank.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, inject_adapter_in_model
from safetensors.torch import save_file

from nanogpt_hf.config.hub_name import folder_or_hub_id
from nanogpt_hf.config.schema import FinetuneSection, LoraSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.model.layout_gpt import GPT2_LAYOUT
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM

_A, _B = "lora_A.default.weight", "lora_B.default.weight"  # (rank, in) and (out, rank)


@contextmanager
def _unwarned() -> Iterator[None]:
    """peft 0.21 asks models by a name that transformers 5.23 has renamed, and transformers says so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield


def scaling(section: LoraSection) -> float:
    """What B·A is multiplied by: alpha / rank."""
    return _alpha(section) / section.rank


def _alpha(section: LoraSection) -> float:
    return 2 * section.rank if section.alpha is None else section.alpha


def add_adapters(model: GPTForCausalLM, section: LoraSection, seed: int) -> None:
    """Put an adapter beside every target and freeze all else. The same seed draws the same adapters everywhere."""
    config = LoraConfig(
        r=section.rank,
        lora_alpha=_alpha(section),
        lora_dropout=section.dropout,
        target_modules=list(section.targets),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), _unwarned():
        torch.manual_seed(derive_seed(seed, "weights"))
        inject_adapter_in_model(config, model)


def merged_weights(weights: dict[str, torch.Tensor], section: LoraSection) -> dict[str, torch.Tensor]:
    """Weights of a model with adapters -> those of a model without that computes the same. Names are ours."""
    merged = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    for name in [name for name in merged if name.endswith(".base_layer.weight")]:
        layer = name.removesuffix("base_layer.weight")
        merged[name] = merged[name] + scaling(section) * weights[layer + _B] @ weights[layer + _A]
    return {name.replace(".base_layer.", "."): weight for name, weight in merged.items()}


def gpt2_adapters(n_layer: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapters among `weights` (our names) as those of GPT-2's layers, by peft's names."""
    result = {}
    for block in (f"transformer.h.{i}." for i in range(n_layer)):
        for gpt2, ours in GPT2_LAYOUT.items():
            there = [i for i, name in enumerate(ours) if f"{block}{name}.{_A}" in weights]
            if not there:
                continue
            a = torch.cat([weights[f"{block}{ours[i]}.{_A}"] for i in there])
            parts = {i: weights[f"{block}{ours[i]}.{_B}"] for i in there}
            out, rank = parts[there[0]].shape
            b = parts[there[0]].new_zeros(out * len(ours), rank * len(there))
            for column, i in enumerate(there):
                b[i * out : (i + 1) * out, column * rank : (column + 1) * rank] = parts[i]
            layer = f"base_model.model.{block}{gpt2}"
            result |= {f"{layer}.lora_A.weight": a.contiguous(), f"{layer}.lora_B.weight": b}
    return result


def save_adapter(
    folder: Path, n_layer: int, section: LoraSection, finetune: FinetuneSection, weights: dict[str, torch.Tensor]
) -> None:
    """Write the adapters among `weights` (our names) in peft's format, for the plain GPT-2 they were trained on."""
    # The scale alpha / rank stays when both are multiplied.
    together = {
        gpt2: sum(name.rpartition(".")[2] in section.targets for name in ours) for gpt2, ours in GPT2_LAYOUT.items()
    }
    base = Path(finetune.model)
    config = LoraConfig(
        r=section.rank,
        lora_alpha=_alpha(section),
        lora_dropout=section.dropout,
        target_modules=[gpt2 for gpt2, count in together.items() if count],
        rank_pattern={gpt2: count * section.rank for gpt2, count in together.items() if count > 1},
        alpha_pattern={gpt2: count * _alpha(section) for gpt2, count in together.items() if count > 1},
        fan_in_fan_out=True,  # GPT-2's matrices are (in, out)
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=str(base.resolve()) if base.is_dir() else finetune.model,
        revision=finetune.revision,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    save_file(gpt2_adapters(n_layer, weights), folder / "adapter_model.safetensors", {"format": "pt"})


def load_merged(folder: str) -> GPTForCausalLM:
    """The base model of the adapter in `folder`, with the adapter added in, in float32."""
    folder = str(Path(folder).resolve())  # peft asks the Hub for a relative one that lacks a tokenizer
    adapter = PeftConfig.from_pretrained(folder)
    where = folder_or_hub_id(adapter.base_model_name_or_path)
    model = GPTForCausalLM.from_pretrained(
        where, revision=adapter.revision, dtype=torch.float32, trust_remote_code=False
    )
    with _unwarned():
        opened = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        whole = opened.merge_and_unload()
    # GPT-2 always has biases; where ours has none they are zeros, which LoRA leaves alone
    weights = {n: w for n, w in whole.state_dict().items() if model.config.bias or not n.endswith(".bias")}
    model.load_state_dict(weights)
    return model
