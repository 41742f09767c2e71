"""Fine-tune any text-only decoder: all weights, the upper blocks only, or LoRA adapters.

It comes from the Hub, a model folder or a run: GPT-2, Llama, Qwen3, SmolLM3, ...

No recipe is needed: cli.py finetune --from gpt2 --data my.txt
"""

import argparse
from typing import TYPE_CHECKING

from nanogpt_hf.commands.training_run import FROM, LORA, Flags, add_flags, add_run_arguments, dry_run, run_options
from nanogpt_hf.errors import DataError
from nanogpt_hf.training.finetuning import check_tokenizer, finetune_config
from nanogpt_hf.training.start import train

if TYPE_CHECKING:
    from nanogpt_hf.data.manifest import Manifest

_FLAGS: Flags = {
    "data": ("data.source", "PATH", "the text: a file, folder, glob, URL, or a Hub data set's name"),
    "freeze-layers": ("finetune.freeze_layers", "N", "freeze the embeddings and the first N blocks"),
    "unfreeze-every": ("finetune.unfreeze_every", "K", "unfreeze the topmost frozen block every K steps"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a recipe, such as recipes/finetune_lora.yaml")
    add_flags(parser, FROM | _FLAGS | LORA)
    add_run_arguments(parser)
    parser.epilog = f"{parser.epilog}\n\nFine-tuning has other defaults: see docs/finetuning.md, or --dry-run."


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    config, base = finetune_config(arguments.recipe, overrides)
    vocabulary = check_tokenizer(config, base)
    if arguments.dry_run:
        dry_run(config, base)
        return

    def check_tokenizer_of_data(manifest: "Manifest") -> None:
        if manifest.tokenizer_hash != vocabulary:
            raise DataError(
                f"{config.data.dir}: prepared with another tokenizer than {config.data.tokenizer}; prepare it again"
            )

    train(config, **run_options(arguments), check=check_tokenizer_of_data)
