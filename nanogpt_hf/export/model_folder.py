"""A model folder that opens everywhere: plain GPT-2, tokenizer and card, written whole or not at all."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import safetensors
import torch
import transformers

from nanogpt_hf.data.place import is_vacant, partial_of, put_in_place
from nanogpt_hf.data.tokenizer import save_tokenizer
from nanogpt_hf.errors import DivergedError, RunFolderError, UserError
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM
from nanogpt_hf.runs.replace import replaced_folder

MAX_SHARD_SIZE = "5GB"  # a file's; larger models are split and get an index


def save_model_folder(
    folder: Path,
    config: GPTConfig,
    weights: dict[str, torch.Tensor],
    tokenizer: transformers.PreTrainedTokenizerBase,
    card: str,
) -> None:
    """Write `weights` (our names) as a plain GPT-2 folder, replacing the one that may be there; a link is followed."""
    with replaced_folder(folder.resolve()) as partial:
        write_model_folder(partial, config, weights, tokenizer, card)


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
        save_tokenizer(tokenizer, folder)
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A hidden folder that becomes `out`, or its content if `out` is there and empty, when the block has ended well.

    It is gone when the block has not.

    Raises RunFolderError where `out` holds something already or cannot be written.
    """
    out = out.resolve()  # of a link, its target: no folder can be renamed over the link itself
    if not is_vacant(out):
        raise RunFolderError(f"{out}: exists already; choose another OUT, or remove it first")
    partial = partial_of(out)
    made = [folder for folder in out.parents if not folder.exists()]
    try:
        shutil.rmtree(partial, ignore_errors=True)  # what a killed process left
        partial.mkdir(parents=True)
        yield partial
        put_in_place(partial, out)
    except (OSError, safetensors.SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunFolderError(f"{out}: cannot be written: {reason}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):  # raised at the first that holds something: then all went well
            for folder in made:
                folder.rmdir()


def fixed_input(config: GPTConfig) -> torch.Tensor:
    """Two sequences of token ids, the same for every model of these sizes: (2, at most 128 positions)."""
    length = min(config.n_positions, 128)
    return (torch.arange(2 * length) * 7919 % config.vocab_size).view(2, length)


@torch.no_grad()
def logits_of(model: transformers.PreTrainedModel) -> torch.Tensor:
    """Logits (2, T, V) on the fixed input, float32."""
    return model.eval()(fixed_input(model.config)).logits.float()


def finite_logits_of(model: transformers.PreTrainedModel) -> torch.Tensor:
    """The same. Raises DivergedError if they are not finite: then there is nothing to compare an export with."""
    logits = logits_of(model)
    if not logits.isfinite().all():
        raise DivergedError(
            "the model's logits are not finite: its training diverged, or its weights are damaged; nothing was written"
        )
    return logits


def max_difference(logits: torch.Tensor, original: torch.Tensor, exact: bool) -> float:
    """How far two models' logits lie apart at most. Raises RuntimeError where an export that is `exact` is not."""
    difference = (logits - original).abs().max().item()
    allowed = 1e-4 * max(1.0, original.abs().max().item())
    if not difference <= (allowed if exact else float("inf")):  # NaN is not allowed either
        raise RuntimeError(f"the exported model's logits differ by {difference:.2g}; nothing was written")
    return difference


def export_gpt2(
    folder: Path,
    model: GPTForCausalLM,
    tokenizer: transformers.PreTrainedTokenizerBase | None,
    card: str | None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> float:
    """Write `model` as a plain GPT-2, open it again with transformers alone, and return how far the logits lie apart.

    Raises UserError where a weight is too large for `dtype`.
    """
    original = finite_logits_of(model)
    weights = cast_weights(model, dtype)
    write_model_folder(folder, model.config, weights, tokenizer, card, max_shard_size)
    opened = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    if tokenizer is not None:
        check_tokenizer(folder, tokenizer)
    return max_difference(logits_of(opened), original, exact=dtype == torch.float32)


def cast_weights(model: GPTForCausalLM, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The model's weights in `dtype`. Raises UserError where one is finite and its rounding is not."""
    weights = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
    for name, weight in weights.items():
        if not weight.isfinite().all() and model.state_dict()[name].isfinite().all():
            raise UserError(f"--dtype: {name} is too large for {str(dtype).removeprefix('torch.')}; use bf16")
    return weights


def check_tokenizer(folder: Path, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Raises RuntimeError where the tokenizer in `folder` opens as another than `tokenizer`."""
    opened = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    text = "".join(tokenizer.decode([i]) for i in range(min(50, len(tokenizer))))
    if opened.get_vocab() != tokenizer.get_vocab() or opened(text)["input_ids"] != tokenizer(text)["input_ids"]:
        raise RuntimeError("the exported tokenizer opens as another one; nothing was written")
