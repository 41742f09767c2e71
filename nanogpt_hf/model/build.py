"""A model from scratch, or from a folder or the Hub and ready to be fine-tuned."""

import pickle
import shlex
import warnings
from pathlib import Path

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.hub import extract_commit_hash

from nanogpt_hf.config.finetune import frozen_layers_at
from nanogpt_hf.config.hub_name import folder_or_hub_id
from nanogpt_hf.config.schema import KNOBS, Config, ModelSection, kind_options
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.errors import UserError, explain, is_out_of_memory, one_line
from nanogpt_hf.model.architecture import architecture_of, count_parameters
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM


def build_gpt_config(section: ModelSection, vocab_size: int, end_of_text_id: int | None = None) -> GPTConfig:
    """The model that a recipe describes, for a tokenizer of `vocab_size` tokens.

    Raises UserError where the recipe's vocabulary is smaller than the tokenizer's.
    """
    rows = section.vocab_size or vocab_size
    if vocab_size > rows:
        raise UserError(
            f"model.vocab_size: the tokenizer has {vocab_size:,} tokens, more than the model's {rows:,}; "
            "leave model.vocab_size out to fit the tokenizer"
        )
    rows = -(-rows // section.pad_vocab_to_multiple_of) * section.pad_vocab_to_multiple_of
    return GPTConfig(
        vocab_size=vocab_size,
        padded_vocab_size=rows if rows > vocab_size else None,
        n_positions=section.n_positions,
        n_embd=section.n_embd,
        n_layer=section.n_layer,
        n_head=section.n_head,
        activation_function=section.activation_function,
        bias=section.bias,
        dropout=section.dropout,
        bos_token_id=end_of_text_id,
        eos_token_id=end_of_text_id,
    )


def build_model(config: GPTConfig, seed: int, init: str = "gpt2") -> GPTForCausalLM:
    """A model with initial weights, the same for the same seed on every process and machine.

    `init` is model.init: with zero_residual each block starts as the identity, and all other weights as with gpt2.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights"))
        model = GPTForCausalLM(config)
    if init == "zero_residual":
        architecture = architecture_of(model)
        for block in architecture.blocks(model):
            nn.init.zeros_(architecture.attention_layers(block)[-1].weight)
            nn.init.zeros_(architecture.mlp_layers(block)[-1].weight)
    return model


def load_model(name: str, revision: str | None = None, **options) -> GPTForCausalLM:
    """The model in a folder or on the Hub, in float32; of an adapter, its base with the adapter added in.

    `options` go to from_pretrained. Raises UserError where there is no model that we can read.
    """
    name = folder_or_hub_id(name)
    folder = Path(name)
    adapter = (folder / "adapter_config.json").is_file()
    if folder.exists() and not (adapter or (folder / "config.json").is_file()):
        raise UserError(f"{name}: not a model folder (no config.json in it)")
    try:
        with warnings.catch_warnings():
            # of a pickle that it is about to refuse torch warns as well
            warnings.filterwarnings("ignore", module=r"torch\._weights_only_unpickler")
            if adapter:
                from nanogpt_hf.model.lora import load_merged  # peft takes a second to import

                return load_merged(name)
            if folder.exists():
                _check_enough_weights(folder)
            # ignored by transformers, whose error would name none of them; from_pretrained has one that does
            options |= {"dtype": torch.float32, "ignore_mismatched_sizes": True}
            return GPTForCausalLM.from_pretrained(name, revision=revision, trust_remote_code=False, **options)
    except Exception as error:  # of a damaged file, a config with nonsense in it, the network, ...
        hint = "" if folder.exists() else "; it is no folder here, so it was looked up on the Hub"
        raise UserError(f"{name}: cannot be loaded as a GPT-2 model{hint}: {_reason(error)}") from error


def _check_enough_weights(folder: Path) -> None:
    """Raises ValueError if config.json describes a far larger model than the weights beside it, which all get memory
    before they are compared."""
    parameters = count_parameters(GPTConfig.from_pretrained(folder, trust_remote_code=False))
    size = sum(file.stat().st_size for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind))
    if size and parameters > size:  # not even a byte for each
        raise ValueError(f"its config.json describes {parameters:,} parameters, its weights have {size:,} bytes")


def _reason(error: Exception) -> str:
    """Why a model cannot be loaded, without torch's advice to open a pickle that may run code."""
    if isinstance(error, pickle.UnpicklingError):
        return "its weights are a damaged pickle, or one that holds more than tensors, and were not opened"
    if isinstance(error, KeyError):
        return f"a part of it is missing or unknown: {error}"
    return explain(error) if is_out_of_memory(error) else one_line(error)


def start_model(config: Config, vocab_size: int, end_of_text_id: int | None, step: int = 0) -> GPTForCausalLM:
    """The model that a run begins with, and what of it trains at `step`: from scratch, or from `finetune.model`.

    Raises UserError where that cannot be loaded, or does not fit the recipe or a tokenizer of `vocab_size` tokens.
    """
    finetune, lora = config.finetune, config.lora
    if finetune.model is None:
        model_config = build_gpt_config(config.model, vocab_size, end_of_text_id)
        return build_model(model_config, config.train.seed, config.model.init)
    options = {"dropout": config.model.dropout}
    if lora.quantize:
        options["quantization_config"] = _quantization(lora.quantize)
    model = load_model(finetune.model, finetune.revision, **options)
    if vocab_size > model.config.vocab_size:
        raise UserError(
            f"data.tokenizer: has {vocab_size:,} tokens, {finetune.model} only {model.config.vocab_size:,}; take the "
            "model's own (leave data.tokenizer out)"
        )
    return _prepare_for_finetuning(model, config, step)


def _prepare_for_finetuning(model: GPTForCausalLM, config: Config, step: int) -> GPTForCausalLM:
    crop_positions(model, config.model.n_positions)
    freeze(model, frozen_layers_at(step, config.finetune))
    if config.lora.rank:
        from nanogpt_hf.model.lora import add_adapters

        add_adapters(model, config.lora, config.train.seed)
    return model


def meta_model(config: Config, base: GPTConfig, step: int = 0) -> GPTForCausalLM:
    """The model that a fine-tuning run has at `step`, without its weights, to count them."""
    with torch.device("meta"):
        return _prepare_for_finetuning(GPTForCausalLM(base), config, step)


def load_base_config(name: str, revision: str | None) -> tuple[GPTConfig, str | None]:
    """The configuration of a model to start from, and the Hub's commit that it is of (None of a folder).

    Raises UserError where there is none, or none that can be trained further as it lies there.
    """
    name = folder_or_hub_id(name)
    folder = Path(name)
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{name}: is an adapter; make it a whole model first: python cli.py export {shlex.quote(name)} OUT"
        )
    if folder.exists() and not (folder / "config.json").is_file():
        raise UserError(f"{name}: not a model folder (no config.json in it)")
    try:
        config = GPTConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        file = None if folder.exists() else cached_file(name, CONFIG_NAME, revision=revision)
        commit = file and extract_commit_hash(file, None)
    except Exception as error:  # of a config with nonsense in it, the network, ...
        hint = "" if folder.exists() else "; it is no folder here, so it was looked up on the Hub"
        raise UserError(f"{name}: cannot be loaded as a GPT-2 model{hint}: {_reason(error)}") from error
    known = kind_options(KNOBS["model.activation_function"].kind)
    if config.activation_function not in known:
        raise UserError(f"{name}: its activation_function {config.activation_function} is none of {', '.join(known)}")
    return config, commit


def _quantization(bits: str) -> BitsAndBytesConfig:
    if bits == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")  # the QLoRA paper's type, arXiv:2305.14314


def crop_positions(model: GPTForCausalLM, n_positions: int) -> None:
    """Leave only the first `n_positions` positions, as nanoGPT's `crop_block_size` does."""
    if n_positions < model.config.n_positions:
        kept = model.transformer.wpe.weight[:n_positions].detach().clone()
        model.transformer.wpe = nn.Embedding.from_pretrained(kept, freeze=False)
        model.config.n_positions = n_positions


def freeze(model: GPTForCausalLM, layers: int) -> None:
    """Keep the embeddings (a tied head with them) and the lowest `layers` blocks from training; -1 freezes nothing."""
    transformer = model.transformer
    for module in [transformer.wte, transformer.wpe, *transformer.h[:layers]] if layers >= 0 else []:
        module.requires_grad_(False)


def describe_trainable(model: GPTForCausalLM, config: Config, step: int = 0) -> str:
    """A line such as `trains 100,864 of 211,712 parameters; frozen: the embeddings and blocks 1 to 2`."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    layers, of = frozen_layers_at(step, config.finetune), model.num_parameters()
    if config.lora.rank:
        what = f"; frozen: all but adapters of rank {config.lora.rank} on {', '.join(config.lora.targets)}"
    elif layers > 0:
        what = f"; frozen: the embeddings and block{'s 1 to' if layers > 1 else ''} {layers}"
    else:
        what = "; frozen: the embeddings" if layers == 0 else ""
    return f"trains {trained:,} of {of:,} parameters{what}"
