"""Convert a checkpoint of nanoGPT to a model folder, or its train.bin and val.bin to prepared data.

No code in the files is run: checkpoints are read with weights_only, meta.pkl by a reader of plain containers.
"""

import argparse
import shlex
from pathlib import Path

from nanogpt_hf.commands.console import show
from nanogpt_hf.data.progress import shows_bars
from nanogpt_hf.errors import RunFolderError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="CKPT", help="nanoGPT's ckpt.pt, or a folder with its train.bin and val.bin")
    parser.add_argument("out", metavar="OUT", help="the folder to write: a plain GPT-2, or prepared data")
    parser.add_argument(
        "--meta",
        metavar="FILE",
        help="the meta.pkl with the characters (default: GPT-2's vocabulary; of a folder, its own)",
    )
    parser.add_argument(
        "--activation-function",
        choices=("gelu", "gelu_new"),
        default="gelu",
        help="gelu_new for checkpoints from before nanoGPT took nn.GELU in June 2023; default %(default)s",
    )


def run(arguments: argparse.Namespace) -> None:
    source, out, meta = Path(arguments.source), Path(arguments.out), arguments.meta and Path(arguments.meta)
    if not source.exists():
        raise RunFolderError(f"{source}: no such file or folder; give nanoGPT's ckpt.pt, or a folder with train.bin")
    if source.is_dir():
        import_data(source, out, meta)
    else:
        import_model(source, out, meta, arguments.activation_function)


def import_model(source: Path, out: Path, meta: Path | None, activation_function: str) -> None:
    """A checkpoint -> a model folder, and print what it is."""
    from transformers.utils import logging

    from nanogpt_hf.export.card import imported_card
    from nanogpt_hf.export.model_folder import new_folder, write_model_folder
    from nanogpt_hf.export.nanogpt import load_nanogpt
    from nanogpt_hf.model.architecture import count_parameters, padding_rows

    logging.disable_progress_bar()
    with new_folder(out) as folder:
        found = load_nanogpt(source, meta, activation_function)
        config = found.config
        card = imported_card(out.resolve().name, config, found.facts)
        write_model_folder(folder, config, found.weights, found.tokenizer.hf, card)
    padding = padding_rows(config)
    show(
        f"{out}: a GPT-2 with {count_parameters(config):,} parameters ({config.num_hidden_layers} layers, "
        f"{config.num_attention_heads} heads, {config.hidden_size} wide, {config.max_position_embeddings} positions, "
        f"{config.vocab_size:,} tokens)"
    )
    for name, value in found.facts.items():
        show(f"  {name}: {value}")
    if padding > 0:
        show(f"  left out: {padding} embedding rows that belong to no token")
    show(f"next: python cli.py sample {shlex.quote(str(out))}")


def import_data(source: Path, out: Path, meta: Path | None) -> None:
    """A folder with train.bin and val.bin -> prepared data, and say how to train on it."""

    import datasets

    from nanogpt_hf.export.model_folder import new_folder
    from nanogpt_hf.export.nanogpt_data import import_bins

    if not shows_bars():
        datasets.disable_progress_bars()
    with new_folder(out) as folder:
        manifest = import_bins(source, folder, meta)
    show(f"{out}: prepared data, {manifest.vocab_size:,} tokens in the vocabulary ({manifest.recipe['tokenizer']})")
    for name in ("train", "validation"):
        facts = getattr(manifest, name)
        show(
            f"  {name:<10} {facts.documents:,} documents, {facts.tokens:,} tokens, "
            f"{facts.bytes_per_token:.2f} bytes per token"
        )
    knobs = {"dir": out, "source": source, "tokenizer": manifest.recipe["tokenizer"]}
    options = " ".join(f"--data.{knob} {shlex.quote(str(value))}" for knob, value in knobs.items())
    show(f"next: python cli.py pretrain RECIPE {options}")
