"""Describe prepared data in a few lines, and warn of sources that a run reads too often."""

import numpy as np

from nanogpt_hf.config.formats import FORMATS, FormatRow
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.config.stages import config_at, planned_tokens, tokens_by_source
from nanogpt_hf.data.batches import blocks_read
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.data.examples import ExampleBlocks
from nanogpt_hf.data.manifest import SPLITS, Manifest, SplitFacts
from nanogpt_hf.data.mixture import as_mixture
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.formatting import plural

# A held-out share of the tokens above which too little may be left to train on.
_LARGE_SHARE = 0.25


def summary_lines(config: Config, data: PreparedData) -> list[str]:
    """A line for each split. For a mixture, a line for each split of each source, then the share
    and the epochs of each source.
    """
    sources = data.manifest.sources
    if not sources:
        form = FORMATS[config.data.format]
        lines = _split_lines(form, data.manifest, data.train, data.validation)
        return lines + _left_out_lines(data.manifest)
    lines = []
    parts_of = (as_mixture(data.train).parts, as_mixture(data.validation).parts)
    for source, *parts in zip(sources, *parts_of, strict=True):
        lines += [
            f"{source.data.dir}:",
            *_split_lines(FORMATS[source.data.format], source.manifest, *parts),
        ]
        lines += _left_out_lines(source.manifest)
    # How often each source is read is known with the number of steps.
    if config.train.steps_from:
        return lines
    epochs = epochs_by_source(config, data.train)
    tokens = tokens_by_source(config)
    total = planned_tokens(config)
    width = max(len(name) for name in epochs)
    lines.append(f"mixture of {len(sources)} sources, in {config.train.max_steps:,} steps:")
    return lines + [
        f"  {name:<{width}} {tokens[name] / total:7.2%} of the sequences, {count:,.2f} epochs"
        for name, count in epochs.items()
    ]


def _split_lines(
    form: FormatRow, manifest: Manifest, train: Blocks, validation: Blocks
) -> list[str]:
    splits = zip(SPLITS, (train, validation), strict=True)
    return [
        f"  {name:<10} {_line(form, getattr(manifest, name), blocks)}" for name, blocks in splits
    ]


def _left_out_lines(manifest: Manifest) -> list[str]:
    count = manifest.left_out
    return [f"  {'left out':<10} {plural(count, 'row')} that cannot be used"] if count else []


def _line(form: FormatRow, facts: SplitFacts, blocks: Blocks) -> str:
    noun = f"{form.noun}s"
    learned = ""
    if facts.assistant_tokens is not None:
        learned = f"{facts.assistant_tokens:,} of them in {form.learned}, "
    line = (
        f"{plural(facts.documents, form.noun)}, {facts.tokens:,} tokens, {learned}"
        f"{facts.bytes_per_token:.2f} bytes per token"
    )
    # Blocks of whole documents have padding, and cut or leave out what is too long.
    if isinstance(blocks, ExampleBlocks):
        padding = 1 - blocks.filled / (len(blocks) * blocks.block_size)
        line += f"; {len(blocks):,} blocks of whole {noun}, {padding:.2%} padding"
        if blocks.cut:
            line += f"; {blocks.cut:,} are longer than a block, and cut"
        if blocks.skipped:
            line += f"; {blocks.skipped:,} have no {form.learned} within a block, and are left out"
    return line


def epochs_by_source(config: Config, train: Blocks) -> dict[str, float]:
    """Return how often a run reads each source; `train` has the blocks of its first stage."""
    size = config.data.block_size
    steps = config.train.max_steps
    # `blocks_read` counts in blocks of the last stage, and `train` has those of the first.
    tokens = np.array(blocks_read(config, steps)) * config_at(config, steps).data.block_size
    names = (source.name for source in sources_of(config.data))
    return dict(zip(names, as_mixture(train).epochs(tokens / size), strict=True))


def split_warnings(config: Config, manifest: Manifest) -> list[str]:
    """A line for each source of which far more is held out than stated, since whole documents are:
    one of few documents may be most of the text.
    """
    sources = [(source.data, source.manifest) for source in manifest.sources]
    lines = []
    for data, facts in sources or [(config.data, manifest)]:
        tokens = facts.validation.tokens
        share = tokens / (facts.train.tokens + tokens)
        if data.validation_split or share <= max(_LARGE_SHARE, 2 * data.validation_fraction):
            continue
        lines.append(
            f"data.validation_fraction: {share:.1%} of the tokens in {data.dir} are held out, not "
            f"{data.validation_fraction:.2%}, since whole {FORMATS[data.format].noun}s are; join "
            "small files to one, split the largest, or set another data.validation_seed"
        )
    return lines


def repetition_warnings(config: Config, data: PreparedData) -> list[str]:
    """A line for each source that the run would read more often than `data.max_epochs`."""
    limit = config.data.max_epochs
    steps = config.train.max_steps
    if limit is None or config.train.steps_from:
        return []
    remedy = "lower its weight, add text" if is_mixture(config.data) else "add text"
    return [
        f"data.max_epochs: {name} is read {count:,.2f} times in {steps:,} steps, more than "
        f"{limit:g}: {remedy}, or train for fewer steps"
        for name, count in epochs_by_source(config, data.train).items()
        if count > limit
    ]
