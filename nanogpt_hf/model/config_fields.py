"""Fields of a decoder's config: from a recipe and from disk, and their bounds.

transformers gives the sizes of every model the same names; a config may have another name for one,
by its attribute_map.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from nanogpt_hf.config.schema import KNOBS, ModelSection
from nanogpt_hf.errors import did_you_mean

# Knob of the section `model` -> name of the size in transformers.
SIZES = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_kv_head": "num_key_value_heads",
    "n_inner": "intermediate_size",
}
_OPTIONAL_SIZES = ("n_head", "n_kv_head", "n_inner")
# Values for configs that lack a field which the package reads of every config. Without positions
# there is no longest context.
_ABSENT = {"max_position_embeddings": 2**20, "tie_word_embeddings": False}
# Windows of attention, and the layers that have them.
_WINDOWS = {
    "sliding_window": "sliding_attention",
    "attention_chunk_size": "chunked_attention",
    "window_size": "local",
}
# Fields of configs with the number of experts of a layer, and of the experts that compute a token.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ACTIVE = ("num_experts_per_tok", "moe_topk", "top_k_experts")
_INNER_MULTIPLE = 32  # the MLP's default width is rounded up to it


class ConfigFields:
    """Fields of one class of configs."""

    def __init__(self, config_class: type[PreTrainedConfig]):
        self.config_class = config_class
        self.name = str(config_class.model_type)

    def _field(self, name: str) -> str:
        """Field of the config for a standard name; empty if it has none."""
        # hidden_size is n_embd in GPT-2's config and hidden_size in Llama's.
        fields = {field.name for field in self._fields}
        mapped = self.config_class.attribute_map.get(name, name)
        return next((known for known in (mapped, name) if known in fields), "")

    @property
    def _fields(self) -> tuple[dataclasses.Field[Any], ...]:
        return dataclasses.fields(self.config_class)

    def fields_from_recipe(
        self,
        section: ModelSection,
        vocab_size: int,
        end_of_text_id: int | None,
        *,
        is_gated: bool,
    ) -> dict[str, Any]:
        """Fields of the config that a recipe describes, for a tokenizer of `vocab_size` tokens.

        `is_gated`: MLPs of three matrices. Raises ValueError if model.extra does not fit them.
        """
        self._check_recipe(section)
        head_dim = section.n_embd // section.n_head
        sizes = {standard: getattr(section, knob) for knob, standard in SIZES.items()} | {
            "num_key_value_heads": section.n_kv_head or section.n_head,
            "intermediate_size": section.n_inner or _inner_size(section.n_embd, is_gated),
            "head_dim": head_dim,
            "rotary_dim": head_dim,
        }
        if rotary := self._field("rotary_dim"):
            # The rotated part of a head, which may not be larger than the head.
            sizes["rotary_dim"] = min(getattr(self.config_class(), rotary) or head_dim, head_dim)
        # Later entries win: the recipe's sizes, then no dropout, then the recipe's own fields.
        return {
            "vocab_size": vocab_size,
            "bos_token_id": end_of_text_id,
            "eos_token_id": end_of_text_id,
            "pad_token_id": None,
            "max_position_embeddings": section.n_positions,  # also of a config without the field
            **{self._field(name): size for name, size in sizes.items() if self._field(name)},
            **{
                field.name: 0.0
                for field in self._fields
                if "drop" in field.name and type(field.default) is float
            },
            **section.extra,
        }

    def _check_recipe(self, section: ModelSection) -> None:
        """Raises ValueError if model.extra names a knob or no field."""
        # A size under its own name would contradict the knob that has it.
        owners = {"vocab_size": "the size of the tokenizer"}
        for knob, standard in SIZES.items():
            for name in (standard, self._field(standard)):
                owners[name] = f"model.{knob}"
        names = {field.name for field in self._fields} - {"architectures", "transformers_version"}
        for name in section.extra:
            if name in owners:
                raise ValueError(f"model.extra.{name}: is {owners[name]}; leave it out")
            if name not in names:
                near = did_you_mean(name, names)
                raise ValueError(
                    f"model.extra.{name}: {self.name}'s config has no such field{near}"
                )

    def check_knobs(self, section: ModelSection, config: Any) -> None:
        """Raises ValueError if the config has other sizes than the recipe that describes it."""
        for key, size in self.recipe_knobs(config).items():
            knob = key.removeprefix("model.")
            if getattr(section, knob) in (None, size):
                continue
            if size is None:
                wrong = f"no {SIZES[knob]}; leave it out"
            else:
                wrong = f"{size}; set it so, or change model.extra"
            raise ValueError(f"{key}: {self.name}'s config has {wrong}")

    def recipe_knobs(self, config: Any) -> dict[str, Any]:
        """Knobs `model.*` that describe a model; n_head is 1 if it has no heads.

        Raises ValueError if none do.
        """
        sizes = {f"model.{knob}": size_of(config, name) for knob, name in SIZES.items()}
        return {
            "model.architecture": self.name,
            **sizes,
            "model.n_head": sizes["model.n_head"] or 1,
        }

    def read_config(self, name: str, revision: str | None = None, **fields: Any) -> Any:
        """Configuration of a model folder or of a model on the Hub, with other `fields`.

        Raises ValueError if a size is out of bounds.
        """
        config = self.config_class.from_pretrained(
            name, revision=revision or "main", trust_remote_code=False, **fields
        )
        self.check_sizes(config)
        self.check_fields(config)
        return completed(config)

    def resized_rope(self, config: Any, length: int, theta: float | None) -> dict[str, Any] | None:
        """Rotary parameters for a context of `length` tokens: with the base `theta`, or, for a
        longer context than the model has, by YaRN (arXiv:2309.00071). None if nothing changes.

        Raises ValueError, with the knob, if the positions are not rotary ones of one known kind.
        """
        knob = "model.n_positions" if theta is None else "finetune.rope_theta"
        known = config.max_position_embeddings
        rope = getattr(config, "rope_parameters", None) or {}
        if theta is None and length == known:
            return None
        if length < known:
            raise ValueError(
                f"model.n_positions: {self.name} has {known:,} positions already; leave it out"
            )
        kind = rope.get("rope_type")
        if kind is None:
            kinds = "several kinds of" if rope else "no"
            raise ValueError(f"{knob}: {self.name} has {kinds} rope_parameters; leave it out")
        if theta is not None:
            return rope | {"rope_theta": theta}
        if kind not in ("default", "yarn"):
            raise ValueError(f"{knob}: {self.name} has rope_type {kind}; set finetune.rope_theta")
        # YaRN's factor is the new length by the one that the model was first trained for.
        known = rope.get("original_max_position_embeddings") or known
        changed = {"factor": length / known, "original_max_position_embeddings": known}
        return rope | {"rope_type": "yarn"} | changed

    def check_sizes(self, config: Any) -> None:
        """Raises ValueError if a size is out of the bounds of its knob: a damaged file might
        describe a model that takes hours to build.
        """
        for knob, size in SIZES.items():
            bounds: Any = KNOBS[f"model.{knob}"]
            value = size_of(config, size, _ABSENT.get(size))
            if value is None and knob in _OPTIONAL_SIZES:
                continue
            if not bounds.low <= value <= bounds.high:
                raise ValueError(
                    f"{self._field(size)} must be from {bounds.low:,} to {bounds.high:,}, "
                    f"got {value!s:.40}"
                )

    def check_fields(self, config: Any) -> None:
        """Raises ValueError for a field whose value the meta device accepts, but with which no
        model works.
        """
        # By name and default: a field with "drop" in it is a probability, one whose default is a
        # whole number from 0 is a size. Ids of tokens may be -1 for none.
        for field in self._fields:
            value = size_of(config, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not math.isfinite(value):
                raise ValueError(f"{field.name} {value} is not finite")
            if is_number and "drop" in field.name and not 0 <= value < 1:
                raise ValueError(f"{field.name} {value} is not from 0 to below 1")
            usual = 0 if field.default is None else field.default
            is_size = type(usual) is int and usual >= 0
            if is_number and is_size and value < 0 and not field.name.endswith("_id"):
                raise ValueError(f"{field.name} must not be negative, got {value}")
        types = getattr(config, "layer_types", None)
        for name, kind in _WINDOWS.items():
            window = size_of(config, name)
            slides = types is None or kind in types
            if slides and isinstance(window, int) and window < 1:
                raise ValueError(f"{name} must be at least 1, got {window}")
        count, count_field = _stated(config, _EXPERTS)
        active, active_field = _stated(config, _ACTIVE)
        # Some types can be without any experts; then both are 0.
        if count is not None and active is not None and (active < 1) != (count < 1):
            raise ValueError(
                f"{active_field} {active} of {count_field} {count}: both must be at least 1"
            )


def active_experts(config: Any) -> int:
    """Number of experts of a layer that compute a token."""
    return _stated(config, _ACTIVE)[0] or 0


def _stated(config: Any, names: Iterable[str]) -> tuple[Any, str]:
    """Value of the first field that a config has, and its name; None without one."""
    for name in names:
        value = size_of(config, name)
        if value is not None:
            return value, name
    return None, ""


def has_cache(config: Any, *, padded: bool = False) -> bool:
    """Whether a model keeps keys and values of the tokens that it has read: whether a layer has
    attention. Layers that compress blocks of tokens count them from the first column, so rows that
    are `padded` on the left have no cache.
    """
    kinds = getattr(config, "layer_types", None) or ["attention"]
    if padded and any("compressed" in kind for kind in kinds):
        return False
    return any("attention" in kind and kind != "linear_attention" for kind in kinds)


def size_of(config: Any, name: str, default: Any = None) -> Any:
    """A size of a config; of the first block if blocks have sizes of their own."""
    value = getattr(next(iter(config.per_layer_config), config), name, default)
    return value[0] if isinstance(value, list | tuple) and value else value


def completed(config: Any) -> Any:
    """Config with every field that the package reads."""
    for name, value in _ABSENT.items():
        if not hasattr(config, name):
            setattr(config, name, value)
    return config


def _inner_size(width: int, is_gated: bool) -> int:
    """MLP's default width: with two matrices 4 times the model's width, with three 8/3, so that
    both have the same number of parameters (SwiGLU, arXiv:2002.05202).
    """
    if not is_gated:
        return 4 * width
    return -(-8 * width // (3 * _INNER_MULTIPLE)) * _INNER_MULTIPLE


def config_class_of(model_type: str) -> type[PreTrainedConfig]:
    """Config class of a causal LM of transformers. Raises ValueError if there is none."""
    if model_type in CONFIG_MAPPING:
        kind = CONFIG_MAPPING[model_type]
        if kind.model_type == model_type and kind in MODEL_FOR_CAUSAL_LM_MAPPING:
            return kind
    # This imports the configs of all models, which takes a second.
    known = {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}
    if model_type not in known:
        reason = (
            "is not a causal language model" if model_type in CONFIG_MAPPING else "is no model type"
        )
        raise ValueError(
            f"{model_type} {reason} of transformers{did_you_mean(model_type, ['gpt2', *known])}"
        )
    return known[model_type]


def padded_vocab_size(section: ModelSection, vocab_size: int) -> int | None:
    """Rows of the embedding if the recipe pads the vocabulary; None if it does not."""
    rows = -(-vocab_size // section.pad_vocab_to_multiple_of) * section.pad_vocab_to_multiple_of
    return rows if rows > vocab_size else None


def padding_rows(config: PreTrainedConfig) -> int:
    """Rows of the embedding that only pad the vocabulary."""
    return (getattr(config, "padded_vocab_size", None) or config.vocab_size) - config.vocab_size


def padding_parameters(config: Any) -> int:
    """Parameters that only pad the vocabulary, in the embedding, and in the head if that is another
    matrix.
    """
    matrices = 1 if config.tie_word_embeddings else 2
    return matrices * padding_rows(config) * config.hidden_size
