"""All that the rest of the package asks of a causal LM, as one class, for any text-only decoder of
transformers: Llama, Qwen3, OLMo 2, nanochat, ...

The models are transformers' own classes, with our loss (loss_decoders.py). An Architecture builds,
reads and writes them, and counts what they cost. Its base classes know the fields of a config
(config_fields.py) and find the parts of a model (parts.py). Another architecture is a subclass, as
our GPT-2 in gpt2.py.
"""

import copy
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.errors import one_line
from nanogpt_hf.model.config_fields import (
    ConfigFields,
    active_experts,
    completed,
    padded_vocab_size,
    padding_parameters,
)
from nanogpt_hf.model.experts import experts_of
from nanogpt_hf.model.layout_gpt import check_loaded
from nanogpt_hf.model.loss_decoders import model_class_of
from nanogpt_hf.model.parts import ModelParts
from nanogpt_hf.model.trial_step import idle_in_a_step


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters of a model, without rows that pad the vocabulary."""

    parameters: int
    # The embeddings, except one that is the head too: they are in no matrix product.
    looked_up: int
    # The experts that a token does not choose.
    idle: int


class _NoInitialValues(TorchFunctionMode):
    """Leave out the initial values of linear layers, which the meta device does not hold: torch
    takes longer for them than for the rest of a model.
    """

    def __torch_function__(self, func, types, args=(), kwargs: Any = None):
        if func is nn.init.kaiming_uniform_:
            return (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


class Architecture(ConfigFields, ModelParts):
    """Builds, loads, saves and takes apart models of one kind, and counts their costs.

    `model_class(config)` makes a model with initial weights, in transformers' form. Its forward
    takes input_ids, shift_labels, position_ids, use_cache, num_items_in_batch (divides the
    summed loss) and skip_logits. A model whose vocabulary is padded never predicts the added rows.
    """

    # Layer of a block on disk -> our layers in it; empty if they are the same.
    layers_on_disk: dict[str, tuple[str, ...]] = {}  # noqa: RUF012

    def __init__(self, config_class: type[PreTrainedConfig]):
        """Raises ValueError with the reason if the models are no decoders."""
        super().__init__(config_class)
        self._check_kind()
        self.model_class = model_class_of(config_class)
        # In messages and cards Qwen3ForCausalLM is `Qwen3`.
        self.title = re.sub(r"(ForCausalLM|LMHeadModel)$", "", self.model_class.__name__)
        # Results by config: a start asks for them several times, and each takes building a model.
        self._stepped: dict[str, list[str]] = {}
        self._sizes: dict[str, Sizes] = {}

    def _check_kind(self) -> None:
        """Raises ValueError if the models are no decoder of text."""
        kinds: Any = self.config_class.sub_configs
        # A sub-config without a type is a group of fields.
        models = [getattr(kind, "model_type", kind.__name__) for kind in kinds.values()]
        if any(models):
            raise ValueError(
                f"{self.name} consists of several models ({', '.join(filter(None, models))}), and "
                "is not supported"
            )
        # A config with fields for both, such as BERT's, is of a type that is an encoder, or that
        # attends to one.
        attends = any("cross_attention" in field.name for field in self._fields)
        is_part = attends and self._field("is_decoder")
        if getattr(self.config_class, "is_encoder_decoder", False) or is_part:
            raise ValueError(
                f"{self.name} has an encoder, is one, or attends to one, and is not supported"
            )

    # From a recipe, and from and to disk. Weights are named as in `model_class`.

    def config_from_recipe(
        self, section: ModelSection, vocab_size: int, end_of_text_id: int | None
    ) -> PreTrainedConfig:
        """Configuration that a recipe describes, for a tokenizer of `vocab_size` tokens.

        Raises ValueError if model.extra does not fit the config's fields.
        """
        # Whether the MLP is gated decides its default width, and only a model shows it. So it is
        # built once without a gate, and again if it turns out to have one.
        config, model = self._build(section, vocab_size, end_of_text_id, is_gated=False)
        if section.n_inner is None and self._is_gated(model):
            config, model = self._build(section, vocab_size, end_of_text_id, is_gated=True)
        self.check_knobs(section, config)
        self.check_one_step(config, model)
        if padded := padded_vocab_size(section, vocab_size):
            config.padded_vocab_size = padded  # exists in memory alone: standard_config has none
        return config

    def _build(self, *recipe: Any, is_gated: bool) -> tuple[PreTrainedConfig, PreTrainedModel]:
        """Config of a recipe, and its model on the meta device."""
        values = self.fields_from_recipe(*recipe, is_gated=is_gated)
        with self.one_line_for_wrong_fields():
            config = completed(self.config_class(**values))
            self.check_fields(config)
            return config, self.on_meta(config)

    @contextmanager
    def one_line_for_wrong_fields(self) -> Iterator[None]:
        """Context that raises ValueError, in one line, for fields that do not make a model."""
        try:
            yield
        except Exception as error:
            # transformers' message has several lines. The one with the reason becomes
            # `hidden_act expected str, got int (value: 3)`.
            match = re.search(r"Field '(\w+)' (expected .*)", str(error))
            reason = f"{match[1]} {match[2]}" if match else one_line(error)
            raise ValueError(f"model.extra: {self.name}'s config: {reason}") from error

    def _is_gated(self, model: PreTrainedModel) -> bool:
        """Whether its MLPs or experts have three matrices, as SwiGLU has."""
        if experts_of(model):
            return True
        return any(len(self.linear_layers(block).others) > 2 for block in self.blocks(model))

    def on_meta(self, config: Any) -> PreTrainedModel:
        """A model without values. Its sizes are noted: to build it again would take as long."""
        key = key_of(config)
        with torch.device("meta"), _NoInitialValues():
            model = self.model_class(config)
        # If a model lacks such parts, `sizes` gives the reason.
        with suppress(Exception):
            self._sizes[key] = self._sizes.get(key) or self._sizes_of(model)
        return model

    def _sizes_of(self, model: PreTrainedModel) -> Sizes:
        # A tied embedding is also the head's matrix, which is multiplied for every token.
        head: Any = model.get_output_embeddings()
        looked_up = 0
        for module in self.embeddings(model):
            for parameter in module.parameters():
                if parameter is not head.weight:
                    looked_up += parameter.numel()
        padding = padding_parameters(model.config)
        if not model.config.tie_word_embeddings:
            looked_up -= padding // 2
        # Of E experts a token computes with k, so that (E - k) / E of their parameters are idle.
        active = active_experts(model.config)
        idle = 0
        for experts in experts_of(model):
            size = sum(parameter.numel() for parameter in experts.parameters())
            idle += size - size * active // experts.num_experts
        return Sizes(model.num_parameters() - padding, looked_up, idle)

    def sizes(self, config: Any) -> Sizes:
        """Sizes of a model, counted once for each config."""
        key = key_of(config)
        if key not in self._sizes:
            self._sizes[key] = self._sizes_of(self.on_meta(config))
        return self._sizes[key]

    def check_one_step(self, config: Any, model: PreTrainedModel | None = None) -> list[str]:
        """Parameters that the loss gives no gradient, found by a step on the meta device
        (trial_step.py), once for each config.

        `model` is the config's on that device, if there is one already. Raises ValueError if the
        model fails in a step, or in generation.
        """
        key = key_of(config)
        if key not in self._stepped:
            model = model or self.on_meta(config)
            self.check_fields(config)
            self._stepped[key] = idle_in_a_step(self.name, model, self.blocks(model))
        return self._stepped[key]

    def read_model(
        self,
        name: str,
        revision: str | None = None,
        quantization_config: Any = None,
        **fields: Any,
    ) -> PreTrainedModel:
        """Model in a folder or on the Hub in float32, with other `fields` of its config.

        Raises ValueError if its weights do not fit.
        """
        loaded: Any = self.model_class.from_pretrained(
            name,
            revision=revision or "main",
            config=self.read_config(name, revision, **fields),
            dtype=torch.float32,
            quantization_config=quantization_config,
            ignore_mismatched_sizes=True,  # transformers' own error does not name them
            output_loading_info=True,
            trust_remote_code=False,
        )
        model, info = loaded
        check_loaded(name, self.title, info)
        return model

    def write_model(self, folder: Path, config: Any, weights: dict[str, torch.Tensor]) -> None:
        """Write `weights` (in the dtype they have) as a model of transformers."""
        # transformers' own `save_pretrained` writes the files. It needs a model for its class and
        # config, but no values: the weights come from outside.
        with torch.device("meta"):
            model: Any = self.model_class(self.standard_config(config))
            model = model.to(next(iter(weights.values())).dtype)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            # Rows that pad the vocabulary stay in memory.
            if name in weights and weights[name].shape != parameter.shape:
                weights = weights | {name: weights[name][: len(parameter)].contiguous()}
        model.save_pretrained(folder, state_dict=weights)

    def standard_config(self, config: Any) -> PreTrainedConfig:
        """Config of the standard transformers model: without rows that pad the vocabulary."""
        config = copy.deepcopy(config)
        vars(config).pop("padded_vocab_size", None)
        return config

    def is_standard(self, config: Any) -> bool:
        """Whether transformers alone opens the model, without this package."""
        return True

    def standard_model(self, config: PreTrainedConfig) -> PreTrainedModel:
        """Standard transformers model of `config`, with new weights."""
        standard = self.standard_config(config)
        return AutoModelForCausalLM.from_config(
            standard, attn_implementation="sdpa", trust_remote_code=False
        )

    def build_saved_class(self, config: Any) -> None:
        """Build a model of the class that a model folder holds, without values.

        transformers lists the classes of which a model was built, and the graph of a whole model is
        compiled again when the list grows. So a run builds it before it compiles.
        """
        with torch.device("meta"), _NoInitialValues():
            self.standard_model(config)

    # What training, evaluation and estimates do with it.

    def resize_positions(self, model: Any, length: int, theta: float | None) -> None:
        """Give a model a context of `length` tokens, and another base of its rotary wavelengths."""
        rope = self.resized_rope(model.config, length, theta)
        if rope is None:
            return
        model.config.rope_parameters = rope
        model.config.max_position_embeddings = length
        # Modules of rotary positions compute their frequencies when they are made.
        rotary = [m for m in model.named_modules() if hasattr(m[1], "original_inv_freq")]
        for name, module in rotary:
            frequencies: Any = module.inv_freq
            with frequencies.device:
                model.set_submodule(name, type(module)(model.config))

    def flops_per_token(self, config: PreTrainedConfig, block_size: int) -> float:
        """6·N + 12·L·H·Q·T: training, forward and backward (PaLM, arXiv:2204.02311, appendix B).

        N leaves out the parameters that are only looked up, as nanoGPT's `estimate_mfu` does, and
        the experts that a token does not choose.
        """
        sizes = self.sizes(config)
        parameters = self.count_parameters(config) - sizes.looked_up - sizes.idle
        # A parameter takes part in a product and a sum for each token, and in twice as many
        # backward: 2 + 4 FLOPs. Attention has two products without parameters, scores and their
        # weighted sum, each of `width` values with each of T positions: 2·(2 + 4) FLOPs.
        width = 0  # the values of all heads of all blocks, L·H·Q
        for block in config.per_layer_config:
            if heads := getattr(block, "num_attention_heads", 0):
                width += heads * (getattr(block, "head_dim", None) or block.hidden_size // heads)
        return 6 * parameters + 12 * width * block_size

    def memory_bound(self, model: Any, tokens: int, block_size: int) -> float:
        """Upper bound of the bytes that a training step of `tokens` tokens needs on a CPU; infinite
        if there is no formula, as for layers with a state larger than their inputs.
        """
        return math.inf

    def count_parameters(self, config: PreTrainedConfig) -> int:
        """Parameters of the model as it is saved: padded vocabulary rows are not counted, a tied
        head counts once.
        """
        if known := self._sizes.get(key_of(config)):
            return known.parameters
        return self.on_meta(config).num_parameters() - padding_parameters(config)


def key_of(config: PreTrainedConfig) -> str:
    return config.to_json_string(use_diff=False)
