"""Choose the linear layers that LoRA may adapt, by the ends of their names, as peft finds them.

A table states every reason against a layer.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from nanogpt_hf.model.decoders import Architecture, key_of
from nanogpt_hf.model.experts import experts_of
from nanogpt_hf.model.trial_step import output_shapes


@dataclass(frozen=True)
class _Layer:
    """A linear layer of a block, and the facts that decide."""

    name: str  # the last part, such as q_proj
    is_beside_convolution: bool
    gives_its_product: bool  # the forward pass calls it, and gets (..., outputs)
    is_shared: bool  # its weight is the weight of another layer too
    is_beside_experts: bool


_NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
# A name for which one of these holds anywhere is no target: peft would adapt every layer of it.
_NO_NAME: dict[str, Callable[[_Layer], bool]] = {
    "its adapters could not be merged into a weight that several layers share": lambda layer: (
        layer.is_shared
    ),
    "peft takes it for the layer of an expert": lambda layer: (
        layer.is_beside_experts and layer.name in _NAMES_OF_EXPERTS
    ),
}
# A layer for which one of these holds does not make its name a target.
_NO_LAYER: dict[str, Callable[[_Layer], bool]] = {
    "its name is a number, as the names of blocks are": lambda layer: layer.name.isdigit(),
    "a kernel reads the weights beside a convolution without calling the layers, except the "
    "projection of its input": lambda layer: (
        layer.is_beside_convolution and not layer.name.startswith("in_proj")
    ),
    "the forward pass reads its weight without calling it, or it returns more than its product, or "
    "the product of several groups": lambda layer: not layer.gives_its_product,
}
_FOUND: dict[tuple[str, str], tuple[str, ...]] = {}


def lora_targets(architecture: Architecture, config: PreTrainedConfig) -> tuple[str, ...]:
    """Names of the linear layers that LoRA may adapt: `_NO_NAME` and `_NO_LAYER` have the reasons
    against one. A model with experts has targets in attention alone.
    """
    key = architecture.name, key_of(config)
    if key not in _FOUND:  # a model is built and runs for them, if on the meta device
        _FOUND[key] = _find_targets(architecture, config)
    return _FOUND[key]


def _find_targets(architecture: Architecture, config: PreTrainedConfig) -> tuple[str, ...]:
    model: Any = architecture.on_meta(config)
    product = _gives_product(model)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    uses = Counter(id(layer.weight) for layer in linear)
    has_experts = bool(experts_of(model))
    refused = set[str]()
    found = dict[str, None]()  # a set that keeps the model's order
    for block in architecture.blocks(model):
        parts = architecture.linear_layers(block)
        # peft takes the MLPs beside experts for experts.
        names = [*parts.attention] if has_experts else [*parts.attention, *parts.others]
        for name in names:
            container, _, last = name.rpartition(".")
            module: Any = block.get_submodule(name)
            layer = _Layer(
                last,
                is_beside_convolution=hasattr(block.get_submodule(container), "conv1d"),
                gives_its_product=product.get(module, False),
                is_shared=uses[id(module.weight)] > 1,
                is_beside_experts=has_experts,
            )
            if any(holds(layer) for holds in _NO_NAME.values()):
                refused.add(last)
            elif not any(holds(layer) for holds in _NO_LAYER.values()):
                found[last] = None
    return tuple(name for name in found if name not in refused)


def _gives_product(model: Any) -> dict[nn.Module, bool]:
    """Whether a layer returns its product, for each layer that a forward pass calls."""
    found: dict[nn.Module, bool] = {}

    def note(layer: Any, _: Any, out: Any) -> None:
        # The layer of several groups returns another width than its number of outputs.
        found[layer] = torch.is_tensor(out) and out.shape[-1:] == (layer.out_features,)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note)
    try:
        output_shapes(model)
    except Exception:  # the meta device cannot tell
        return dict.fromkeys(model.modules(), True)
    return found
