"""Describe prepared data in a few lines: documents, tokens, how conversations fill their blocks, epochs per source."""

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.data.examples import Examples
from nanogpt_hf.data.manifest import Manifest, SplitFacts
from nanogpt_hf.data.mixed_manifest import MixedManifest
from nanogpt_hf.data.mixture import MixedBlocks, samples_per_epoch
from nanogpt_hf.data.prepared import PreparedData


def summary_lines(config: Config, manifest: Manifest, data: PreparedData | None = None) -> list[str]:
    """A line for each split; of a mixture for each split of each source, and the share and epochs of each source.

    With `data` the lines of conversations say how they fill their blocks.
    """
    train, validation = (data.train, data.validation) if data else (None, None)
    if not (isinstance(manifest, MixedManifest) and isinstance(train, MixedBlocks)):
        return _split_lines(manifest, train, validation)
    assert isinstance(validation, MixedBlocks)
    lines = []
    for source, *parts in zip(manifest.sources, train.parts, validation.parts, strict=True):
        lines += [f"{source.data.dir}:", *_split_lines(source.manifest, *parts)]
    epochs = epochs_by_source(config, train)
    period, width = sum(source.weight for source in manifest.sources), max(len(name) for name in epochs)
    lines.append(f"mixture of {len(manifest.sources)} sources, in {config.train.max_steps:,} steps:")
    return lines + [
        f"  {source.name:<{width}} {source.weight / period:7.2%} of the sequences, {epochs[source.name]:,.2f} epochs"
        for source in manifest.sources
    ]


def _split_lines(manifest: Manifest, train: Blocks | None, validation: Blocks | None) -> list[str]:
    lines = []
    for name, blocks in (("train", train), ("validation", validation)):
        facts = getattr(manifest, name)
        if isinstance(blocks, Examples):
            line = chat_line(facts, blocks)
        else:
            line = (
                f"{facts.documents:,} documents, {facts.tokens:,} tokens, {facts.bytes_per_token:.2f} bytes per token"
            )
        lines.append(f"  {name:<10} {line}")
    return lines


def epochs_by_source(config: Config, train: Blocks) -> dict[str, float]:
    """How often a run of `config` reads each source."""
    samples = config.train.max_steps * config.train.tokens_per_step // config.data.block_size
    names = [source.name for source in sources_of(config.data)]
    if isinstance(train, MixedBlocks):
        return dict(zip(names, train.epochs(samples), strict=True))
    return {names[0]: samples / samples_per_epoch(train)}


def repetition_warnings(config: Config, data: PreparedData) -> list[str]:
    """A line for each source that the run would read more often than `data.max_epochs`."""
    limit, steps = config.data.max_epochs, config.train.max_steps
    if limit is None:
        return []
    return [
        f"data.max_epochs: {name} is read {count:,.2f} times in {steps:,} steps, more than {limit:g}: "
        f"{'lower its weight, ' if is_mixture(config.data) else ''}add text, or train for fewer steps"
        for name, count in epochs_by_source(config, data.train).items()
        if count > limit
    ]


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
