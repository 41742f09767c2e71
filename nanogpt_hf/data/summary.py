"""Describe prepared data in a few lines: documents, tokens, and how conversations fill their blocks."""

from nanogpt_hf.data.examples import Examples
from nanogpt_hf.data.manifest import Manifest, SplitFacts
from nanogpt_hf.data.prepared import PreparedData


def summary_lines(manifest: Manifest, data: PreparedData | None = None) -> list[str]:
    """A line for each split; with `data` that of conversations says how they fill their blocks."""
    lines = []
    for name in ("train", "validation"):
        facts, blocks = getattr(manifest, name), getattr(data, name, None)
        if isinstance(blocks, Examples):
            line = chat_line(facts, blocks)
        else:
            line = (
                f"{facts.documents:,} documents, {facts.tokens:,} tokens, {facts.bytes_per_token:.2f} bytes per token"
            )
        lines.append(f"  {name:<10} {line}")
    return lines


def chat_line(facts: SplitFacts, examples: Examples) -> str:
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
