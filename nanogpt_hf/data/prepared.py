"""Open prepared data: its manifest, tokenizer and tokens, and blocks to train on; write manifests; verify checksums."""

from dataclasses import dataclass
from pathlib import Path

import transformers

from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.data.blocks import Blocks, TokenBlocks
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.datatrove import open_token_files, token_stream
from nanogpt_hf.data.examples import Examples
from nanogpt_hf.data.manifest import (
    DECIDING_KNOBS,
    FORMAT,
    MANIFEST,
    Manifest,
    SplitFacts,
    check_fits,
    read_manifest,
    tool_versions,
    write_manifest,
)
from nanogpt_hf.data.mixed_manifest import find_manifest
from nanogpt_hf.data.mixture import MixedBlocks
from nanogpt_hf.data.shards import check_bytes, check_sizes
from nanogpt_hf.data.source import file_digest, file_state, local_files
from nanogpt_hf.data.tokenizer import (
    Tokenizer,
    end_of_text_id_of,
    load_tokenizer,
    save_tokenizer,
    start_of_text_id_of,
    vocabulary_hash,
)
from nanogpt_hf.data.tokens import TokenStream
from nanogpt_hf.errors import DataError

TOKENIZER = "tokenizer"


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
    """Open prepared data. Raises DataError if it is missing, does not fit the recipe, or is too short for a block."""
    if not is_mixture(config.data):
        return _load_source(config.data)
    sources = sources_of(config.data)
    parts, weights = [_load_source(source.data) for source in sources], [source.weight for source in sources]
    manifest = find_manifest(config.data)
    assert manifest is not None  # each source has one
    train, validation = (
        MixedBlocks([p.train for p in parts], weights),
        MixedBlocks([p.validation for p in parts], weights),
    )
    # All tokenizers have the same ids; that of conversations also has the chat template.
    chat = next((part for part in parts if part.end_of_turn_id is not None), parts[0])
    return PreparedData(train, validation, chat.tokenizer, manifest, chat.end_of_turn_id)


def _load_source(data: DataSection) -> PreparedData:
    folder = Path(data.dir)
    manifest = require_manifest(folder)
    check_fits(manifest, data)
    tokenizer = open_tokenizer(folder, manifest)
    tokens = [open_tokens(folder, split, manifest, data) for split in ("train", "validation")]
    block_size, packing = data.block_size, data.packing
    if data.format == "chat":
        sizes = {"block_size": block_size, "packing": packing, "vocab_size": manifest.vocab_size}
        train, validation = (Examples.open(folder / split, **sizes) for split in ("train", "validation"))
        for split, examples in (("train", train), ("validation", validation)):
            if not len(examples):
                raise DataError(
                    f"data.block_size: {block_size} tokens are too few for every conversation of {folder / split}: "
                    "none has an answer within them"
                )
        end_of_turn_id = ChatFormat(tokenizer, fixed_day=True).end_of_turn_id()
        return PreparedData(train, validation, tokenizer, manifest, end_of_turn_id)
    train, validation = tokens
    if len(train) <= block_size:
        raise DataError(
            f"data.block_size: {block_size} tokens and a next one are more than "
            f"the {len(train):,} training tokens in {folder}"
        )
    if len(validation) < 2:
        raise DataError(f"{folder}: {len(validation)} validation tokens; raise data.validation_fraction")
    blocks = TokenBlocks(train, block_size, stride=1 if data.order == "random" else None)
    return PreparedData(blocks, TokenBlocks(validation, block_size, partial=True), tokenizer, manifest)


def require_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`. Raises DataError if there is none."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(f"{folder}: no prepared data; run `prepare` first")
    return manifest


def open_tokenizer(folder: Path, manifest: Manifest) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of prepared data. Raises DataError if it is not the manifest's."""
    tokenizer = load_tokenizer(folder / TOKENIZER)
    if (vocabulary_hash(tokenizer), len(tokenizer)) != (manifest.tokenizer_hash, manifest.vocab_size):
        raise DataError(f"{folder / TOKENIZER}: not the tokenizer that made these tokens; prepare the data again")
    if manifest.recipe["format"] == "text" and start_of_text_id_of(tokenizer) != manifest.start_of_text_id:
        raise DataError(f"{folder}: its documents lack the tokenizer's start token; remove it to prepare it again")
    return tokenizer


def open_tokens(folder: Path, split: str, manifest: Manifest, data: DataSection | None = None) -> TokenStream:
    """The tokens of a split; those of datatrove are in the source of `data`.

    Raises DataError if they cannot be read or their number is not the manifest's. Ids are checked against the
    vocabulary when they are read, and all bytes by `check_prepared`.
    """
    facts = getattr(manifest, split)
    if facts.shards is not None:
        check_sizes(folder / split, facts.shards)
    if manifest.recipe["format"] == "datatrove":
        if data is None:
            raise DataError(f"{folder}: holds no tokens: they are in the .ds files that datatrove wrote")
        stream = token_stream(data, split, manifest.train.tokens, manifest.vocab_size)
    else:
        stream = TokenStream.open(folder / split, manifest.vocab_size)
    if len(stream) != facts.tokens:
        raise DataError(
            f"{folder / split}: holds {len(stream):,} tokens, but {MANIFEST} says {facts.tokens:,}; "
            "copy the prepared data again, or remove it to prepare it again"
        )
    return stream


def check_prepared(data: DataSection) -> bool:
    """Verify all prepared data, of a mixture that of every source; false if there are no checksums.

    Older versions recorded none. Raises DataError for a byte that changed since it was prepared, and for a token beyond
    the vocabulary.
    """
    checked = [_check_source(source.data) for source in sources_of(data)]
    return all(checked)


def _check_source(data: DataSection) -> bool:
    folder = Path(data.dir)
    manifest = require_manifest(folder)
    open_tokenizer(folder, manifest)
    if data.format == "datatrove":
        if file_digest([file.path for file in open_token_files(data)]) != manifest.revision:
            raise DataError(
                f"data.source: {data.one_source}: its tokens have changed since it was prepared; copy it again"
            )
        return True
    for split in ("train", "validation"):
        stream, shards = open_tokens(folder, split, manifest), getattr(manifest, split).shards
        if shards is None:
            stream.check_vocabulary()
        else:
            check_bytes(folder / split, shards)
    return manifest.train.shards is not None


def write_facts(
    folder: Path,
    data: DataSection,
    tokenizer: Tokenizer,
    revision: str,
    end_of_text_id: int | None,
    facts: dict[str, SplitFacts],
) -> Manifest:
    """Write tokenizer and manifest, the end of every preparation; return the manifest."""
    save_tokenizer(tokenizer.hf, folder / TOKENIZER)
    local = local_files(data)
    manifest = Manifest(
        format=FORMAT,
        recipe={knob: getattr(data, knob) for knob in DECIDING_KNOBS},
        revision=revision,
        file_state=file_state(local) if local else None,
        tokenizer_hash=vocabulary_hash(tokenizer.hf),
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=end_of_text_id,
        **facts,
        versions=tool_versions(),
        start_of_text_id=tokenizer.start_of_text_id if data.format == "text" else None,
    )
    write_manifest(folder, manifest)
    return manifest
