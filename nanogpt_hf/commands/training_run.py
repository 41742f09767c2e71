"""Options that commands with a recipe share, and the dry run."""

import argparse
from typing import TYPE_CHECKING, Any

from nanogpt_hf.commands.arguments import list_knobs
from nanogpt_hf.commands.console import show
from nanogpt_hf.config.dial import dial_lines
from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Short names of knobs: flag -> (knob, metavar, meaning)
Flags = dict[str, tuple[str, str, str]]
DEPTH: Flags = {"depth": ("model.depth", "N", "size dial: N blocks; width, batch and steps follow")}
FROM: Flags = {
    "from": ("finetune.model", "MODEL", "the model to start from: a Hub id, a model folder, or a run folder")
}
LORA: Flags = {"lora": ("lora.rank", "R", "train LoRA adapters of rank R instead of the weights")}


def add_flags(parser: argparse.ArgumentParser, flags: Flags) -> None:
    """Add flags that are short names of knobs. A command's `run` gets them as overrides."""
    for flag, (key, metavar, meaning) in flags.items():
        parser.add_argument(f"--{flag}", dest=key, metavar=metavar, help=f"{meaning} (--{key})")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", metavar="DIR", help="the run folder (default runs/<recipe name>)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in the run folder")
    parser.add_argument("--overwrite", action="store_true", help="delete the run that is in the run folder")
    parser.add_argument(
        "--auto-resume", action="store_true", help="--resume if there is a checkpoint, otherwise start from step 0"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and its size, then exit")
    list_knobs(parser)


def run_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `train` that the options of `add_run_arguments` state."""
    return {name: getattr(arguments, name) for name in ("run_dir", "resume", "overwrite", "auto_resume")}


def dry_run(config: Config, base: "PreTrainedConfig | None" = None) -> None:
    """Print the resolved recipe, and the parameters and tokens of its run as far as they are known without its data.

    `base` is the configuration of the model that the run starts from. In processes of a launcher, raises UserError if
    the recipe does not fit the accelerate config.
    """
    from nanogpt_hf.data.mixed_manifest import find_manifest
    from nanogpt_hf.data.tokenizer import known_vocab_size
    from nanogpt_hf.model.architecture import count_parameters
    from nanogpt_hf.model.build import build_config, describe_trainable, meta_model
    from nanogpt_hf.optim.optimizer import check_optimizer

    check_optimizer(config)
    if Mesh.from_environment().world_size > 1:
        from nanogpt_hf.distributed.accelerate_config import check_launch

        check_launch(config)
    if base is not None:
        show(f"{config.finetune.model}: {describe_trainable(meta_model(config, base), config)}\n")
    try:
        vocab_size, source = known_vocab_size(config.data, find_manifest(config.data))
        parameters = count_parameters(build_config(config.model, vocab_size))  # a mistake in it ends the command here
        sizes = [f"parameters: {parameters:,}", f"vocabulary: {vocab_size:,} tokens, {source}"]
    except DataError as error:
        sizes = [f"parameters: not known before `prepare`: {error}"]
    show(config_to_yaml(config), end="")
    for line in ["", *dial_lines(config), *sizes]:
        show(line)
    tokens = config.train.max_steps * config.train.tokens_per_step
    show(f"tokens per step: {config.train.tokens_per_step:,}; tokens in {config.train.max_steps:,} steps: {tokens:,}")
    show("nothing was started")
