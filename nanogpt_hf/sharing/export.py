"""A model folder that opens everywhere: plain GPT-2, tokenizer and card, written whole or not at all."""

import shutil
from pathlib import Path

import torch
import transformers

from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM


def save_model_folder(
    folder: Path,
    config: GPTConfig,
    weights: dict[str, torch.Tensor],
    tokenizer: transformers.PreTrainedTokenizerBase,
    card: str,
) -> None:
    """Write `weights` (our names) as a plain GPT-2 folder, replacing the one that may be there in one move."""
    restore_model_folder(folder)
    partial, old = (folder.parent / f".{folder.name}.{state}" for state in ("partial", "old"))
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    with torch.device("meta"):
        shell = GPTForCausalLM(config)
    shell.save_pretrained(partial, state_dict=weights)
    tokenizer.model_max_length = config.n_positions
    tokenizer.save_pretrained(partial)
    (partial / "README.md").write_text(card, encoding="utf-8")
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def restore_model_folder(folder: Path) -> None:
    """Bring back the folder that a kill caught between leaving its place and being replaced."""
    old = folder.parent / f".{folder.name}.old"
    if old.exists() and not folder.exists():
        old.rename(folder)
