"""What several commands share: arguments, recipes, and the model that the user names."""

import argparse
from typing import TYPE_CHECKING, Any

from nanogpt_hf.config.finetune import chosen_method
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


def add_option(parser: argparse.ArgumentParser, usage: str, meaning: str, **options: Any) -> None:
    """Add an argument such as `--windows N`, or `recipe RECIPE`; its help ends with its default."""
    name, _, metavar = usage.partition(" ")
    if options.get("default") is not None:
        meaning += f"; default {options['default']}"
    if metavar:
        options["metavar"] = metavar
    parser.add_argument(name, help=meaning, **options)


def add_flags(parser: argparse.ArgumentParser, flags: dict[str, str]) -> None:
    """Add flags without a value: name -> meaning."""
    for name, meaning in flags.items():
        parser.add_argument(name, action="store_true", help=meaning)


def add_recipe_argument(
    parser: argparse.ArgumentParser,
    meaning: str = "a recipe, for example recipes/quickstart.yaml",
    **options: Any,
) -> None:
    add_option(parser, "recipe RECIPE", meaning, **options)


def load_text_recipe(command: str, recipe: str, overrides: list[tuple[str, str]]) -> Config:
    """The resolved recipe of a command that reads text.

    Raises UserError for one of another method.
    """
    if method := chosen_method(stated_knobs(recipe, overrides).get):
        raise UserError(
            f"cli.py {command}: {recipe}: states {method.knob}; its command is `{method.command}`"
        )
    return load_config(recipe, overrides)


def add_optional_recipe_argument(parser: argparse.ArgumentParser) -> None:
    add_recipe_argument(parser, "without it: a model of 0.8 M parameters", nargs="?")
    parser.epilog = "Set any knob of RECIPE by its name, as for `pretrain`."


def load_optional_recipe(
    command: str, recipe: str | None, overrides: list[tuple[str, str]]
) -> Config | None:
    """`load_text_recipe`, or None without a recipe. Raises UserError for knobs without a recipe."""
    if recipe:
        return load_text_recipe(command, recipe, overrides)
    if overrides:
        key = overrides[0][0]
        raise UserError(f"cli.py {command}: --{key}: a knob of a recipe, but no RECIPE is given")
    return None


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "model MODEL", "a run folder (its best model), a model folder, or a Hub id")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How the next token is sampled."""
    add_option(parser, "--temperature", "0 is greedy", type=bounded(float, 0), default=0.8)
    add_option(parser, "--top-k", "sample from the k likeliest tokens only", type=bounded(int, 1))
    likeliest = "sample from the likeliest tokens that add up to p only"
    add_option(parser, "--top-p", likeliest, type=bounded(float, 0, 1))
    add_option(parser, "--seed", "of the samples", type=bounded(int, 0, 2**62), default=1337)


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `generate_tokens` that `add_sampling_arguments` states, but for the seed."""
    return {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")}


def add_json_argument(parser: argparse.ArgumentParser, content: str, *aliases: str) -> None:
    meaning = f"also write {content} to FILE; - is stdout"
    parser.add_argument("--json", *aliases, metavar="FILE", type=output_file, help=meaning)


def list_knobs(parser: argparse.ArgumentParser) -> None:
    """End the help of a command that reads a recipe with every knob."""
    parser.epilog = "Set any knob of the recipe by its name:\n\n" + "\n".join(knob_lines())


# Short names of knobs: name -> (knob, metavar, meaning)
_SHORT_NAMES = {
    "depth": ("model.depth", "N", "size dial: N blocks; width, batch and steps follow"),
    "from": ("finetune.model", "MODEL", "start from a Hub id, a model folder, or a run folder"),
    "data": ("data.source", "PATH", "the text: a file, folder, glob, URL, or Hub data set"),
    "freeze-layers": ("finetune.freeze_layers", "N", "freeze the embeddings and N blocks"),
    "unfreeze-every": ("finetune.unfreeze_every", "K", "unfreeze the topmost block every K steps"),
    "lora": ("lora.rank", "R", "train LoRA adapters of rank R instead of the weights"),
    "task": ("rl.task", "TASK", "the questions and how answers are rewarded, such as arithmetic"),
    "loss": (
        "align.loss",
        "LOSS",
        "dpo, ipo, hinge, simpo or orpo of pairs; kto of labeled answers",
    ),
    "reward": ("rl.reward", "FILE.py:NAME", "a Python function, instead of the task's own reward"),
}


def add_knobs(parser: argparse.ArgumentParser, *names: str, **meanings: str) -> None:
    """Add short names of knobs; `meanings` of a command replace the common ones.

    A command's `run` gets them as overrides.
    """
    for name in names:
        key, metavar, meaning = _SHORT_NAMES[name]
        meaning = meanings.get(name, meaning)
        add_option(parser, f"--{name} {metavar}", f"{meaning} (--{key})", dest=key)


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
