"""A model folder that opens everywhere: plain GPT-2, tokenizer and card, written whole or not at all."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import safetensors
import torch
import transformers

from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM

MAX_SHARD_SIZE = "5GB"  # a file's; larger models are split and get an index


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
    write_model_folder(partial, config, weights, tokenizer, card)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def write_model_folder(
    folder: Path,
    config: GPTConfig,
    weights: dict[str, torch.Tensor],
    tokenizer: transformers.PreTrainedTokenizerBase | None,
    card: str | None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Write `weights` (our names, in the dtype they have) as a plain GPT-2, with what else there is, into `folder`."""
    with torch.device("meta"):
        shell = GPTForCausalLM(config)
    shell.save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)
    if tokenizer is not None:
        tokenizer.model_max_length = config.n_positions
        tokenizer.save_pretrained(folder)
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A hidden folder that becomes `out` when the block has ended well, and is gone when it has not.

    Raises RunFolderError where `out` holds something already or cannot be written.
    """
    out = out.resolve()  # of a link, its target: no folder can be renamed over the link itself
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise RunFolderError(f"{out}: exists already; choose another OUT, or remove it first")
    partial = out.parent / f".{out.name}.partial"
    made = [folder for folder in out.parents if not folder.exists()]
    try:
        shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunFolderError(f"{out}: cannot be written: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):  # raised at the first that holds something: then all went well
            for folder in made:
                folder.rmdir()


def restore_model_folder(folder: Path) -> None:
    """Bring back the folder that a kill caught between leaving its place and being replaced."""
    old = folder.parent / f".{folder.name}.old"
    if old.exists() and not folder.exists():
        old.rename(folder)
