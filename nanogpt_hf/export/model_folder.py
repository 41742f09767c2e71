"""Write a model folder that transformers can load: weights, tokenizer and card, atomically."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.hf_tokenizer import save_tokenizer
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.errors import DivergedError, RunFolderError, UserError, one_line
from nanogpt_hf.export.card import model_card
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.place import dead_link, filled_folder, is_vacant, partial_of, replaced_folder
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState


def save_trained(
    folder: Path,
    config: Config,
    model_config: transformers.PreTrainedConfig,
    weights: dict[str, Tensor],
    data: PreparedData,
    state: TrainState,
    machine: str,
    generation: GenerationConfig | None,
) -> None:
    """Write the trained `weights` (our names), replacing `folder` atomically.

    Without LoRA that is the standard model, a plain GPT-2 for instance. With LoRA it is the adapter
    in peft's format. With `lora.merge` it is the standard model with the adapter merged in, and the
    adapter in `folder`/adapter. A link is followed.
    """
    lora = config.lora
    is_adapter = lora.rank is not None and not lora.merge
    # A recipe of fine-tuning has the name of the model that it starts from: the run's folder says
    # more, as the title.
    run = folder.absolute().parent.name
    base_model = config.finetune.model
    card = model_card(
        config, model_config, data.manifest, state, machine, base_model, is_adapter, run
    )
    with replaced_folder(folder.resolve()) as partial:
        if lora.rank is not None:
            from nanogpt_hf.model.lora import merged_weights, save_adapter

            place = partial if is_adapter else partial / "adapter"
            save_adapter(place, model_config, lora, config.finetune, weights)
            write_generation_config(place, generation)
            weights = {} if is_adapter else merged_weights(weights, lora)
        write_model_folder(partial, model_config, weights, data.tokenizer, card, generation)


def write_model_folder(
    folder: Path,
    config: transformers.PreTrainedConfig,
    weights: dict[str, Tensor],
    tokenizer: transformers.PreTrainedTokenizerBase | None,
    card: str | None = None,
    generation: GenerationConfig | None = None,
) -> None:
    """Write `weights` (our names, dtype unchanged) into `folder` as a model of transformers, with
    tokenizer, card and generation config if given. Without a generation config transformers writes
    one from `config`.
    """
    # An adapter has written its own weights, and there are none here.
    if weights:
        architecture_of(config).write_model(folder, config, weights)
    write_generation_config(folder, generation)
    if tokenizer is not None:
        # So that other programs cut texts that are too long for the model.
        tokenizer.model_max_length = config.max_position_embeddings
        save_tokenizer(tokenizer, folder)
    if card is not None:
        (folder / "README.md").write_text(card, encoding="utf-8")


def write_generation_config(folder: Path, generation: GenerationConfig | None) -> None:
    """Write generation_config.json with all fields. transformers' own `save_pretrained` would
    refuse some, such as a temperature without do_sample.
    """
    if generation is not None:
        text = generation.to_json_string()
        (folder / GENERATION_CONFIG_NAME).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes `out` when the block succeeds, and is removed when it
    fails, with the parents that were made for it.

    An `out` that exists and is empty gets the content. Raises RunFolderError if it is not empty,
    or cannot be written.
    """
    name = out
    if problem := dead_link(out):
        raise RunFolderError(f"{problem}, or choose another OUT")
    out = out.resolve()  # no folder can be renamed over a link
    if not is_vacant(out):
        raise RunFolderError(f"{out}: exists already; choose another OUT, or remove it first")
    for folder in out.parents:
        run = RunFolder(folder.parent)
        if folder in (run.best, run.final, run.checkpoints) and run.recipe.is_file():
            raise RunFolderError(
                f"{name}: is inside {folder}, which the run replaces; choose another"
            )
    # A failed command leaves the disk as it was, without the folders made for its output.
    new_parents = [folder for folder in out.parents if not folder.exists()]
    try:
        # Errors of reading other files pass through; errors of writing name the folder that the
        # user has asked for.
        with filled_folder(out) as partial:
            try:
                yield partial
            except (OSError, SafetensorError) as error:
                if _is_of(out, error):
                    reason = _write_error(error, partial)
                    raise RunFolderError(f"{name}: cannot be written: {reason}") from error
                raise
    except OSError as error:
        if _is_of(out, error):
            reason = error.strerror or one_line(error)
            raise RunFolderError(f"{name}: cannot be written: {reason}") from error
        raise
    finally:
        # The first parent that is not empty ends this: then the block has succeeded.
        with contextlib.suppress(OSError):
            for folder in new_parents:
                folder.rmdir()


def _is_of(out: Path, error: OSError | SafetensorError) -> bool:
    """Whether an error while `out` is written may be of its files: it names no other file, such as
    one that is read.
    """
    path = getattr(error, "filename", None)
    if not isinstance(path, str | bytes):
        return True
    found = Path(os.fsdecode(path)).resolve()
    return found.is_relative_to(partial_of(out)) or out.is_relative_to(found)


def _write_error(error: OSError | SafetensorError, partial: Path) -> str:
    """Reason why a file in `partial` could not be written. If NumPy or safetensors do not state
    it, a write of our own finds it.
    """
    if reason := getattr(error, "strerror", None):
        return reason
    try:
        # 1 MB, which a disk refuses that is full but for a few blocks.
        with (partial / ".probe").open("wb", buffering=0) as probe:
            size = 2**20
            while size:
                size -= probe.write(bytes(size))
    except OSError as found:
        return found.strerror or one_line(found)
    return one_line(error)


def fixed_input(config: transformers.PreTrainedConfig) -> Tensor:
    """Two sequences of token ids, fixed by the sizes of the model: (2, T), T at most 128."""
    # 7919 is a prime, so that the ids spread over the vocabulary.
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
    """Largest difference between the logits.

    Raises RuntimeError if it is too large for an `exact` export.
    """
    difference = (logits - original).abs().max().item()
    # Other programs add in another order: rounding is relative to the largest logit.
    allowed = 1e-4 * max(1.0, original.abs().max().item())
    if not difference <= (allowed if exact else float("inf")):  # a NaN fails, too
        raise RuntimeError(
            f"the exported model's logits differ by {difference:.2g}; nothing was written"
        )
    return difference


def export_model_folder(
    folder: Path,
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    dtype: torch.dtype,
) -> float:
    """Write `model` as a standard model of transformers, a plain GPT-2 for instance. Load it with
    transformers alone, and return the largest difference of the logits.

    Raises UserError if a weight is too large for `dtype`.
    """
    original = logits_of(model)
    weights = cast_weights(model, dtype)
    generation = model.generation_config
    write_model_folder(folder, model.config, weights, tokenizer, generation=generation)
    # By transformers alone, as the people do who get the folder.
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    return max_difference(logits_of(opened), original, exact=dtype == torch.float32)


def cast_weights(model: transformers.PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights of the model, which are finite, in `dtype`. Raises UserError if one overflows."""
    weights = {name: weight.to(dtype) for name, weight in model.state_dict().items()}
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise UserError(
                f"--dtype: {name} is too large for {str(dtype).removeprefix('torch.')}; use bf16"
            )
    return weights
