"""Open the model that the user names, with its tokenizer, on the device of the accelerate config."""

from typing import TYPE_CHECKING

from nanogpt_hf.runs.find import find_model

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def build_generation_accelerator() -> "Accelerator":
    """The Accelerator of a command whose main process generates text with a whole model."""
    from accelerate import Accelerator

    from nanogpt_hf.distributed.accelerate_config import (
        check_device,
        default_to_cpu,
        ignore_layout,
        one_line_of_accelerate,
    )

    check_device()
    ignore_layout()
    default_to_cpu()  # otherwise each of several CPU processes takes itself for the main one
    with one_line_of_accelerate():
        return Accelerator()


def autocast(accelerator: "Accelerator") -> "torch.autocast":
    """A new context for forward passes in the precision of the accelerate config, but in float32 instead of fp16."""
    import torch

    return torch.autocast(accelerator.device.type, torch.bfloat16, enabled=accelerator.mixed_precision == "bf16")


def open_model(name: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """MODEL in evaluation mode, and its tokenizer. Raises UserError if one is missing or they do not fit."""
    from transformers.utils.logging import disable_progress_bar

    from nanogpt_hf.data.tokenizer import check_vocabulary, load_tokenizer
    from nanogpt_hf.model.build import load_model

    disable_progress_bar()
    folder = find_model(name)
    model, tokenizer = load_model(folder).eval(), load_tokenizer(folder)
    check_vocabulary(folder, len(tokenizer), model.config.vocab_size)
    return model, tokenizer
