"""Any text-only decoder of transformers behind the seam of architecture.py: Llama, Qwen3, OLMo 2,
nanochat, ...

The models are transformers' own classes, with our loss (loss_decoders.py). Nothing here names
one of them: the parts of a model are found by its config's fields, `_no_split_modules` and the
types of its layers.
"""

import copy
import dataclasses
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from nanogpt_hf.config.schema import KNOBS, ModelSection
from nanogpt_hf.errors import did_you_mean, one_line
from nanogpt_hf.model.loss_decoders import model_class_of, standard_class

# Knob of the section `model` -> name of the size in transformers; a config may have another, by its
# attribute_map.
SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_kv_head": "num_key_value_heads",
    "n_inner": "intermediate_size",
}
_OPTIONAL_SIZES = ("n_kv_head", "n_inner")
# How tensor parallelism splits a layer: each process computes a part of its outputs, or of each
# output the sum over a part of its inputs. A layer of heads has one weight for all heads, and each
# process has a part of the heads.
Split = Literal["outputs", "inputs", "heads"]
_SPLITS: dict[str, Split] = {
    "colwise": "outputs",
    "rowwise": "inputs",
    "replicated_with_grad_allreduce": "heads",
}
# for `check_one_step`; chunks of a loss cannot be on the meta device
_BLOCKS_OF_A_STEP, _TOKENS_OF_A_STEP = 8, 2
_INNER_MULTIPLE = 32  # the MLP's default width is rounded up to it


@dataclass(frozen=True)
class Parts:
    """Names of the parts of a model: those of the model, and those of layers in a block."""

    blocks: str
    final_norm: str
    attention: str
    attention_layers: tuple[str, ...]  # linear layers; the last one writes to the residual stream
    mlp_layers: tuple[str, ...]


def config_class_of(model_type: str) -> type[PreTrainedConfig]:
    """The config class of a decoder of transformers.

    Raises ValueError if it is none, or none that we train.
    """
    known = {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}
    if model_type not in known:
        reason = (
            "is not a causal language model" if model_type in CONFIG_MAPPING else "is no model type"
        )
        raise ValueError(
            f"{model_type} {reason} of transformers{did_you_mean(model_type, ['gpt2', *known])}"
        )
    parts_of(known[model_type])
    return known[model_type]


def _field(config_class: type[PreTrainedConfig], name: str) -> str | None:
    """The field of a config for a standard name; None if it has none."""
    name = config_class.attribute_map.get(name, name)
    return name if name in {field.name for field in dataclasses.fields(config_class)} else None


@cache
def parts_of(config_class: type[PreTrainedConfig]) -> Parts:
    """The parts of a config class's models.

    Raises ValueError with the reason if they are not those of a decoder.
    """
    kind = config_class.model_type
    models: Any = config_class.sub_configs
    if models:
        raise ValueError(
            f"{kind} consists of several models ({', '.join(models)}), and is not supported"
        )
    for knob, standard in SIZES.items():
        if knob not in _OPTIONAL_SIZES and _field(config_class, standard) is None:
            raise ValueError(f"{kind} has no {standard}, and is not supported")
    if getattr(config_class, "is_encoder_decoder", False) or _field(
        config_class, "add_cross_attention"
    ):
        raise ValueError(
            f"{kind} has an encoder, is one, or can attend to one, and is not supported"
        )
    try:
        one_block: dict[str, Any] = {str(_field(config_class, SIZES["n_layer"])): 1}
        config = config_class(**one_block)
        with torch.device("meta"):
            model = standard_class(config_class)(config)
    except Exception as error:
        raise ValueError(
            f"{kind} cannot be built with one block: {one_line(error, 100)}"
        ) from error
    return _find_parts(kind, model)


def _find_parts(kind: str, model: PreTrainedModel) -> Parts:
    names = set(model._no_split_modules or ())
    lists = [
        n
        for n, m in model.named_modules()
        if isinstance(m, nn.ModuleList) and type(m[0]).__name__ in names
    ]
    if len(lists) != 1:
        raise ValueError(f"{kind} has no single list of blocks, and is not supported")
    container, _, _ = lists[0].rpartition(".")
    norms = [
        n
        for n, m in model.get_submodule(container).named_children()
        if "norm" in type(m).__name__.lower()
    ]
    blocks: Any = model.get_submodule(lists[0])
    block = blocks[0]
    if any(p.dim() > 2 for p in blocks.parameters()):
        raise ValueError(f"{kind} has experts or convolutions in its blocks, and is not supported")
    if len({tuple(name for name, _ in block.named_parameters()) for block in blocks}) != 1:
        raise ValueError(f"{kind} has blocks of different kinds, and is not supported")
    attention = [
        name for name, module in block.named_children() if "Attention" in type(module).__name__
    ]
    if len(attention) != 1 or not norms or not isinstance(model.get_output_embeddings(), nn.Linear):
        raise ValueError(
            f"{kind} has no single attention layer in a block, final norm or head, "
            "and is not supported"
        )
    linear = [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
    inside = tuple(name for name in linear if name.startswith(f"{attention[0]}."))
    outside = tuple(name for name in linear if name not in inside)
    if not inside or not outside:
        raise ValueError(
            f"{kind} has no linear layers in its attention or MLP, and is not supported"
        )
    width = model.config.hidden_size
    layers = (_output_last(block, names, width) for names in (inside, outside))
    return Parts(lists[0], f"{container}.{norms[-1]}", attention[0], *layers)


def _output_last(block: nn.Module, names: tuple[str, ...], width: int) -> tuple[str, ...]:
    """The layers with the one that writes to the residual stream at the end: the last that is as
    wide.
    """
    wide = [name for name in names if block.get_submodule(name).out_features == width]
    return (*(name for name in names if name != wide[-1]), wide[-1])


def tensor_parallel(config_class: type[PreTrainedConfig], block: nn.Module) -> dict[str, Split]:
    """How tensor parallelism splits a block's layers, by name: transformers' plan, as far as we can
    follow it.

    Raises ValueError with the reason if it has another kind of split, or none for a layer of
    attention or MLP.
    """
    kind, parts = config_class.model_type, parts_of(config_class)
    styles = {
        name.rpartition(".*.")[2]: style
        for name, style in (config_class.base_model_tp_plan or {}).items()
    }
    with_weights = dict.fromkeys(name.rpartition(".")[0] for name, _ in block.named_parameters())
    plan: dict[str, Split] = {}
    for name in with_weights:
        if "." not in name and not isinstance(block.get_submodule(name), nn.Linear):
            continue  # a norm of the residual stream, the same on all processes
        if styles.get(name) not in _SPLITS:
            raise ValueError(
                f"transformers has no plan that splits {kind}'s {name} "
                f"({styles.get(name, 'not in it')})"
            )
        plan[name] = _SPLITS[styles[name]]
    for last in (parts.attention_layers[-1], parts.mlp_layers[-1]):
        if plan[last] != "inputs":
            raise ValueError(f"transformers' plan for {kind} does not split {last} by its inputs")
    return plan


def title_of(config_class: type[PreTrainedConfig]) -> str:
    """The name of an architecture for messages and cards: `Qwen3` of Qwen3ForCausalLM."""
    return re.sub(r"(ForCausalLM|LMHeadModel)$", "", standard_class(config_class).__name__)


def config_from_recipe(
    config_class: type[PreTrainedConfig],
    section: ModelSection,
    vocab_size: int,
    end_of_text_id: int | None,
) -> PreTrainedConfig:
    """The configuration that a recipe describes.

    Raises ValueError if model.extra does not fit the config's fields.
    """
    names = {field.name for field in dataclasses.fields(config_class)} - {
        "architectures",
        "transformers_version",
    }
    sizes = {
        _field(config_class, standard): getattr(section, knob) for knob, standard in SIZES.items()
    }
    sizes[_field(config_class, "num_key_value_heads")] = section.n_kv_head or section.n_head
    sizes[_field(config_class, "intermediate_size")] = section.n_inner or _inner_size(
        config_class, section.n_embd
    )
    sizes[_field(config_class, "head_dim")] = head_dim = section.n_embd // section.n_head
    if rotary := _field(config_class, "rotary_dim"):  # the rotated part of a head
        sizes[rotary] = min(getattr(config_class(), rotary) or head_dim, head_dim)
    sizes |= {
        "vocab_size": vocab_size,
        "bos_token_id": end_of_text_id,
        "eos_token_id": end_of_text_id,
    }
    sizes["pad_token_id"] = None
    sizes |= {field.name: 0.0 for field in dataclasses.fields(config_class) if _is_dropout(field)}
    for name in section.extra:
        knob = next(
            (
                knob
                for knob, standard in SIZES.items()
                if name in (standard, _field(config_class, standard))
            ),
            "",
        )
        if knob or name == "vocab_size":
            owner = f"model.{knob}" if knob else "the size of the tokenizer"
            raise ValueError(f"model.extra.{name}: is {owner}; leave it out")
        if name not in names:
            near = did_you_mean(name, names)
            raise ValueError(
                f"model.extra.{name}: {config_class.model_type}'s config has no such field{near}"
            )
    for knob in _OPTIONAL_SIZES:
        if getattr(section, knob) is not None and _field(config_class, SIZES[knob]) is None:
            raise ValueError(
                f"model.{knob}: {config_class.model_type}'s config has no "
                f"{SIZES[knob]}; leave it out"
            )
    values = {name: value for name, value in sizes.items() if name is not None} | section.extra
    try:
        config = config_class(**values)
        with torch.device("meta"):
            model = model_class_of(config_class)(config)
    except Exception as error:
        raise ValueError(
            f"model.extra: {config_class.model_type}'s config: {_field_error(error)}"
        ) from error
    if _find_parts(config_class.model_type, model) != parts_of(config_class):
        raise ValueError(
            f"model.extra: gives {config_class.model_type} other layers than its "
            "defaults, not supported"
        )
    check_one_step(model)
    rows = -(-vocab_size // section.pad_vocab_to_multiple_of) * section.pad_vocab_to_multiple_of
    if rows > vocab_size:
        config.padded_vocab_size = rows  # in memory only; standard_config has none
    return config


def check_one_step(model: PreTrainedModel) -> None:
    """Raises ValueError if a model on the meta device, which computes shapes only, fails in a step.

    Removes blocks.
    """
    config: Any = model.config
    del cast(Any, model.get_submodule(parts_of(type(config)).blocks))[_BLOCKS_OF_A_STEP:]
    ids = torch.zeros(
        1, min(_TOKENS_OF_A_STEP, config.max_position_embeddings), dtype=torch.long, device="meta"
    )
    try:
        model.train()
        model(
            input_ids=ids, shift_labels=ids, use_cache=False, num_items_in_batch=1
        ).loss.backward()
    except Exception as error:
        # it reads values, or a loss in chunks asks for autocast: the meta device has neither
        if "meta tensor" in str(error) or "autocast" in str(error):
            return
        sizes = SIZES | {"head_dim": "head_dim"}
        given = ", ".join(
            f"{k} {v}"
            for k, name in sizes.items()
            if (v := getattr(config, name, None)) is not None
        )
        raise ValueError(
            f"model.architecture {config.model_type} cannot take a step with {given}: "
            f"{one_line(error)}"
        ) from error


def standard_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config without rows that pad the vocabulary in memory."""
    config = copy.deepcopy(config)
    vars(config).pop("padded_vocab_size", None)
    return config


def _is_dropout(field: dataclasses.Field) -> bool:
    return "drop" in field.name and type(field.default) is float


def _field_error(error: Exception) -> str:
    """`hidden_act expected str, got int (value: 3)` of transformers' error of several lines."""
    match = re.search(r"Field '(\w+)' (expected .*)", str(error))
    return f"{match[1]} {match[2]}" if match else one_line(error)


def _inner_size(config_class: type[PreTrainedConfig], width: int) -> int:
    """The MLP's default width: with two matrices 4 times the model's, with three 8/3, so that
    both cost the same.
    """
    if len(parts_of(config_class).mlp_layers) < 3:
        return 4 * width
    return -(-8 * width // (3 * _INNER_MULTIPLE)) * _INNER_MULTIPLE


def recipe_knobs(config: PreTrainedConfig) -> dict[str, Any]:
    """The knobs `model.*` that describe a model."""
    sizes = {f"model.{knob}": getattr(config, name, None) for knob, name in SIZES.items()}
    return {"model.architecture": config.model_type, **sizes}


def read_config(name: str, revision: str | None = None) -> PreTrainedConfig:
    """The configuration of a model folder or of a model on the Hub."""
    config = AutoConfig.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
    parts_of(type(config))
    # a damaged file might describe a model that takes hours to build
    for knob, size in SIZES.items():
        bounds: Any = KNOBS[f"model.{knob}"]
        low, high, value = bounds.low, bounds.high, getattr(config, size, None)
        if not (value is None and knob in _OPTIONAL_SIZES) and not low <= value <= high:
            raise ValueError(f"{size} must be from {low:,} to {high:,}, got {value!s:.40}")
    return config


def read_model(name: str, revision: str | None = None, **options: Any) -> PreTrainedModel:
    """The model in a folder or on the Hub in float32.

    Raises ValueError if its weights do not fit.
    """
    config = read_config(name, revision)
    options = {"dtype": torch.float32, "ignore_mismatched_sizes": True} | options
    loaded: Any = model_class_of(type(config)).from_pretrained(
        name,
        revision=revision or "main",
        config=config,
        output_loading_info=True,
        trust_remote_code=False,
        **options,
    )
    model, info = loaded
    wrong = [
        (f"{kind.replace('_', ' ')}: {sorted(map(str, keys))[:3]}")
        for kind, keys in info.items()
        if keys
    ]
    if wrong:
        raise ValueError(f"{name} is not a {config.model_type} checkpoint; {'; '.join(wrong)}")
    return model


def write_model(
    folder: Path, config: PreTrainedConfig, weights: dict[str, torch.Tensor], max_shard_size: str
) -> None:
    """Write `weights` (in the dtype they have) as what they are: a model of transformers."""
    with torch.device("meta"):
        model: Any = model_class_of(type(config))(standard_config(config))
        model = model.to(next(iter(weights.values())).dtype)
    padded = {
        id(p)
        for m in (model.get_input_embeddings(), model.get_output_embeddings())
        for p in m.parameters()
    }
    padded = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in padded}
    weights = {
        name: w[: config.vocab_size].contiguous() if name in padded else w
        for name, w in weights.items()
    }
    model.save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)


def embeddings(model: PreTrainedModel) -> list[nn.Module]:
    """Embeddings of tokens, and of positions if they are learned."""
    inside = f"{parts_of(type(model.config)).blocks}."
    return [
        m
        for name, m in model.named_modules()
        if isinstance(m, nn.Embedding) and not name.startswith(inside)
    ]


def lookup_parameters(config: PreTrainedConfig) -> int:
    """Parameters that are in no matrix product: those of the embeddings, but for one that is the
    head too.
    """
    with torch.device("meta"):
        model = model_class_of(type(config))(config)
    head: Any = model.get_output_embeddings()
    return sum(
        p.numel()
        for module in embeddings(model)
        for p in module.parameters()
        if p is not head.weight
    )
