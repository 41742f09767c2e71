"""Tokenize a recipe's text or conversations into arrow shards. A second call finds them and verifies every byte."""

import argparse
import logging
from pathlib import Path

from nanogpt_hf.commands.console import shows_bars
from nanogpt_hf.config.load import knob_lines, load_config

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe, for example recipes/quickstart.yaml")
    parser.epilog = "Any knob of the recipe can be set by its name:\n\n" + "\n".join(knob_lines())


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    config = load_config(arguments.recipe, overrides)
    if not prepare_and_report(config):
        from nanogpt_hf.data.prepare import check_prepared
        from nanogpt_hf.data.shards import NO_CHECKSUMS

        verified = check_prepared(Path(config.data.dir))
        logger.info(f"  {'verified: every byte is as it was written' if verified else NO_CHECKSUMS}")


def prepare_and_report(config) -> bool:
    """Prepare a recipe's data, and say what there is now; return whether anything had to be done."""
    import datasets

    from nanogpt_hf.data.prepare import load_prepared, prepare

    if not shows_bars():
        datasets.disable_progress_bars()
    manifest, anew = prepare(config)
    logger.info(f"{config.data.dir}: {'prepared' if anew else 'is prepared already'}")
    data = load_prepared(config) if config.data.format == "chat" else None
    for name in ("train", "validation"):
        facts = getattr(manifest, name)
        if data:
            line = chat_line(facts, getattr(data, name))
        else:
            line = (
                f"{facts.documents:,} documents, {facts.tokens:,} tokens, {facts.bytes_per_token:.2f} bytes per token"
            )
        logger.info(f"  {name:<10} {line}")
    return anew


def chat_line(facts, examples) -> str:
    """What there is of a split of conversations, and what a block is too short for."""
    line = (
        f"{facts.documents:,} conversations, {facts.tokens:,} tokens, {facts.answered:,} of them in answers; "
        f"{len(examples):,} blocks of {examples.block_size} ({examples.packing}), "
        f"{examples.filled / (len(examples) * examples.block_size):.0%} full"
    )
    if examples.cut:
        line += f"; {examples.cut:,} conversations are longer than a block and are cut at their end"
    if examples.left_out:
        line += f"; {examples.left_out:,} have no answer within a block and are left out"
    return line
