"""Tokenize a recipe's text or conversations into arrow shards. If they exist already, verify every byte of them.

On several machines: each runs `prepare RECIPE --shard I/N` with its own I, from 0 to N-1; then one `prepare RECIPE
--merge`. The result equals that of one machine byte for byte.
"""

import argparse
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from nanogpt_hf.commands.arguments import list_knobs, load_text_recipe
from nanogpt_hf.config.sources import has_conversations, is_mixture, sources_of
from nanogpt_hf.errors import UserError

if TYPE_CHECKING:
    from nanogpt_hf.config.schema import Config

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe, for example recipes/quickstart.yaml")
    parser.add_argument("--shard", metavar="I/N", help="prepare part I of N only, on this machine; I is 0 to N-1")
    parser.add_argument("--merge", action="store_true", help="join the parts that --shard prepared")
    list_knobs(parser)


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    if arguments.shard and arguments.merge:
        raise UserError("--shard and --merge: prepare all parts first, then merge them; give one of the two")
    shard = _parse_shard(arguments.shard) if arguments.shard else None
    config = load_text_recipe("prepare", arguments.recipe, overrides)
    if shard:
        _prepare_parts(config, *shard)
        return

    from nanogpt_hf.data.join import merge_parts
    from nanogpt_hf.data.prepare import prepare
    from nanogpt_hf.data.prepared import check_prepared, load_prepared
    from nanogpt_hf.data.shards import NO_CHECKSUMS
    from nanogpt_hf.data.summary import summary_lines

    merged = arguments.merge and any([merge_parts(source.data)[1] for source in sources_of(config.data)])  # noqa: C419
    manifest, prepared_now = prepare(config)
    # A text alone may be too short for a block yet.
    data = load_prepared(config) if has_conversations(config.data) or is_mixture(config.data) else None
    logger.info(f"{config.data.dir}: {'prepared' if prepared_now or merged else 'is prepared already'}")
    for line in summary_lines(config, manifest, data):
        logger.info(line)
    if not (prepared_now or merged):
        verified = check_prepared(config.data)
        logger.info(f"  {'verified: every byte is as it was written' if verified else NO_CHECKSUMS}")


def _parse_shard(text: str) -> tuple[int, int]:
    """`3/8` -> 3, 8"""
    parts = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    index, number = (int(part) for part in parts.groups()) if parts else (0, 0)
    if index >= number:
        expected = f"0/{number} to {number - 1}/{number}" if number else "I/N, such as 0/8 to 7/8"
        raise UserError(f"--shard: expected {expected}, got {text!r:.40}")
    return index, number


def _prepare_parts(config: "Config", index: int, number: int) -> None:
    from nanogpt_hf.data.manifest import fitting_manifest
    from nanogpt_hf.data.part_facts import parts_folder
    from nanogpt_hf.data.parts import prepare_part
    from nanogpt_hf.data.source import Part

    for source in sources_of(config.data):
        if fitting_manifest(Path(source.data.dir), source.data):
            logger.info(f"{source.data.dir}: is prepared already, with all parts")
            continue
        facts, now = prepare_part(source.data, Part(index, number))
        state = "prepared" if now else "is prepared already"
        logger.info(f"{parts_folder(source.data)}: part {index} of {number} {state}")
        count = sum(facts.documents.values())
        logger.info(
            f"  {count:,} documents, {sum(facts.tokens.values()):,} tokens; when all parts are there: prepare --merge"
        )
