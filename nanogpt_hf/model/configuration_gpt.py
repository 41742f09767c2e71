"""GPTConfig: the configuration of a GPT, read from and written as GPT-2's config.json.

Imports nothing of the package, so that these pages can be read and copied alone.
"""

import dataclasses
import logging
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import GPT2Config, PreTrainedConfig

logger = logging.getLogger(__name__)


@strict
class GPTConfig(PreTrainedConfig):
    """A GPT-2 with nanoGPT's options. Field names are GPT-2's where it has the field.

    `bias=False` leaves the biases of Linear and LayerNorm out. `padded_vocab_size` is the number
    of embedding rows in memory, for faster matrix products; rows from `vocab_size` on are never
    predicted and never saved.

    A field that GPT-2 does not have makes another model of it if its value is not the default. Such
    a model is saved as its own type.
    """

    model_type = "nanogpt_hf"
    # A new list, since transformers adds to it.
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012
    attribute_map = {  # noqa: RUF012  (transformers wants a plain dict)
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    # Tensor parallelism splits a block so: heads and the MLP's width by their outputs, the matrices
    # that write to the residual stream by their inputs.
    base_model_tp_plan = {  # noqa: RUF012
        "h.*.attn.q_proj": "colwise",
        "h.*.attn.k_proj": "colwise",
        "h.*.attn.v_proj": "colwise",
        "h.*.attn.o_proj": "rowwise",
        "h.*.mlp.fc": "colwise",
        "h.*.mlp.proj": "rowwise",
    }

    vocab_size: int = 50257
    padded_vocab_size: int | None = None
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    bias: bool = True
    dropout: float | int = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.n_head < 1 or self.n_embd % self.n_head:
            raise ValueError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")

    @property
    def inner_size(self) -> int:
        """Width of the MLP's hidden layer."""
        return self.n_inner or 4 * self.n_embd

    @classmethod
    def new_fields(cls) -> dict[str, Any]:
        """Fields that GPT-2 has in no form, with their defaults, which make the model a GPT-2."""
        known = {"padded_vocab_size", "bias", "dropout"}
        for standard in (PreTrainedConfig, GPT2Config):
            known |= {field.name for field in dataclasses.fields(standard)}
        return {f.name: f.default for f in dataclasses.fields(cls) if f.name not in known}

    @property
    def is_gpt2(self) -> bool:
        """Whether GPT-2's config and files can represent the model."""
        return all(getattr(self, name) == plain for name, plain in self.new_fields().items())

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path, **kwargs
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read our config.json or GPT-2's.

        Raises ValueError for variants of GPT-2 that we do not compute.
        """
        raw, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if raw.get("model_type", cls.model_type) not in (cls.model_type, "gpt2"):
            raise ValueError(
                f"{pretrained_model_name_or_path} is a {raw['model_type']} model, not a GPT-2"
            )
        return (_from_gpt2(raw) if raw.get("model_type") == "gpt2" else raw), kwargs

    def to_gpt2(self) -> GPT2Config:
        """Describe the same model as a GPT2Config.

        It records `bias: false`, with which we load the model without biases.
        """
        fields = {name: getattr(self, name) for name in _SHARED_FIELDS}
        # nanoGPT has one dropout in three places.
        pdrop = dict.fromkeys(_DROPOUTS, self.dropout)
        bias: dict[str, Any] = {} if self.bias else {"bias": False}
        return GPT2Config(**fields, **pdrop, **bias)


_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
# Fields that GPTConfig and GPT2Config both have, by the same name.
_SHARED_FIELDS = sorted(
    {f.name for f in dataclasses.fields(GPTConfig) if f.name in GPTConfig.__annotations__}
    & {f.name for f in dataclasses.fields(GPT2Config)}
)


def _from_gpt2(raw: dict[str, Any]) -> dict[str, Any]:
    """Our fields of GPT-2's config.json. Raises ValueError for variants that we do not compute."""
    unsupported = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    for name, plain in unsupported.items():
        if raw.get(name, plain) != plain:
            raise ValueError(f"GPT-2 with {name}={raw[name]} is not supported")
    dropouts = {name: raw.get(name, 0.1) for name in _DROPOUTS}
    # A wrong value is an error of its own.
    valid = {p for p in dropouts.values() if isinstance(p, int | float) and 0 <= p < 1}
    if len(valid) > 1:
        words = ", ".join(f"{name} {value}" for name, value in dropouts.items())
        logger.warning(
            f"this GPT-2 has dropouts that differ: {words}; a GPT has one, and training takes "
            f"{dropouts['resid_pdrop']}"
        )
    kept = {
        name: raw[name] for name in (*_SHARED_FIELDS, "bias", "dtype", "torch_dtype") if name in raw
    }
    return kept | {"model_type": GPTConfig.model_type, "dropout": dropouts["resid_pdrop"]}
