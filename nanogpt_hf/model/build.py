"""Build a model from a recipe, load one from a folder or the Hub, and prepare it for
fine-tuning.
"""

import logging
import math
import pickle
import re
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file, extract_commit_hash

from nanogpt_hf.config.finetune import frozen_layers_at
from nanogpt_hf.config.names import folder_or_hub_id
from nanogpt_hf.config.schema import Config, ModelSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.errors import DivergedError, UserError, explain, one_line
from nanogpt_hf.model.architecture import (
    GPT2,
    Architecture,
    architecture_of,
    architecture_of_type,
    architecture_on_disk,
)
from nanogpt_hf.model.experts import experts_of
from nanogpt_hf.model.generation_file import check_end_ids, check_generation_file
from nanogpt_hf.model.look_back import check_look_back, look_back
from nanogpt_hf.model.trial_step import output_shapes
from nanogpt_hf.program import program

logger = logging.getLogger(__name__)

_NOT_FINITE = "is not finite: its training diverged, or its weights are damaged"


def build_config(
    section: ModelSection, vocab_size: int, end_of_text_id: int | None = None
) -> PreTrainedConfig:
    """Model configuration that a recipe describes, for a tokenizer of `vocab_size` tokens.

    Raises UserError if there is no such architecture, or model.extra does not fit it.
    """
    try:
        architecture = architecture_of_type(section.architecture)
    except ValueError as error:
        raise UserError(f"model.architecture: {error}") from None
    try:
        config = architecture.config_from_recipe(section, vocab_size, end_of_text_id)
    except ValueError as error:
        raise UserError(one_line(error)) from None
    if section.init == "look_back":
        check_look_back(config)
    return config


def build_model(config: PreTrainedConfig, seed: int, init: str = "own") -> PreTrainedModel:
    """A model with initial weights, the same for the same seed on every process and machine.

    `init` is model.init. With zero_residual each block starts as the identity; look_back.py
    describes look_back. All other weights are as in `own`.
    """
    architecture = architecture_of(config)
    # Weights are drawn from a seed of their own. The generator of the process stays where it was,
    # so that later draws do not depend on the size of the model.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights"))
        model = architecture.model_class(config)
        if init == "look_back":
            look_back(model, architecture.attention(architecture.blocks(model)[0]))
        # GPT-2's own weights are initialized in this way already.
        elif init != "own" and not (init == "gpt2" and architecture is GPT2):
            # Two additions to the residual stream in each layer, as in modeling_gpt.py.
            std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
            for block in architecture.blocks(model):
                for weight in architecture.residual_weights(block):
                    if init == "zero_residual":
                        nn.init.zeros_(weight)
                    else:
                        nn.init.normal_(weight, std=std)
    return model


def load_model(name: str, revision: str | None = None, **options: Any) -> PreTrainedModel:
    """Model in a folder or on the Hub, in float32; for an adapter its base model, with the
    adapter merged in.

    `options` are arguments of Architecture.read_model. Raises UserError if no model can be read.
    """
    # Cheap checks first: a damaged file should not cost the time of loading the weights.
    name, is_adapter = _find(name)
    check_generation_file(Path(name))
    model = _read(name, is_adapter, revision, options)
    check_end_ids(name, model)
    return model


def _read(
    name: str, is_adapter: bool, revision: str | None, options: dict[str, Any]
) -> PreTrainedModel:
    try:
        with warnings.catch_warnings():
            # torch also warns about a pickle that it is about to refuse.
            warnings.filterwarnings("ignore", module=r"torch\._weights_only_unpickler")
            if is_adapter:
                from nanogpt_hf.model.lora import load_merged  # peft takes a second to import

                return load_merged(name)
            architecture = architecture_on_disk(name, revision)
            if Path(name).exists():
                _check_enough_weights(Path(name), architecture)
            return architecture.read_model(name, revision, **options)
    except Exception as error:  # a damaged file, a config with nonsense in it, the network, ...
        raise _cannot_load(name, error) from error


def _find(name: str) -> tuple[str, bool]:
    """Folder or Hub id, and whether it is an adapter.

    Raises UserError if it is a folder without a model.
    """
    name = folder_or_hub_id(name)
    is_adapter = (Path(name) / "adapter_config.json").is_file()
    if Path(name).exists() and not (is_adapter or (Path(name) / "config.json").is_file()):
        raise UserError(f"{name}: not a model folder (no config.json in it)")
    return name, is_adapter


def _cannot_load(name: str, error: Exception) -> UserError:
    hint = ""
    if not Path(name).exists():
        hint = "; there is no such folder, so it was looked up on the Hub"
    return UserError(f"{name}: cannot be loaded as a language model{hint}: {_reason(error)}")


def _check_enough_weights(folder: Path, architecture: Architecture) -> None:
    """Raises ValueError if config.json describes a far larger model than the folder has weights:
    transformers allocates memory for the whole model before it compares them.
    """
    parameters = architecture.count_parameters(architecture.read_config(str(folder)))
    files = [file for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind)]
    size = sum(file.stat().st_size for file in files)
    # Weights of 4 bits have half a byte per parameter.
    if files and parameters > 2 * size:
        raise ValueError(
            f"its config.json describes {parameters:,} parameters, its weights have {size:,} bytes"
        )


def _reason(error: Exception) -> str:
    """Why a model cannot be loaded, without torch's advice to open a pickle that may run code."""
    if isinstance(error, pickle.UnpicklingError):
        return (
            "its weights are a damaged pickle, or one that holds more than tensors, and were "
            "not opened"
        )
    return explain(error) or one_line(error)


def start_model(
    config: Config,
    vocab_size: int,
    end_of_text_id: int | None,
    step: int = 0,
    learned: Sequence[int] | None = None,
) -> PreTrainedModel:
    """Model that a run starts with: initial weights, or `finetune.model` with the layers frozen
    that are at `step`. If the tokenizer has more tokens than that model's, `learned` are the ids of
    its own.

    Raises UserError if that cannot be loaded, or does not fit the recipe or a tokenizer of
    `vocab_size` tokens.
    """
    finetune = config.finetune
    lora = config.lora
    if finetune.model is None:
        model_config = build_config(config.model, vocab_size, end_of_text_id)
        model = build_model(model_config, config.train.seed, config.model.init)
    else:
        options: dict[str, Any] = {}
        if config.model.architecture == GPT2.name:
            options["dropout"] = config.model.dropout
        if lora.quantize:
            # nf4 is the type of the QLoRA paper, arXiv:2305.14314.
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_8bit=lora.quantize == "8bit",
                load_in_4bit=lora.quantize == "4bit",
                bnb_4bit_quant_type="nf4",
            )
        model = load_model(finetune.model, finetune.revision, **options)
        # methods/finetuning.py has checked that the tokenizer keeps all tokens of the model.
        if learned is not None or vocab_size > model.config.vocab_size:
            extend_vocabulary(model, vocab_size, learned)
        _prepare_for_finetuning(model, config, step)
    if idle := _freeze_idle(model):
        logger.info(f"frozen, since the loss gives no gradient: {', '.join(idle)}")
    return model


def _freeze_idle(model: PreTrainedModel) -> list[str]:
    """Freeze parameters that the loss gives no gradient, such as scores that only choose. Return
    their names.
    """
    idle = architecture_of(model).check_one_step(model.config)
    for name, parameter in model.named_parameters():
        if re.sub(r"\.lora_[AB]\.default", "", name) in idle:
            parameter.requires_grad_(False)
    return idle


def check_causal(model: PreTrainedModel, *, packs: bool) -> None:
    """Raises UserError if tokens see later ones, or, if the run `packs`, the conversation before.
    Raises DivergedError if weights or hidden states are not finite, which compare with nothing.

    Compares the last hidden states of some tokens before, after and without others, in evaluation
    mode.
    """
    length = max(1, min(8, model.config.max_position_embeddings // 2))
    tokens = torch.arange(2 * length, device=model.device)[None] * 7 % model.config.vocab_size
    positions = torch.arange(length, device=model.device)[None]
    base = model.base_model
    was_training = model.training
    name = f"model.architecture {architecture_of(model).name}"

    def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
        # Rounding differs with the length of a text; a token more or less changes far more.
        return not (one - other).abs().max() <= 1e-3 * other.abs().max()

    def hidden(tokens: torch.Tensor, **positions: torch.Tensor) -> torch.Tensor:
        out = base(tokens, use_cache=False, **positions)
        # A model without a base gives logits, which serve as well.
        states = getattr(out, "last_hidden_state", out[0])
        if not states.isfinite().all():
            raise DivergedError(
                f"{model.name_or_path or name}: its last hidden state {_NOT_FINITE}"
            )
        return states

    for weight, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise DivergedError(f"{model.name_or_path or name}: its {weight} {_NOT_FINITE}")
    with torch.no_grad():
        base.eval()
        # The first tokens of a text, with the others after them and without.
        sees_later = differ(hidden(tokens)[:, :length], hidden(tokens[:, :length]))
        # The second of two packed documents, whose positions begin again, and the same one alone.
        leaks = packs and differ(
            hidden(tokens, position_ids=torch.cat([positions, positions], 1))[:, length:],
            hidden(tokens[:, length:], position_ids=positions),
        )
        model.train(was_training)
    if sees_later:
        raise UserError(f"{name}: tokens see later ones, so that it cannot learn to predict them")
    if leaks:
        raise UserError(
            f"{name}: tokens of packed conversations or documents attend to those of others; "
            "set --data.packing padded, or leave --data.mask out"
        )


def check_balance(config: Config, model_config: PreTrainedConfig) -> None:
    """Raises UserError if there is a balance loss, but no experts, or no logits of routers."""
    if not config.optim.balance_loss:
        return
    architecture = architecture_of(model_config)
    model = architecture.on_meta(model_config)
    if not experts_of(model) or getattr(output_shapes(model), "routing", None) is None:
        raise UserError(
            f"optim.balance_loss: {architecture.name} has no experts whose routers show their "
            "logits; leave it out"
        )


def extend_vocabulary(
    model: PreTrainedModel, tokens: int, learned: Sequence[int] | None = None
) -> None:
    """Give embedding and head rows for `tokens` tokens; a new one starts as the mean of the
    `learned`, by id, by default of all rows that there are. Rows that only pad the vocabulary of
    the old tokens are new ones, too.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    rows = len(embedding.weight)
    # Ids of rows that were trained, and for each row of the result whether it is new.
    old = torch.tensor(sorted(learned) if learned is not None else range(rows))
    old = old[old < rows]
    new = torch.ones(tokens, dtype=torch.bool)
    new[old[old < tokens]] = False
    parameters = {"embedding": embedding.weight, "head": head.weight, "bias": head.bias}
    tied = head.weight is embedding.weight
    for name, parameter in parameters.items():
        if parameter is None or (name == "head" and tied):
            continue
        values = parameter.detach()
        added = values.new_empty(max(0, tokens - rows), *values.shape[1:])
        values = torch.cat([values, added])  # (rows, C), or (rows,) for a bias
        values[: len(new)][new] = parameter.detach()[old].mean(0)
        parameters[name] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    embedding.weight = parameters["embedding"]
    head.bias = parameters["bias"]
    head.weight = embedding.weight if tied else parameters["head"]
    if tokens <= rows:
        return
    embedding.num_embeddings = head.out_features = model.config.vocab_size = tokens
    if hasattr(model, "vocab_size"):  # transformers' models keep a copy
        model.vocab_size = tokens


def _prepare_for_finetuning(model: PreTrainedModel, config: Config, step: int) -> None:
    """Set the context of a loaded model, freeze layers, and add adapters, in place."""
    architecture = architecture_of(model)
    architecture.resize_positions(model, config.model.n_positions, config.finetune.rope_theta)
    architecture.freeze(model, frozen_layers_at(step, config.finetune))
    if config.lora.rank:
        from nanogpt_hf.model.lora import add_adapters

        add_adapters(model, config.lora, config.train.seed)


def meta_model(config: Config, base: PreTrainedConfig, step: int = 0) -> PreTrainedModel:
    """Model that a run has at `step`, on the meta device, with its frozen layers."""
    model = architecture_of(base).on_meta(base)
    if config.finetune.model:
        with torch.device("meta"):
            _prepare_for_finetuning(model, config, step)
    _freeze_idle(model)
    return model


def model_of_run(config: Config, vocab_size: int) -> PreTrainedModel:
    """Model that a run starts with, on the meta device, for fine-tuning too."""
    if not config.finetune.model:
        return meta_model(config, build_config(config.model, vocab_size))
    base: Any = load_base_config(config.finetune.model, config.finetune.revision)[0]
    if config.model.architecture == GPT2.name:
        base.dropout = config.model.dropout
    return meta_model(config, base)


def load_base_config(name: str, revision: str | None) -> tuple[PreTrainedConfig, str | None]:
    """Configuration of a model to fine-tune, and its commit on the Hub (None for a folder).

    Raises UserError if there is none, or none that can be fine-tuned as it is.
    """
    name, is_adapter = _find(name)
    if is_adapter:
        raise UserError(
            f"{name}: is an adapter; merge it into a whole model first: {program()} export "
            f"{shlex.quote(name)} OUT"
        )
    try:
        architecture = architecture_on_disk(name, revision)
        config = architecture.read_config(name, revision)
        architecture.check_one_step(config)
        is_folder = Path(name).exists()
        file = None if is_folder else cached_file(name, CONFIG_NAME, revision=revision)
        commit = file and extract_commit_hash(file, None)
        architecture.recipe_knobs(config)
    except Exception as error:  # a config with nonsense in it, the network, ...
        raise _cannot_load(name, error) from error
    return config, commit


def describe_trainable(model: PreTrainedModel, config: Config) -> str:
    """A line such as `trains 100,864 of 211,712 parameters, dropout 0.1`."""
    trained = model.num_parameters(only_trainable=True)
    line = f"trains {trained:,} of {model.num_parameters():,} parameters"
    if config.model.architecture == GPT2.name:
        line += f", dropout {config.model.dropout:g}"
    return line
