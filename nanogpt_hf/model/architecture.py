"""Architecture: all that the rest of the package asks of a causal LM: our GPT-2, or any decoder of
transformers.

Sizes are read from a config by the names that transformers gives every model: hidden_size,
num_hidden_layers, num_attention_heads, max_position_embeddings, vocab_size. No other room names the
classes or layers of a model, except the importers and exporters of one format.

A decoder of transformers needs no code: `_decoder` makes its row from its config class
(decoders.py). A model that is no class of transformers: write its functions as in gpt2.py, and
list its row in ARCHITECTURES.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from nanogpt_hf.config.schema import LORA_TARGETS, ModelSection
from nanogpt_hf.model import decoders, gpt2, loss_decoders
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.layout_gpt import GPT2_LAYOUT
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM


@dataclass(frozen=True)
class BlockActivations:
    """Values per token that autograd keeps of a block, except the inputs of its linear layers."""

    residual: int  # in the residual's precision: inputs of the norms
    attention: int  # queries, keys and values
    # in the precision of the products: output of attention, inputs of activation functions
    other: int


@dataclass(frozen=True)
class Architecture:
    """How to build, load, save and take apart a model, and what it costs. Functions take a model
    that is not prepared.

    `model_class(config)` makes a model with initial weights, in transformers' form. Its forward
    takes input_ids, shift_labels, position_ids, use_cache, num_items_in_batch (divides the
    summed loss) and skip_logits. A model whose vocabulary is padded never predicts the added
    rows.
    """

    name: str
    title: str  # for messages and cards
    model_types: tuple[str, ...]  # in the config.json files that `read_config` reads
    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]

    # From a recipe, and from and to disk. Weights are named as in `model_class`.
    # (section, vocab_size, end_of_text_id)
    config_from_recipe: Callable[[ModelSection, int, int | None], PreTrainedConfig]
    # config -> the knobs model.* that describe it; ValueError if none do
    recipe_knobs: Callable[[Any], dict[str, Any]]
    read_config: Callable[[str, str | None], PreTrainedConfig]  # (folder or Hub id, revision)
    # (folder or Hub id, revision, **options): in float32
    read_model: Callable[..., PreTrainedModel]
    # (folder, config, weights, max_shard_size)
    write_model: Callable[[Path, Any, dict[str, torch.Tensor], str], None]
    # config -> that of the standard transformers model
    standard_config: Callable[[Any], PreTrainedConfig]

    # Parts of a model.
    blocks: Callable[[Any], nn.ModuleList]  # transformer blocks, lowest first
    embeddings: Callable[[Any], list[nn.Module]]  # tokens, and positions if they are learned
    final_norm: Callable[[Any], nn.Module]
    attention: Callable[[Any], Any]  # in a block
    # linear, of a block; the last one writes to the residual
    attention_layers: Callable[[Any], tuple[Any, ...]]
    mlp_layers: Callable[[Any], tuple[Any, ...]]  # as attention_layers
    lora_targets: tuple[str, ...]
    # layer of a block on disk -> ours in it; empty if they are the same
    layers_on_disk: dict[str, tuple[str, ...]]
    # block -> how tensor parallelism splits its layers, by name; ValueError with the reason if it
    # cannot
    tensor_parallel: Callable[[Any], dict[str, decoders.Split]]

    # What training and evaluation do with it.
    # (model, ids, targets (B, T)) -> sums (B,)
    row_losses: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
    crop_positions: Callable[[Any, int], None]  # leave only the first positions
    lookup_parameters: Callable[[Any], int]  # config -> parameters that are in no matrix product
    # config -> without dropout and adapters; None if planning/activations.py counts them
    block_activations: Callable[[Any], BlockActivations] | None

    def depths(self, model: PreTrainedModel) -> dict[str, int]:
        """Parameter name -> depth: 0 for embeddings, 1, 2, ... for blocks, and one more for the
        layers above them.
        """
        blocks = self.blocks(model)
        depth = {id(p): 0 for module in self.embeddings(model) for p in module.parameters()}
        depth |= {
            id(p): index + 1 for index, block in enumerate(blocks) for p in block.parameters()
        }
        return {name: depth.get(id(p), len(blocks) + 1) for name, p in model.named_parameters()}

    def freeze(self, model: PreTrainedModel, layers: int) -> None:
        """Freeze the embeddings (and a tied head) and the lowest `layers` blocks; -1 freezes
        nothing.
        """
        for module in (
            [*self.embeddings(model), *self.blocks(model)[:layers]] if layers >= 0 else []
        ):
            module.requires_grad_(False)

    def standard_model(self, config: PreTrainedConfig) -> PreTrainedModel:
        """The standard transformers model of `config`, with new weights."""
        standard = self.standard_config(config)
        return AutoModelForCausalLM.from_config(
            standard, attn_implementation="sdpa", trust_remote_code=False
        )

    def flops_per_token(self, config: PreTrainedConfig, block_size: int) -> float:
        """6·N + 12·L·H·Q·T: training, forward and backward (PaLM, arXiv:2204.02311, appendix B).

        N leaves out the parameters that are only looked up, as nanoGPT's `estimate_mfu` does.
        """
        parameters = count_parameters(config) - self.lookup_parameters(config)
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        return 6 * parameters + 12 * config.num_hidden_layers * width * block_size


GPT2 = Architecture(
    name="gpt2",
    title="GPT-2",
    model_types=("gpt2", GPTConfig.model_type),
    config_class=GPTConfig,
    model_class=GPTForCausalLM,
    config_from_recipe=gpt2.config_from_recipe,
    recipe_knobs=gpt2.recipe_knobs,
    read_config=gpt2.read_config,
    read_model=gpt2.read_model,
    write_model=gpt2.write_model,
    standard_config=GPTConfig.to_gpt2,
    blocks=lambda model: model.transformer.h,
    embeddings=lambda model: [model.transformer.wte, model.transformer.wpe],
    final_norm=lambda model: model.transformer.ln_f,
    attention=lambda block: block.attn,
    attention_layers=lambda block: (
        block.attn.q_proj,
        block.attn.k_proj,
        block.attn.v_proj,
        block.attn.o_proj,
    ),
    mlp_layers=lambda block: (block.mlp.fc, block.mlp.proj),
    lora_targets=tuple(LORA_TARGETS),
    layers_on_disk=GPT2_LAYOUT,
    tensor_parallel=lambda block: {
        "attn.q_proj": "outputs",
        "attn.k_proj": "outputs",
        "attn.v_proj": "outputs",
        "attn.o_proj": "inputs",
        "mlp.fc": "outputs",
        "mlp.proj": "inputs",
    },
    row_losses=gpt2.row_losses,
    crop_positions=gpt2.crop_positions,
    lookup_parameters=lambda config: config.n_positions * config.n_embd,
    block_activations=lambda config: BlockActivations(
        residual=2 * config.n_embd,
        attention=3 * config.n_embd,
        other=config.n_embd + config.inner_size,
    ),
)

ARCHITECTURES = (GPT2,)


@cache
def _decoder(config_class: type[PreTrainedConfig]) -> Architecture:
    """The row of a decoder of transformers.

    Raises ValueError if its models are not what we can train.
    """
    parts = decoders.parts_of(config_class)
    layers = (*parts.attention_layers, *parts.mlp_layers)

    def in_block(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
        return lambda block: tuple(block.get_submodule(name) for name in names)

    return Architecture(
        name=config_class.model_type,
        title=decoders.title_of(config_class),
        model_types=(config_class.model_type,),
        config_class=config_class,
        model_class=loss_decoders.model_class_of(config_class),
        config_from_recipe=partial(decoders.config_from_recipe, config_class),
        recipe_knobs=decoders.recipe_knobs,
        read_config=decoders.read_config,
        read_model=decoders.read_model,
        write_model=decoders.write_model,
        standard_config=decoders.standard_config,
        blocks=lambda model: model.get_submodule(parts.blocks),
        embeddings=decoders.embeddings,
        final_norm=lambda model: model.get_submodule(parts.final_norm),
        attention=lambda block: block.get_submodule(parts.attention),
        attention_layers=in_block(parts.attention_layers),
        mlp_layers=in_block(parts.mlp_layers),
        lora_targets=tuple(name.rpartition(".")[2] for name in layers),
        layers_on_disk={},
        tensor_parallel=partial(decoders.tensor_parallel, config_class),
        row_losses=lambda model, input_ids, targets: model.row_losses(input_ids, targets),
        crop_positions=lambda model, length: None,  # rotary positions are computed
        lookup_parameters=decoders.lookup_parameters,
        block_activations=None,
    )


_PARTS = (
    (r"\.lora_", "adapters"),
    (r"\.(wte|embed_tokens)\.|^lm_head\.", "token embedding and head"),
    (r"\.wpe\.", "position embedding"),
    (r"\.(attn|self_attn)\.", "attention"),
    (r"\.mlp\.", "MLP"),
)


def part_of(name: str) -> str:
    """The part of a model that a parameter belongs to, for a table: `attention`, `MLP`, ..."""
    return next((part for pattern, part in _PARTS if re.search(pattern, name)), "norms")


def architecture_of(model_or_config: PreTrainedModel | PreTrainedConfig) -> Architecture:
    """The row of a model or of its config. Raises ValueError if there is none."""
    config = getattr(model_or_config, "config", model_or_config)
    for architecture in ARCHITECTURES:
        if isinstance(config, architecture.config_class):
            return architecture
    return _decoder(type(config))


def architecture_of_recipe(section: ModelSection) -> Architecture:
    """The row that a recipe's section `model` describes. Raises ValueError if there is none."""
    return _row_of_type(section.architecture)


def _row_of_type(model_type: str) -> Architecture:
    for architecture in ARCHITECTURES:
        if model_type in architecture.model_types:
            return architecture
    return _decoder(decoders.config_class_of(model_type))


def architecture_on_disk(name: str, revision: str | None = None) -> Architecture:
    """The row of a model folder or of a model on the Hub. Raises ValueError if there is none."""
    raw, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    return _row_of_type(raw.get("model_type", GPTConfig.model_type))


def padding_rows(config: PreTrainedConfig) -> int:
    """Rows of the embedding that only pad the vocabulary."""
    return (getattr(config, "padded_vocab_size", None) or config.vocab_size) - config.vocab_size


def count_parameters(config: PreTrainedConfig) -> int:
    """Parameters of the model as it is saved: padded vocabulary rows are not counted, a tied
    head counts once.
    """
    with torch.device("meta"):
        model = architecture_of(config).model_class(config)
    matrices = 1 if config.tie_word_embeddings else 2
    return model.num_parameters() - matrices * padding_rows(config) * config.hidden_size
