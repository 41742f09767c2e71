"""What several commands share: arguments, recipes, and the model that the user names."""

import argparse
from typing import TYPE_CHECKING, Any

from nanogpt_hf.config.knobs import knob_lines
from nanogpt_hf.config.load import load_config, stated_knobs
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.values import bounded
from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.files import output_file
from nanogpt_hf.runs.find import find_model

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from nanogpt_hf.distributed.mesh import Mesh


def load_text_recipe(command: str, recipe: str, overrides: list[tuple[str, str]]) -> Config:
    """The resolved recipe of a command that reads text.

    Raises UserError for one of reinforcement learning.
    """
    if stated_knobs(recipe, overrides).get("rl.task"):
        raise UserError(
            f"cli.py {command}: {recipe}: has an rl.task, and so no text; its command "
            "is `cli.py rl`"
        )
    return load_config(recipe, overrides)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run folder (its best model), a model folder, or a Hub id",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How the next token is sampled."""
    parser.add_argument(
        "--temperature",
        type=bounded(float, 0),
        default=0.8,
        help="0 is greedy; default %(default)s",
    )
    parser.add_argument(
        "--top-k",
        type=bounded(int, 1),
        default=None,
        help="sample from the k likeliest tokens only",
    )
    parser.add_argument(
        "--top-p",
        type=bounded(float, 0, 1),
        default=None,
        help="sample from the likeliest tokens that add up to p only",
    )
    parser.add_argument(
        "--seed", type=bounded(int, 0, 2**62), default=1337, help="default %(default)s"
    )


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `generate_tokens` that `add_sampling_arguments` states, but for the seed."""
    return {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")}


def add_json_argument(parser: argparse.ArgumentParser, content: str, *aliases: str) -> None:
    parser.add_argument(
        "--json",
        *aliases,
        metavar="FILE",
        type=output_file,
        help=f"also write {content} to FILE; - is stdout",
    )


def list_knobs(parser: argparse.ArgumentParser) -> None:
    """End the help of a command that reads a recipe with every knob."""
    parser.epilog = "Set any knob of the recipe by its name:\n\n" + "\n".join(knob_lines())


# Short names of knobs: flag -> (knob, metavar, meaning)
Flags = dict[str, tuple[str, str, str]]
DEPTH: Flags = {"depth": ("model.depth", "N", "size dial: N blocks; width, batch and steps follow")}


def add_flags(parser: argparse.ArgumentParser, flags: Flags) -> None:
    """Add flags that are short names of knobs. A command's `run` gets them as overrides."""
    for flag, (key, metavar, meaning) in flags.items():
        parser.add_argument(f"--{flag}", dest=key, metavar=metavar, help=f"{meaning} (--{key})")


def build_generation_accelerator(mesh: "Mesh") -> "Accelerator":
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
    default_to_cpu(mesh)  # otherwise each of several CPU processes takes itself for the main one
    with one_line_of_accelerate():
        return Accelerator()


def autocast(accelerator: "Accelerator") -> "torch.autocast":
    """A new context for forward passes in the precision of the accelerate config, but in float32
    instead of fp16.
    """
    import torch

    return torch.autocast(
        accelerator.device.type, torch.bfloat16, enabled=accelerator.mixed_precision == "bf16"
    )


def open_model(name: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """MODEL in evaluation mode, and its tokenizer.

    Raises UserError if one is missing or they do not fit.
    """
    from transformers.utils.logging import disable_progress_bar

    from nanogpt_hf.data.tokenizer import check_vocabulary, load_tokenizer
    from nanogpt_hf.model.build import load_model

    disable_progress_bar()
    folder = find_model(name)
    model, tokenizer = load_model(folder).eval(), load_tokenizer(folder)
    check_vocabulary(folder, len(tokenizer), model.config.vocab_size)
    return model, tokenizer
