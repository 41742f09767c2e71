"""Open prepared data: its manifest, tokenizer and tokens, and blocks to train on; verify it;
describe it in a few lines.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import transformers

from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.data.blocks import Blocks, MixedBlocks, TokenStream, samples_per_epoch
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.files import file_digest, file_state, is_url, without_login
from nanogpt_hf.data.formats import FORMATS, local_files, open_token_files, token_stream
from nanogpt_hf.data.manifest import (
    DECIDING_KNOBS,
    MANIFEST,
    Manifest,
    MixedManifest,
    ShardFacts,
    find_manifest,
    read_manifest,
)
from nanogpt_hf.data.tokenizer import (
    end_of_text_id_of,
    load_tokenizer,
    vocabulary_hash,
)
from nanogpt_hf.errors import DataError

TOKENIZER = "tokenizer"
SPLITS = ("train", "validation")
_REMEDY = "copy the prepared data again, or remove it to prepare it again"


@dataclass(frozen=True)
class PreparedData:
    """Prepared tokens, ready to train on."""

    train: Blocks
    validation: Blocks
    tokenizer: transformers.PreTrainedTokenizerBase
    manifest: Manifest
    end_of_turn_id: int | None = None  # the token that ends an answer of conversations

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def end_of_text_id(self) -> int | None:
        return end_of_text_id_of(self.tokenizer)


def load_prepared(config: Config) -> PreparedData:
    """Open prepared data.

    Raises DataError if it is missing, does not fit the recipe, or is too short for a block.
    """
    if not is_mixture(config.data):
        return _load_source(config.data)
    sources = sources_of(config.data)
    parts = [_load_source(source.data) for source in sources]
    weights = [source.weight for source in sources]
    manifest = find_manifest(config.data)
    assert manifest is not None  # each source has one
    train = MixedBlocks([part.train for part in parts], weights)
    validation = MixedBlocks([part.validation for part in parts], weights)
    # All tokenizers have the same ids; that of conversations also has the chat template.
    chat = next((part for part in parts if part.end_of_turn_id is not None), parts[0])
    return PreparedData(train, validation, chat.tokenizer, manifest, chat.end_of_turn_id)


def _load_source(data: DataSection) -> PreparedData:
    folder = Path(data.dir)
    manifest = require_manifest(folder)
    check_fits(manifest, data)
    tokenizer = open_tokenizer(folder, manifest)
    for split in SPLITS:
        open_tokens(folder, split, manifest, data)
    train, validation = (
        FORMATS[data.format].blocks(folder, split, manifest, data) for split in SPLITS
    )
    end_of_turn_id = None
    if manifest.train.assistant_tokens is not None:
        end_of_turn_id = ChatFormat(tokenizer, fixed_day=True).end_of_turn_id()
    return PreparedData(train, validation, tokenizer, manifest, end_of_turn_id)


def require_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`. Raises DataError if there is none."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder}: no prepared data; run `prepare` first")
    return manifest


def fitting_manifest(folder: Path, data: DataSection) -> Manifest | None:
    """The manifest in `folder`, or None. Raises DataError if it does not fit the recipe."""
    if manifest := read_manifest(folder):
        check_fits(manifest, data)
    return manifest


def check_fits(manifest: Manifest, data: DataSection) -> None:
    """Raises DataError if prepared data does not fit the recipe."""
    for knob in (knob for knob in DECIDING_KNOBS if knob in manifest.recipe):
        prepared, wanted = manifest.recipe[knob], getattr(data, knob)
        if not _same(knob, prepared, wanted):
            if knob == "source":
                prepared, wanted = without_login(prepared or ""), without_login(wanted)
            raise DataError(
                f"{data.dir}: prepared with data.{knob} {prepared!r}, the recipe says {wanted!r}; "
                "choose another --data.dir, or remove the folder to prepare it again"
            )
    expected = data.sha256 and f"sha256:{data.sha256.lower()}"
    if is_url(data.one_source) and expected and manifest.revision != expected:
        raise DataError(
            f"{data.dir}: prepared from a text with {manifest.revision}, not the recipe's "
            f"{data.sha256}"
        )
    if manifest.file_state:
        try:
            files = local_files(data)
        except DataError:
            if FORMATS[data.format].encoder is None:  # its tokens are read where they are
                raise
            return  # the text is on the machine that prepared it
        if (
            files
            and file_state(files) != manifest.file_state
            and file_digest(files) != manifest.revision
        ):
            raise DataError(
                f"{data.dir}: {data.source} has changed since it was prepared; "
                "choose another --data.dir, or remove the folder to prepare it again"
            )


def _same(knob: str, prepared: str | None, wanted: str | None) -> bool:
    if knob == "source" and prepared and wanted:
        return prepared == wanted or (not is_url(wanted) and Path(prepared) == Path(wanted))
    return prepared == wanted


def open_tokenizer(folder: Path, manifest: Manifest) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of prepared data. Raises DataError if it is not the manifest's."""
    tokenizer = load_tokenizer(folder / TOKENIZER)
    facts = vocabulary_hash(tokenizer), len(tokenizer)
    if facts != (manifest.tokenizer_hash, manifest.vocab_size):
        raise DataError(
            f"{folder / TOKENIZER}: not the tokenizer that made these tokens; prepare the "
            "data again"
        )
    return tokenizer


def open_tokens(
    folder: Path, split: str, manifest: Manifest, data: DataSection | None = None
) -> TokenStream:
    """The tokens of a split; those of datatrove are in the source of `data`.

    Raises DataError if they cannot be read or their number is not the manifest's. Ids are checked
    against the vocabulary when they are read, and all bytes by `check_prepared`.
    """
    facts = getattr(manifest, split)
    if facts.shards is not None:
        _check_sizes(folder / split, facts.shards)
    elif data is None:
        raise DataError(
            f"{folder}: holds no tokens: they are in the .ds files that datatrove wrote"
        )
    stream = token_stream(folder, split, manifest, data)
    if len(stream) != facts.tokens:
        raise DataError(
            f"{folder / split}: holds {len(stream):,} tokens, but {MANIFEST} says "
            f"{facts.tokens:,}; {_REMEDY}"
        )
    return stream


def check_prepared(data: DataSection) -> None:
    """Verify all prepared data, of a mixture that of every source.

    Raises DataError for a byte that changed since it was prepared.
    """
    for source in sources_of(data):
        _check_source(source.data)


def _check_source(data: DataSection) -> None:
    folder = Path(data.dir)
    manifest = require_manifest(folder)
    open_tokenizer(folder, manifest)
    if FORMATS[data.format].encoder is None:
        if file_digest([file.path for file in open_token_files(data)]) != manifest.revision:
            raise DataError(
                f"data.source: {data.one_source}: its tokens have changed since it was prepared; "
                "copy it again"
            )
        return
    for split in SPLITS:
        shards = getattr(manifest, split).shards
        _check_sizes(folder / split, shards)
        for name, facts in shards.items():
            with (folder / split / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != facts.sha256:
                    raise DataError(
                        f"{folder / split / name}: is damaged: its sha256 has changed since it "
                        f"was prepared; {_REMEDY}"
                    )


def _check_sizes(folder: Path, shards: dict[str, ShardFacts]) -> None:
    """Raises DataError if the folder has not exactly these arrow files with these sizes."""
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.arrow")}
    for name in sorted(sizes.keys() | shards.keys()):
        if name not in sizes:
            raise DataError(f"{folder / name}: is missing; {_REMEDY}")
        if name not in shards:
            raise DataError(f"{folder / name}: is not part of this prepared data; {_REMEDY}")
        if sizes[name] != shards[name].size:
            raise DataError(
                f"{folder / name}: has {sizes[name]:,} bytes, not the {shards[name].size:,} it "
                f"was prepared with; {_REMEDY}"
            )


def summary_lines(
    config: Config, manifest: Manifest, data: PreparedData | None = None
) -> list[str]:
    """A line for each split; of a mixture for each split of each source, and the share and epochs
    of each source.

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
    period = sum(source.weight for source in manifest.sources)
    width = max(len(name) for name in epochs)
    lines.append(
        f"mixture of {len(manifest.sources)} sources, in {config.train.max_steps:,} steps:"
    )
    return lines + [
        (
            f"  {source.name:<{width}} {source.weight / period:7.2%} of the sequences, "
            f"{epochs[source.name]:,.2f} epochs"
        )
        for source in manifest.sources
    ]


def _split_lines(manifest: Manifest, train: Blocks | None, validation: Blocks | None) -> list[str]:
    line = FORMATS[manifest.recipe["format"]].line
    return [
        f"  {'train':<10} {line(manifest.train, train)}",
        f"  {'validation':<10} {line(manifest.validation, validation)}",
    ]


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
    remedy = "lower its weight, add text" if is_mixture(config.data) else "add text"
    return [
        f"data.max_epochs: {name} is read {count:,.2f} times in {steps:,} steps, more than "
        f"{limit:g}: {remedy}, or train for fewer steps"
        for name, count in epochs_by_source(config, data.train).items()
        if count > limit
    ]
