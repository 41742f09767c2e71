"""Write a model folder that transformers can load: plain GPT-2 weights, tokenizer and card,
atomically.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.data.tokenizer import save_tokenizer
from nanogpt_hf.errors import DivergedError, RunFolderError, UserError
from nanogpt_hf.export.card import model_card
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.place import filled_folder, is_vacant, replaced_folder
from nanogpt_hf.runs.state import TrainState


def save_trained(
    folder: Path,
    config: Config,
    model_config: transformers.PreTrainedConfig,
    weights: dict[str, Tensor],
    data: PreparedData,
    state: TrainState,
    machine: str,
) -> None:
    """Write the trained `weights` (our names), replacing `folder` atomically.

    Without LoRA: plain GPT-2. With LoRA: the adapter in peft's format; with `lora.merge` also,
    plain GPT-2 with the adapter merged, and the adapter in `folder`/adapter. A link is followed.
    """
    lora = config.lora
    is_adapter = lora.rank is not None and not lora.merge
    card = model_card(
        config, model_config, data.manifest, state, machine, config.finetune.model, is_adapter
    )
    with replaced_folder(folder.resolve()) as partial:
        if lora.rank is not None:
            from nanogpt_hf.model.lora import merged_weights, save_adapter

            place = partial if is_adapter else partial / "adapter"
            save_adapter(place, model_config, lora, config.finetune, weights)
            weights = {} if is_adapter else merged_weights(weights, lora)
        write_model_folder(partial, model_config, weights, data.tokenizer, card)


def write_model_folder(
    folder: Path,
    config: transformers.PreTrainedConfig,
    weights: dict[str, Tensor],
    tokenizer: transformers.PreTrainedTokenizerBase | None,
    card: str | None = None,
) -> None:
    """Write `weights` (our names, dtype unchanged) as plain GPT-2 into `folder`, with tokenizer
    and card if given; of an adapter, which has no weights of its own here, those alone.
    """
    if weights:
        architecture_of(config).write_model(folder, config, weights)
    if tokenizer is not None:
        tokenizer.model_max_length = config.max_position_embeddings
        save_tokenizer(tokenizer, folder)
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes `out` when the block succeeds, and is removed when it
    fails.

    An `out` that exists and is empty gets the content. Raises RunFolderError if it is not empty.
    """
    out = out.resolve()  # no folder can be renamed over a link
    if not is_vacant(out):
        raise RunFolderError(f"{out}: exists already; choose another OUT, or remove it first")
    with filled_folder(out) as partial:
        yield partial


def fixed_input(config: transformers.PreTrainedConfig) -> Tensor:
    """Two sequences of token ids, fixed by the sizes of the model: (2, T), T at most 128."""
    length = min(config.max_position_embeddings, 128)
    return (torch.arange(2 * length) * 7919 % config.vocab_size).view(2, length)


@torch.no_grad()
def logits_of(model: transformers.PreTrainedModel) -> Tensor:
    """Logits (2, T, V) on the fixed input, float32.

    Raises DivergedError if they are not finite, since exports could not be compared.
    """
    logits = model.eval()(fixed_input(model.config)).logits.float()
    if not logits.isfinite().all():
        raise DivergedError(
            "the model's logits are not finite: its training diverged, or its weights are "
            "damaged; nothing was written"
        )
    return logits


def max_difference(logits: Tensor, original: Tensor, exact: bool) -> float:
    """The largest difference between the logits.

    Raises RuntimeError if it is too large for an `exact` export.
    """
    difference = (logits - original).abs().max().item()
    allowed = 1e-4 * max(1.0, original.abs().max().item())
    if not difference <= (allowed if exact else float("inf")):  # a NaN fails, too
        raise RuntimeError(
            f"the exported model's logits differ by {difference:.2g}; nothing was written"
        )
    return difference


def export_gpt2(
    folder: Path,
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    card: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Write `model` as plain GPT-2, load it with transformers alone, and return the largest
    difference of the logits.

    Raises UserError if a weight is too large for `dtype`.
    """
    original = logits_of(model)
    weights = cast_weights(model, dtype)
    write_model_folder(folder, model.config, weights, tokenizer, card)
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    return max_difference(logits_of(opened), original, exact=dtype == torch.float32)


def cast_weights(model: transformers.PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of the model, which are finite, in `dtype`. Raises UserError if one overflows."""
    weights = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise UserError(
                f"--dtype: {name} is too large for {str(dtype).removeprefix('torch.')}; use bf16"
            )
    return weights
