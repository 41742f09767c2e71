"""Train a GPT or any text-only decoder from scratch: prepare its data, and write a run folder."""

import argparse

from nanogpt_hf.commands.arguments import load_text_recipe
from nanogpt_hf.commands.training_run import DEPTH, add_flags, add_run_arguments, dry_run, run_options
from nanogpt_hf.errors import UserError
from nanogpt_hf.training.start import train


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe, for example recipes/quickstart.yaml")
    add_flags(parser, DEPTH)
    add_run_arguments(parser)


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    config = load_text_recipe("pretrain", arguments.recipe, overrides)
    if config.finetune.model:
        raise UserError(f"{arguments.recipe}: starts from {config.finetune.model}; use `cli.py finetune` instead")
    if arguments.dry_run:
        dry_run(config)
    else:
        train(config, **run_options(arguments))
