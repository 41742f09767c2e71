"""Tokenize a recipe's text or conversations into arrow shards, or verify those there are.

A corpus for many machines: launch/tokenize_corpus.py, which uses datatrove.
"""

import argparse
import logging

from nanogpt_hf.commands.arguments import add_recipe_argument, list_knobs, load_text_recipe

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_argument(parser)
    list_knobs(parser)


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    config = load_text_recipe("prepare", arguments.recipe, overrides)

    from nanogpt_hf.data.prepare import prepare
    from nanogpt_hf.data.prepared import check_prepared, summary_lines

    manifest, prepared_now = prepare(config)
    logger.info(f"{config.data.dir}: {'prepared' if prepared_now else 'is prepared already'}")
    for line in summary_lines(config, manifest):
        logger.info(line)
    if not prepared_now:
        check_prepared(config.data)
        logger.info("  verified: every byte is as it was written")
