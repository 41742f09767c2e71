"""Reinforcement learning on verifiable answers: sample answers to the questions of a task, and reward the right ones.

No recipe is needed: cli.py rl --from runs/arithmetic_sft --task arithmetic
"""

import argparse

from nanogpt_hf.commands.training_run import FROM, LORA, Flags, add_flags, add_run_arguments, dry_run, run_options
from nanogpt_hf.training.finetuning import check_tokenizer, finetune_config
from nanogpt_hf.training.start import train

_FLAGS: Flags = {
    "task": ("rl.task", "TASK", "the questions and how answers are rewarded, such as arithmetic"),
    "data": ("data.source", "PATH", "the questions, with reference answers: as conversations for `finetune`"),
    "reward": ("rl.reward", "FILE.py:NAME", "a Python function for the reward, instead of the task's own"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a recipe, such as recipes/arithmetic_rl.yaml")
    add_flags(parser, FROM | _FLAGS | LORA)
    add_run_arguments(parser)
    parser.epilog = (
        f"{parser.epilog}\n\nIts defaults are not those of pretraining: see docs/alignment.md, or --dry-run."
    )


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    config, base = finetune_config(arguments.recipe, overrides, policy=True)
    check_tokenizer(config, base)
    if arguments.dry_run:
        dry_run(config, base)
    else:
        train(config, **run_options(arguments))
