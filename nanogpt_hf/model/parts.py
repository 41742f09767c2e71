"""Find the parts of a model: blocks, embeddings, norms, and what each linear layer is for.

No class of transformers is named here. The parts are found by `_no_split_modules`, the types of the
layers, and the order and widths of linear layers.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from nanogpt_hf.model.config_fields import active_experts
from nanogpt_hf.model.experts import experts_of


class LinearLayers(NamedTuple):
    """Linear layers of a block by name; the last of each writes to the residual stream."""

    attention: dict[str, Any]
    others: dict[str, Any]  # MLPs and all else, without experts


class ModelParts:
    """Finds the parts of a model of any architecture. Methods take a model that is not prepared."""

    def blocks(self, model: PreTrainedModel) -> Any:
        """Transformer blocks, lowest first."""
        return model.get_submodule(_names_of_parts(model).blocks)

    def embeddings(self, model: PreTrainedModel) -> list[nn.Module]:
        """Embeddings of tokens, and of positions if they are learned."""
        # Some types have embeddings inside of their blocks, which are parts of these.
        inside = f"{_names_of_parts(model).blocks}."
        return [
            module
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and not name.startswith(inside)
        ]

    def final_norm(self, model: PreTrainedModel) -> nn.Module:
        return model.get_submodule(_names_of_parts(model).final_norm)

    def attention(self, block: nn.Module) -> Any:
        """Part of a block that mixes tokens: attention, or its first part without one."""
        parts = [part for part in block.children() if any(p.dim() > 1 for p in part.parameters())]
        for part in parts:
            if "Attention" in type(part).__name__:
                return part
        return parts[0]

    def linear_layers(self, block: nn.Module) -> LinearLayers:
        """Linear layers of attention, and all others but experts."""
        inside = set(self.attention(block).modules())
        found = LinearLayers({}, {})
        for name, module in block.named_modules():
            if not isinstance(module, nn.Linear) or ".lora_" in name:
                continue
            # peft puts a layer into one with its adapter, which has the layer's name.
            name = name.removesuffix(".base_layer")
            layers = found.attention if module in inside else found.others
            layers[name] = block.get_submodule(name)
        # The first layer reads the residual stream, so it has its width. The last that returns as
        # many values writes to the residual stream.
        width = next((layer.in_features for layers in found for layer in layers.values()), 0)
        for layers in found:
            wide = [name for name, layer in layers.items() if layer.out_features == width]
            if wide:
                # Removed and added again, it is the last of the dict.
                layers[wide[-1]] = layers.pop(wide[-1])
        return found

    def inner_width(self, block: nn.Module, config: Any) -> int:
        """Values per token that the last matrices of the MLP and of a token's experts multiply."""
        # The last matrix goes back to the residual stream, so it reads the inner values.
        mlp = list(self.linear_layers(block).others.values())
        width = sum(layer.in_features for layer in mlp[-1:])
        for experts in experts_of(block):
            matrix = experts.down_proj[0].numel()  # one expert's: inner × hidden_size
            width += active_experts(config) * matrix // config.hidden_size
        return width

    def residual_weights(self, block: nn.Module) -> list[nn.Parameter]:
        """Weights that write to the residual stream."""
        layers = [list(part.values())[-1].weight for part in self.linear_layers(block) if part]
        return layers + [experts.down_proj for experts in experts_of(block)]

    def depths(self, model: PreTrainedModel) -> dict[str, int]:
        """Parameter name -> depth: 0 for embeddings, 1, 2, ... for blocks, and one more for the
        layers above them.
        """
        blocks = self.blocks(model)
        # By identity: a tied head is the embedding's parameter, and has its depth.
        depth: dict[int, int] = {}
        for module in self.embeddings(model):
            for parameter in module.parameters():
                depth[id(parameter)] = 0
        for number, block in enumerate(blocks, 1):
            for parameter in block.parameters():
                depth[id(parameter)] = number
        above = len(blocks) + 1
        return {name: depth.get(id(p), above) for name, p in model.named_parameters()}

    def families(self, model: PreTrainedModel) -> dict[str, str]:
        """Parameter name -> its kind in optim.rates, optim.betas and optim.weight_decays, or
        `other`.
        """
        found: dict[int, str] = {}

        def note(family: str, module: nn.Module) -> None:
            for parameter in module.parameters():
                found[id(parameter)] = family

        for module in self.embeddings(model):
            note("positions", module)
        tokens: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        note("tokens", tokens)
        # Not by identity: the last pipeline stage has a copy of a tied head.
        note("tokens" if model.config.tie_word_embeddings else "head", head)
        for block in self.blocks(model):
            if not any(True for _ in block.parameters()):  # it is on another pipeline stage
                continue
            layers = self.linear_layers(block)
            for kind, last, modules in (
                ("query_key_value", "attention_output", [*layers.attention.values()]),
                ("mlp_in", "mlp_out", [*layers.others.values()]),
            ):
                for module in modules[:-1]:
                    note(kind, module)
                for module in modules[-1:]:
                    note(last, module)
        for experts in experts_of(model):
            for name, parameter in experts.named_parameters():
                inner = "mlp_out" if name.startswith("down") else "mlp_in"
                # A matrix for each expert has three dimensions; with two it is all their biases.
                found[id(parameter)] = inner if parameter.dim() > 2 else "vectors"
        return {
            name: "vectors" if p.dim() < 2 else found.get(id(p), "other")
            for name, p in model.named_parameters()
        }

    def freeze(self, model: PreTrainedModel, layers: int) -> None:
        """Freeze the embeddings (and a tied head) and the lowest `layers` blocks; -1 freezes
        nothing.
        """
        # 0 freezes the embeddings alone: they are below the first block.
        if layers >= 0:
            for module in [*self.embeddings(model), *self.blocks(model)[:layers]]:
                module.requires_grad_(False)


@dataclass(frozen=True)
class _Names:
    """Names of the parts of a model."""

    blocks: str
    final_norm: str


def _names_of_parts(model: PreTrainedModel) -> _Names:
    """Names of a model's parts, found at the first call, since wrappers change its types."""
    if "parts" not in vars(model):
        vars(model)["parts"] = _find_parts(model, str(model.config.model_type))
    return vars(model)["parts"]


def _find_parts(model: PreTrainedModel, kind: str) -> _Names:
    """Raises ValueError if the model has not one list of blocks, a final norm and a linear head."""
    names = set(model._no_split_modules or ())
    lists: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        is_block = isinstance(module[0], GradientCheckpointingLayer)
        is_inside = any(name.startswith(f"{known}.") for known in lists)
        if (is_block or type(module[0]).__name__ in names) and not is_inside:
            lists.append(name)
    if len(lists) != 1:
        raise ValueError(f"{kind} has no single list of blocks, and is not supported")
    # The final norm is the last one next to the blocks.
    container = lists[0].rpartition(".")[0]
    norms = [
        name
        for name, module in model.get_submodule(container).named_children()
        if "norm" in type(module).__name__.lower()
    ]
    if not norms or not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ValueError(f"{kind} has no final norm or linear head, and is not supported")
    return _Names(lists[0], f"{container}.{norms[-1]}")
