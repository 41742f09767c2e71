"""A model from scratch or from a folder or the Hub."""

from pathlib import Path

import torch

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.errors import UserError
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


def build_model(config: GPTConfig, seed: int) -> GPTForCausalLM:
    """A model with fresh weights, the same for the same seed on every process and machine."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights"))
        return GPTForCausalLM(config)


def load_model(name: str) -> GPTForCausalLM:
    """The model in a folder or on the Hub, in float32. Raises UserError where there is none that we can read."""
    folder = Path(name)
    if folder.exists() and not (folder / "config.json").is_file():
        raise UserError(f"{name}: not a model folder (no config.json in it)")
    try:
        return GPTForCausalLM.from_pretrained(name, dtype=torch.float32)
    except Exception as error:  # of a damaged file, a config with nonsense in it, the network, ...
        reason = " ".join(str(error).split())
        hint = "" if folder.exists() else "; it is no folder here, so it was looked up on the Hub"
        raise UserError(f"{name}: cannot be loaded as a GPT-2 model{hint}: {reason}") from error


def count_parameters(config: GPTConfig) -> int:
    """Parameters of the model as it is saved: padded vocabulary rows are not counted, a tied head counts once."""
    with torch.device("meta"):
        model = GPTForCausalLM(config)
    padding = (config.padded_vocab_size or config.vocab_size) - config.vocab_size
    matrices = 1 if config.tie_word_embeddings else 2
    return model.num_parameters() - matrices * padding * config.n_embd
