"""Reinforcement learning on verifiable answers: sample answers to the questions of a task, and reward the right ones.

No recipe is needed: cli.py rl --from runs/arithmetic_sft --task arithmetic
"""

import argparse

from nanogpt_hf.commands.console import show
from nanogpt_hf.commands.training_run import add_run_arguments, dry_run, run_options
from nanogpt_hf.training.finetuning import check_tokenizer, finetune_config
from nanogpt_hf.training.start import train

# flag -> (knob, metavar, meaning)
_FLAGS = {
    "from": ("finetune.model", "MODEL", "the model to start from: a Hub id, a model folder, or a run folder"),
    "task": ("rl.task", "TASK", "the questions and how answers are rewarded, such as arithmetic"),
    "data": ("data.source", "PATH", "the questions, with reference answers: as conversations for `finetune`"),
    "reward": ("rl.reward", "FILE.py:NAME", "a Python function for the reward, instead of the task's own"),
    "lora": ("lora.rank", "R", "train LoRA adapters of rank R instead of the weights"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a recipe, such as recipes/arithmetic_rl.yaml")
    for flag, (key, metavar, meaning) in _FLAGS.items():
        parser.add_argument(f"--{flag}", dest=key, metavar=metavar, help=f"{meaning} (--{key})")
    add_run_arguments(parser)
    parser.epilog = (
        f"{parser.epilog}\n\nIts defaults are not those of pretraining: see docs/alignment.md, or --dry-run."
    )


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    flags = [(key, getattr(arguments, key)) for key, _, _ in _FLAGS.values()]
    stated = [(key, value) for key, value in flags if value is not None]
    config, base = finetune_config(arguments.recipe, stated + overrides, policy=True)
    check_tokenizer(config, base)
    if arguments.dry_run:
        from nanogpt_hf.model.build import describe_trainable, meta_model

        show(f"{config.finetune.model}: {describe_trainable(meta_model(config, base), config)}\n")
        dry_run(config)
        return
    train(config, **run_options(arguments))
