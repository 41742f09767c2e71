"""Fine-tune a GPT-2 from the Hub, a model folder or a run: all weights, the upper blocks only, or LoRA adapters.

No recipe is needed: cli.py finetune --from gpt2 --data my.txt
"""

import argparse
from typing import TYPE_CHECKING

from nanogpt_hf.commands.console import show
from nanogpt_hf.commands.training_run import add_run_arguments, dry_run, run_options
from nanogpt_hf.errors import DataError
from nanogpt_hf.training.finetuning import check_tokenizer, finetune_config
from nanogpt_hf.training.start import train

if TYPE_CHECKING:
    from nanogpt_hf.data.manifest import Manifest

# flag -> (knob, metavar, meaning)
_FLAGS = {
    "from": ("finetune.model", "MODEL", "the model to start from: a Hub id, a model folder, or a run folder"),
    "data": ("data.source", "PATH", "the text: a file, folder, glob, URL, or a Hub data set's name"),
    "freeze-layers": ("finetune.freeze_layers", "N", "freeze the embeddings and the first N blocks"),
    "unfreeze-every": ("finetune.unfreeze_every", "K", "unfreeze the topmost frozen block every K steps"),
    "lora": ("lora.rank", "R", "train LoRA adapters of rank R instead of the weights"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a recipe, such as recipes/finetune_lora.yaml")
    for flag, (key, metavar, meaning) in _FLAGS.items():
        parser.add_argument(f"--{flag}", dest=key, metavar=metavar, help=f"{meaning} (--{key})")
    add_run_arguments(parser)
    parser.epilog = f"{parser.epilog}\n\nFine-tuning has other defaults: see docs/finetuning.md, or --dry-run."


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    flags = [(key, getattr(arguments, key)) for key, _, _ in _FLAGS.values()]
    config, base = finetune_config(
        arguments.recipe, [(key, value) for key, value in flags if value is not None] + overrides
    )
    vocabulary = check_tokenizer(config, base)
    if arguments.dry_run:
        from nanogpt_hf.model.build import describe_trainable, meta_model

        show(f"{config.finetune.model}: {describe_trainable(meta_model(config, base), config)}\n")
        dry_run(config)
        return

    def check_tokenizer_of_data(manifest: "Manifest") -> None:
        if manifest.tokenizer_hash != vocabulary:
            raise DataError(
                f"{config.data.dir}: prepared with another tokenizer than {config.data.tokenizer}; prepare it again"
            )

    train(config, **run_options(arguments), check=check_tokenizer_of_data)
