"""Open prepared data: its manifest, its tokenizer, and the blocks to train on; verify all of it."""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nanogpt_hf.config.formats import FORMATS
from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.data.chat_examples import finder_of
from nanogpt_hf.data.formats import format_of
from nanogpt_hf.data.hf_tokenizer import end_of_text_id_of, load_tokenizer, vocabulary_hash
from nanogpt_hf.data.local_files import is_url, local_files
from nanogpt_hf.data.manifest import (
    OTHER_FOLDER,
    SPLITS,
    Manifest,
    SplitFacts,
    file_digest,
    file_state,
    find_manifest,
    read_manifest,
    write_manifest,
)
from nanogpt_hf.data.mixture import MixedBlocks
from nanogpt_hf.errors import ChangedError, DataError

TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class PreparedData:
    """Prepared tokens, ready to train on."""

    train: Blocks
    validation: Blocks
    tokenizer: PreTrainedTokenizerBase
    manifest: Manifest
    end_of_turn_id: int | None = None  # the token that ends an answer of conversations

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def end_of_text_id(self) -> int | None:
        return end_of_text_id_of(self.tokenizer)


def in_memory(
    train: Blocks,
    validation: Blocks,
    tokenizer: PreTrainedTokenizerBase,
    *,
    source: Any,
    revision: str,
    documents: tuple[int, int] | None = None,
) -> PreparedData:
    """Data that is not on the disk, such as questions and preference pairs, with a manifest without
    tokens. `documents` are the numbers of documents of both splits, by default of blocks.
    """
    counts = documents or (len(train), len(validation))
    # Bytes and tokens are not counted: the losses of such data are not per byte of text.
    splits = (SplitFacts(documents=count, tokens=0, bytes=0) for count in counts)
    manifest = Manifest(
        recipe={"source": source},
        revision=revision,
        tokenizer_hash=vocabulary_hash(tokenizer),
        vocab_size=len(tokenizer),
        end_of_text_id=end_of_text_id_of(tokenizer),
        train=next(splits),
        validation=next(splits),
    )
    finder = finder_of(tokenizer)
    end_of_turn_id = finder and finder.end_of_turn_id()
    return PreparedData(train, validation, tokenizer, manifest, end_of_turn_id)


def load_prepared(config: Config, manifest: Manifest | None = None) -> PreparedData:
    """Open prepared data. `manifest` is what `prepare` has found or written, if it was just called.

    Raises DataError if the data is missing, does not fit the recipe, or is too short for a block.
    """
    if manifest is None:
        manifest = _fitting_manifest(config.data)
    if not is_mixture(config.data):
        return _load_source(config.data, manifest)
    parts = [_load_source(source.data, source.manifest) for source in manifest.sources]
    weights = [source.weight for source in manifest.sources]
    train = MixedBlocks([part.train for part in parts], weights)
    validation = MixedBlocks([part.validation for part in parts], weights)
    # All tokenizers have the same ids; the one of conversations has the chat template, too.
    chosen = next((part for part in parts if part.end_of_turn_id is not None), parts[0])
    return PreparedData(train, validation, chosen.tokenizer, manifest, chosen.end_of_turn_id)


def _fitting_manifest(data: DataSection) -> Manifest:
    """Return the manifest of the prepared data, whose every source fits the recipe."""
    require_prepared(data)
    manifest = find_manifest(data)
    assert manifest is not None
    if not manifest.sources:
        check_fits(manifest, data)
    for source in manifest.sources:
        check_fits(source.manifest, source.data)
    return manifest


def check_prepared_sources(data: DataSection) -> None:
    """Raises DataError if a prepared source does not fit the recipe. Others may be missing."""
    for source in sources_of(data):
        if manifest := read_manifest(Path(source.data.dir)):
            check_fits(manifest, source.data)


def _load_source(data: DataSection, manifest: Manifest) -> PreparedData:
    folder = Path(data.dir)
    tokenizer = open_tokenizer(folder, manifest)
    train, validation = open_blocks(folder, manifest, data)
    end_of_turn_id = format_of(data).end_of_turn(tokenizer)
    return PreparedData(train, validation, tokenizer, manifest, end_of_turn_id)


def open_blocks(folder: Path, manifest: Manifest, data: DataSection) -> list[Blocks]:
    """Return the blocks of both splits in `folder`, which becomes data.dir.

    Raises DataError if a split is too short for one.
    """
    opened = [format_of(data).blocks(folder, split, manifest, data) for split in SPLITS]
    # A block needs a target: two tokens at least, and in conversations one that is learned.
    for split, of_split in zip(SPLITS, opened, strict=True):
        if not len(of_split):
            raise DataError(
                f"data.block_size: the {getattr(manifest, split).tokens:,} {split} tokens in "
                f"{data.dir} make no block of {data.block_size} tokens with a target; change it, "
                "add text, or change data.validation_fraction"
            )
    return opened


def require_manifest(folder: Path) -> Manifest:
    """Return the manifest in `folder`. Raises DataError if there is none."""
    manifest = read_manifest(folder)
    if manifest is None:
        elsewhere = "" if folder.is_absolute() else ", or change to the folder where a run began"
        raise DataError(f"{folder}: no prepared data here; run `prepare` first{elsewhere}")
    return manifest


def require_prepared(data: DataSection) -> None:
    """Raises DataError for the first source that is not prepared."""
    for source in sources_of(data):
        require_manifest(Path(source.data.dir))


def check_knobs_of_prepared(data: DataSection) -> None:
    """Raises DataError if what is prepared in data.dir has other knobs than the recipe."""
    if problem := _other_knob_of(data):
        raise DataError(problem)


def fitting_manifest(data: DataSection) -> Manifest | None:
    """Read the manifest of prepared data; None if a source is not prepared, or with other knobs."""
    return None if _other_knob_of(data) else find_manifest(data)


def _other_knob_of(data: DataSection) -> str:
    """The first difference between prepared sources and the recipe, or ''."""
    for source in sources_of(data):
        manifest = read_manifest(Path(source.data.dir))
        if manifest and (problem := _other_knob(manifest, source.data)):
            return problem
    return ""


def _other_knob(manifest: Manifest, data: DataSection) -> str:
    """Name a knob that decides the tokens and has another value in the recipe, or return ''."""
    for knob, prepared in manifest.recipe.items():
        wanted = getattr(data, knob)
        # A path may be written in several ways.
        if prepared != wanted and not (knob == "source" and Path(prepared) == Path(wanted)):
            return (
                f"{data.dir}: prepared with data.{knob} {prepared!r}, the recipe says {wanted!r}; "
                f"{OTHER_FOLDER}"
            )
    return ""


def check_fits(manifest: Manifest, data: DataSection) -> None:
    """Raises DataError if prepared data does not fit the recipe."""
    # 1. The knobs are the recipe's.
    if problem := _other_knob(manifest, data):
        raise DataError(problem)
    # 2. A text from a URL is the one that the recipe expects.
    expected = data.sha256 and f"sha256:{data.sha256.lower()}"
    if is_url(data.one_source) and expected and manifest.revision != expected:
        raise DataError(
            f"{data.dir}: prepared from a text with {manifest.revision}, not the recipe's "
            f"{data.sha256}; {OTHER_FOLDER}"
        )
    # 3. Local files have not changed. Sizes and times show that without reading; if they differ,
    # the content decides, since a copy has another time.
    if manifest.file_state:
        try:
            files = local_files(data)
        except DataError:
            if FORMATS[data.format].has_tokens:
                # Tokens of other programs are read where they are: without them there is no data.
                raise
            # The text is on the machine that prepared it.
            return
        if not files or (state := file_state(files)) == manifest.file_state:
            return
        if manifest.revision != f"sha256:{file_digest(files)}":
            back = "this run has learned the old one: put that back"
            if not FORMATS[data.format].has_tokens:
                back += ", or move the new one away, since a run needs only its prepared data"
            raise ChangedError(
                f"{data.dir}: {data.source} has changed since it was prepared",
                OTHER_FOLDER,
                f"{back}; for the new one start another run or a branch, with another --run-dir "
                "and --data.dir",
            )
        # The next call need not read the text again. A folder that cannot be written is no problem.
        with contextlib.suppress(OSError):
            write_manifest(Path(data.dir), replace(manifest, file_state=state))


def open_tokenizer(folder: Path, manifest: Manifest) -> PreTrainedTokenizerBase:
    """Return the tokenizer of prepared data. Raises DataError if it is not the manifest's."""
    remedy = f"copy it again, or remove {folder} to prepare it again"
    try:
        tokenizer = load_tokenizer(folder / TOKENIZER)
    except DataError as error:
        raise DataError(error, remedy) from None
    # With another tokenizer the same ids would be another text.
    facts = vocabulary_hash(tokenizer), len(tokenizer)
    if facts != (manifest.tokenizer_hash, manifest.vocab_size):
        raise DataError(f"{folder / TOKENIZER}: not the tokenizer that made these tokens", remedy)
    return tokenizer


def check_prepared(data: DataSection) -> None:
    """Verify all prepared data, in a mixture of every source.

    Raises DataError for a byte that changed since it was prepared.
    """
    for source in sources_of(data):
        folder = Path(source.data.dir)
        manifest = require_manifest(folder)
        open_tokenizer(folder, manifest)
        # (files, digest of their content)
        checks = [
            ([folder / split / name], facts["sha256"])
            for split in SPLITS
            for name, facts in (getattr(manifest, split).shards or {}).items()
        ]
        if FORMATS[source.data.format].has_tokens:
            checks.append((local_files(source.data), manifest.revision.removeprefix("sha256:")))
        for files, sha256 in checks:
            if file_digest(files) != sha256:
                raise DataError(
                    f"{files[0]}: is damaged: its sha256 has changed since it was prepared; copy "
                    "it again, or remove the prepared data to prepare it again"
                )
