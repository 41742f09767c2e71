"""Describe prepared data in a few lines: documents, tokens, and how conversations fill their blocks."""

from typing import Any

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared


def prepare_with_summary(config: Config) -> tuple[bool, list[str]]:
    """Prepare the data of a recipe. Return whether it was prepared now, and lines that describe it."""
    manifest, prepared_now = prepare(config)
    lines = [f"{config.data.dir}: {'prepared' if prepared_now else 'is prepared already'}"]
    data = load_prepared(config) if config.data.format == "chat" else None
    for name in ("train", "validation"):
        facts = getattr(manifest, name)
        if data:
            line = chat_line(facts, getattr(data, name))
        else:
            line = (
                f"{facts.documents:,} documents, {facts.tokens:,} tokens, {facts.bytes_per_token:.2f} bytes per token"
            )
        lines.append(f"  {name:<10} {line}")
    return prepared_now, lines


def chat_line(facts: Any, examples: Any) -> str:
    """A split of conversations: tokens, how full its blocks are, and conversations that are cut or left out."""
    line = (
        f"{facts.documents:,} conversations, {facts.tokens:,} tokens, {facts.assistant_tokens:,} of them in answers; "
        f"{len(examples):,} blocks of {examples.block_size} ({examples.packing}), "
        f"{examples.filled / (len(examples) * examples.block_size):.0%} full"
    )
    if examples.cut:
        line += f"; {examples.cut:,} conversations are longer than a block and are cut at their end"
    if examples.skipped:
        line += f"; {examples.skipped:,} have no answer within a block and are left out"
    return line
