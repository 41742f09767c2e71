"""Train a GPT-2 further: from the Hub, a model folder or a run, whole, frozen in part, or by LoRA.

No recipe is needed: cli.py finetune --from gpt2 --data my.txt
"""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_hf.commands.console import show
from nanogpt_hf.commands.training_run import add_run_arguments, dry_run, run_options, train
from nanogpt_hf.config.finetune import finetune_defaults
from nanogpt_hf.config.load import convert, load_config, stated_knobs
from nanogpt_hf.config.schema import KNOBS, Config, get_value, replace_knobs
from nanogpt_hf.config.vocabulary import GPT2_NAMES
from nanogpt_hf.errors import ConfigError, DataError, UserError
from nanogpt_hf.runs.find import find_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Short for a knob.
_FLAGS = {
    "from": ("finetune.model", "MODEL", "what to start from: a Hub id, a model folder, or a run folder"),
    "data": ("data.source", "PATH", "the text: a file, folder, glob, URL, or a Hub data set's name"),
    "freeze-layers": ("finetune.freeze_layers", "N", "keep the embeddings and the first N blocks as they are"),
    "unfreeze-every": ("finetune.unfreeze_every", "K", "thaw one block more, from the top, every K steps"),
    "lora": ("lora.rank", "R", "train adapters of rank R instead of the weights"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="a recipe, such as recipes/finetune_lora.yaml")
    for flag, (key, metavar, meaning) in _FLAGS.items():
        parser.add_argument(f"--{flag}", dest=key, metavar=metavar, help=f"{meaning} (--{key})")
    add_run_arguments(parser)
    parser.epilog += "\n\nDefaults of fine-tuning differ: see docs/finetuning.md, or --dry-run."


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    flags = [(key, getattr(arguments, key)) for key, _, _ in _FLAGS.values()]
    config, base = finetune_config(arguments.recipe, [(k, v) for k, v in flags if v is not None] + overrides)
    vocabulary = _check_tokenizer(config, base.vocab_size)
    if arguments.dry_run:
        _print_trainable(config, base)
        dry_run(config)
        return

    from transformers.utils.logging import disable_progress_bar

    from nanogpt_hf.data.prepare import load_prepared

    disable_progress_bar()

    def check_tokenizer_of_data() -> None:
        if load_prepared(config).manifest.tokenizer_hash != vocabulary:
            raise DataError(
                f"{config.data.dir}: prepared with another tokenizer than {config.data.tokenizer}; prepare it again"
            )

    train(config, **run_options(arguments), check=check_tokenizer_of_data)


def finetune_config(recipe: str | None, overrides: list[tuple[str, str]]) -> tuple[Config, "PreTrainedConfig"]:
    """The resolved recipe of a fine-tuning run, and the configuration of the model that it starts from.

    Sizes and tokenizer are that model's, and the other defaults those of fine-tuning. Raises UserError where there is
    no such model, and ConfigError where recipe or command line are wrong, or say otherwise than the model.
    """
    stated = stated_knobs(recipe, overrides)
    start, revision = stated.get("finetune.model"), stated.get("finetune.revision")
    if not start or str(start).lower() in ("null", "none"):
        raise UserError("cli.py finetune: say what to start from: --from gpt2, or a model folder, or a run folder")
    if not stated.get("data.source"):
        raise UserError("cli.py finetune: say which text to train on: --data my.txt")
    start = find_model(str(start))

    from nanogpt_hf.model.architecture import architecture_of
    from nanogpt_hf.model.build import load_base_config

    base, commit = load_base_config(start, revision)
    knobs, positions = architecture_of(base).recipe_knobs(base), base.max_position_embeddings
    tokenizer = "gpt2" if start in GPT2_NAMES else start
    defaults = finetune_defaults(
        knobs,
        block_size=_stated_number(stated, "data.block_size") or positions,
        max_steps=_stated_number(stated, "train.max_steps"),
        lora=_stated_number(stated, "lora.rank") is not None,
    )
    defaults["data.tokenizer"] = tokenizer
    text = _short(str(stated["data.source"]))
    name = f"{_short(start)}-{text}"
    config = load_config(recipe, overrides, defaults, name)
    wrong = [
        f"{key}: {start} has {value}; leave it out, fine-tuning changes no sizes"
        for key, value in knobs.items()
        if key != "model.n_positions" and get_value(config, key) != value
    ]
    if config.model.n_positions > positions:
        wrong.append(f"model.n_positions: {start} has learned only {positions} positions; leave it out")
    if config.model.pad_vocab_to_multiple_of != 1:
        wrong.append("model.pad_vocab_to_multiple_of: fine-tuning changes no sizes; leave it out")
    if wrong:
        raise ConfigError(wrong)
    resolved = {"finetune.model": start, "finetune.revision": revision or commit}
    if "model.n_positions" not in stated:
        resolved["model.n_positions"] = config.data.block_size
    if stated.get("data.dir") is None:
        resolved["data.dir"] = f"data/{text}-{_short(config.data.tokenizer)}"
    return replace_knobs(config, resolved), base


def _stated_number(stated: dict[str, Any], key: str) -> int | None:
    """The number that recipe or command line say; None where they say none, or nothing right: load_config complains."""
    try:
        return convert(KNOBS[key], stated[key])
    except (KeyError, ValueError):
        return None


def _short(name: str) -> str:
    """`runs/mine/best` -> mine, `texts/my.txt` -> my, `openai-community/gpt2` -> gpt2."""
    path = Path(name)
    if path.name in ("best", "final"):
        path = path.resolve().parent
    word = path.stem if path.suffix in (".txt", ".md", ".json", ".jsonl", ".parquet", ".csv") else path.name
    return re.sub(r"[^\w.-]+", "-", word).strip("-.") or "text"


def _check_tokenizer(config: Config, vocab_size: int) -> str:
    """The hash of the tokenizer's vocabulary. Raises UserError where it is not that of the model to start from."""
    from nanogpt_hf.data.tokenizer import build_tokenizer, load_tokenizer, vocabulary_hash

    start, name = config.finetune.model, config.data.tokenizer
    own = None
    try:
        own = load_tokenizer(start) if start not in GPT2_NAMES else build_tokenizer("gpt2", ()).hf
    except DataError:
        if name == start:
            raise UserError(
                f"{start}: has no tokenizer beside it; give the one that it was trained with, as a folder or Hub id: "
                "--data.tokenizer NAME"
            ) from None
    if name == "char":
        raise UserError(
            "data.tokenizer: char would number the characters of the new text anew, and the model would read others; "
            "leave it out to take the model's own"
        )
    given = own if name == start and own is not None else build_tokenizer(name, ()).hf
    if own is not None and vocabulary_hash(given) != vocabulary_hash(own):
        raise UserError(
            f"data.tokenizer: {name} is not the tokenizer of {start}, whose tokens the model has learned; leave it out"
        )
    if len(given) > vocab_size:
        raise UserError(f"data.tokenizer: {name} has {len(given):,} tokens, {start} only {vocab_size:,}; leave it out")
    return vocabulary_hash(given)


def _print_trainable(config: Config, base: "PreTrainedConfig") -> None:
    from nanogpt_hf.model.build import describe_trainable, meta_model

    show(f"{config.finetune.model}: {describe_trainable(meta_model(config, base), config)}\n")
