"""Prepare data: text or conversations -> arrow shards of token ids and a manifest.

The folder is complete or absent, also if several processes prepare it.
"""

import itertools
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow

from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.data.chat_template import chat_format
from nanogpt_hf.data.datatrove import describe_token_files
from nanogpt_hf.data.download import without_login
from nanogpt_hf.data.encode import count_rows, encode_split, save_split
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
from nanogpt_hf.data.place import make_once, parts_of
from nanogpt_hf.data.prepared import TOKENIZER
from nanogpt_hf.data.progress import shows_bars
from nanogpt_hf.data.source import Documents, file_state, load_documents, local_files
from nanogpt_hf.data.tokenizer import Tokenizer, build_tokenizer, end_of_text_id_of, save_tokenizer, vocabulary_hash
from nanogpt_hf.errors import DataError


def prepare(config: Config) -> tuple[Manifest, bool]:
    """Prepare `config.data`, each source of a mixture in its own folder.

    Return the manifest and whether anything had to be done. Safe to call from several processes at once: one prepares,
    the others wait for it. An interruption leaves nothing, SIGKILL nothing that looks complete. Raises DataError if the
    text cannot be read or the folder contains something else, and Stopped at a signal.
    """
    if not shows_bars():
        datasets.disable_progress_bars()
    if not is_mixture(config.data):
        return _prepare_source(config.data)
    if read_manifest(Path(config.data.dir)):
        raise DataError(
            f"{config.data.dir}: holds the prepared data of one source, and the recipe mixes several; "
            "choose another --data.dir"
        )
    done = [_prepare_source(source.data)[1] for source in sources_of(config.data)]
    manifest = find_manifest(config.data)
    assert manifest is not None  # each source has one now
    return manifest, any(done)


def _prepare_source(data: DataSection) -> tuple[Manifest, bool]:
    folder = Path(data.dir).resolve()  # of a link, its target: no folder can be renamed over the link itself
    try:
        return make_once(
            folder,
            find=lambda: fitting_manifest(folder, data),
            check=lambda: check_preparable(data, folder),
            write=lambda partial: _prepare_in(partial, data),
            last=MANIFEST,
        )
    except MemoryError:
        source = without_login(data.one_source)
        raise DataError(f"data.source: {source}: too large for the memory of this machine") from None


def fitting_manifest(folder: Path, data: DataSection) -> Manifest | None:
    """The manifest in `folder`, or None. Raises DataError if it does not fit the recipe."""
    if manifest := read_manifest(folder):
        check_fits(manifest, data)
    return manifest


def check_preparable(data: DataSection, folder: Path) -> None:
    """Raises DataError if this data cannot be prepared in `folder` by one machine."""
    check_source(data, folder)
    if any(parts_of(folder).glob("*-of-*")):
        raise DataError(
            f"{folder}: parts of it are in {parts_of(folder)}; run `prepare --merge` when all are prepared, or remove "
            "them to prepare the data on one machine"
        )


def check_source(data: DataSection, folder: Path) -> None:
    """Raises DataError if a local source is missing, or contains `folder`, which would be read as text."""
    local_files(data)
    source = Path(os.path.expanduser(data.one_source))
    if os.path.isdir(source) and folder.is_relative_to(source.resolve()):
        raise DataError(f"{folder}: is inside data.source {data.one_source}, and would be read as text; choose another")


def hold_out(documents: Documents, data: DataSection) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split into train and validation: a single document is cut near its end, of several some are drawn by seed."""
    if documents.validation is not None:
        return documents.train, documents.validation
    count = len(documents.train)
    if count == 1 and data.format == "chat":
        raise DataError(f"data.source: {data.one_source}: one conversation is too few to validate on another; give two")
    if count == 1:
        text = documents.train[0]["text"] or ""
        cut = int(len(text) * (1 - data.validation_fraction))
        kind = documents.train.features.arrow_schema.field("text").type

        def lone(part: str, name: str) -> datasets.Dataset:
            # With a given fingerprint, since datasets would pickle the whole text to compute one.
            return datasets.Dataset(pyarrow.table({"text": pyarrow.array([part], kind)}), fingerprint=name)

        return lone(text[:cut], "train"), lone(text[cut:], "validation")
    train, validation = held_out_rows(count, data)
    return documents.train.select(train), documents.train.select(validation)


def held_out_rows(count: int, data: DataSection) -> tuple[np.ndarray, np.ndarray]:
    """The rows to train on and those to validate on, of `count` documents, each in order."""
    held_out = max(1, round(count * data.validation_fraction))
    # argsort of raw bits: a permutation that no version of NumPy changes
    bits = np.random.Philox(key=derive_seed(data.validation_seed, "validation")).random_raw(count)
    order = np.argsort(bits, kind="stable")
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def _texts(splits: Collection[datasets.Dataset]) -> Iterator[str]:
    """Every text, and of conversations every message."""
    rows = sum(split.num_rows for split in splits)
    for row in datasets.utils.tqdm(itertools.chain(*splits), "reading for the tokenizer", rows, unit=" documents"):
        if "messages" in row:
            yield from (message["content"] for message in row["messages"])
        else:
            yield row["text"] or ""


def _prepare_in(folder: Path, data: DataSection) -> Manifest:
    if data.format == "datatrove":
        tokenizer = build_tokenizer(data.tokenizer, ())
        return write_facts(folder, data, tokenizer, *describe_token_files(data, tokenizer))
    scratch = folder / "scratch"
    scratch.mkdir()
    documents = load_documents(data, scratch)
    splits = dict(zip(("train", "validation"), hold_out(documents, data), strict=True))
    # `char` has to know the characters of both splits; `bpe` learns from the training split alone.
    read = [splits["train"]] if data.tokenizer == "bpe" else splits.values()
    tokenizer = build_tokenizer(data.tokenizer, _texts(read), data.vocab_size, data.bpe_pattern)
    chat = chat_format(tokenizer.hf, data.tokenizer) if data.format == "chat" else None
    # A single document needs no end-of-text token (nor does the cut through it).
    several = documents.validation is not None or len(documents.train) > 1
    end_of_text_id = end_of_text_id_of(tokenizer.hf) if several else None
    facts = {}
    for name, split in splits.items():
        target = scratch / f"{name}.arrow"
        rows = encode_split(split, tokenizer, end_of_text_id, chat, data.num_proc, target)
        facts[name] = save_counted(rows, split.num_rows, folder / name, data)
    shutil.rmtree(scratch)
    return write_facts(folder, data, tokenizer, documents.revision, end_of_text_id, facts)


def save_counted(rows: datasets.Dataset, documents: int, folder: Path, data: DataSection) -> SplitFacts:
    """Write the encoded rows of a split; return its facts. Raises DataError if there is no token."""
    counts = count_rows(rows, documents)
    if not counts.tokens:
        raise DataError(f"data.source: {data.one_source}: too little text: none is left for {folder.name}")
    return save_split(rows.remove_columns("bytes"), counts, folder)


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
