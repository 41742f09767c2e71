"""Prepare data: text or conversations -> arrow shards of token ids and a manifest.

The folder is complete or absent, also if several processes prepare it.
"""

import itertools
import logging
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from nanogpt_hf.config.names import MADE_TOKENIZERS
from nanogpt_hf.config.schema import Config, DataSection
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.cpu import allowed_cores
from nanogpt_hf.data.documents import BadRows, Documents, Reading, held_out
from nanogpt_hf.data.formats import Encode, encoded, format_of
from nanogpt_hf.data.hf_tokenizer import save_tokenizer, vocabulary_hash
from nanogpt_hf.data.local_files import local_files
from nanogpt_hf.data.manifest import (
    DECIDING_KNOBS,
    MANIFEST,
    SPLITS,
    Manifest,
    PreparedSource,
    SplitFacts,
    mixed_manifest,
    read_manifest,
    write_manifest,
)
from nanogpt_hf.data.prepared import TOKENIZER, check_fits, open_blocks
from nanogpt_hf.data.shards import Row, ShardWriter
from nanogpt_hf.data.source import check_source, load_documents
from nanogpt_hf.data.tokenizer import Tokenizer, build_tokenizer
from nanogpt_hf.data.unchanged import FilesBefore, changed_while_read
from nanogpt_hf.errors import DataError, one_line
from nanogpt_hf.formatting import shows_bars
from nanogpt_hf.place import dead_link, make_once

logger = logging.getLogger(__name__)
_SECONDS_BETWEEN_LINES = 60  # between two lines of the log


def prepare(config: Config) -> tuple[Manifest, bool]:
    """Prepare `config.data`, each source of a mixture in its own folder.

    Return the manifest and whether anything had to be done. Safe to call from several processes at
    once: one prepares, the others wait for it. An interruption leaves nothing, SIGKILL nothing that
    looks complete.
    Raises DataError if the text cannot be read or the folder contains something else, and Stopped
    at a signal.
    """
    if not is_mixture(config.data):
        return _prepare_source(config.data)
    # The folder of a mixture has a folder for each source, and no manifest.
    if read_manifest(Path(config.data.dir)):
        raise DataError(
            f"{config.data.dir}: holds the prepared data of one source, and the recipe mixes "
            "several; choose another --data.dir"
        )
    sources = []
    is_any_new = False
    for source in sources_of(config.data):
        manifest, is_new = _prepare_source(source.data)
        sources.append(PreparedSource(*source, manifest))
        is_any_new = is_any_new or is_new
    return mixed_manifest(sources), is_any_new


def _prepare_source(data: DataSection) -> tuple[Manifest, bool]:
    if problem := dead_link(Path(data.dir)):
        raise DataError(f"{problem}, or choose another --data.dir")
    # The target of a link: no folder can be renamed over the link itself.
    folder = Path(data.dir).resolve()
    manifest, is_new = make_once(
        folder,
        find=lambda: read_manifest(folder),
        check=lambda: check_source(data, folder),
        write=lambda partial: _prepare_in(partial, data),
        last=MANIFEST,
    )
    # What was just written fits.
    if not is_new:
        check_fits(manifest, data)
    return manifest, is_new


def _prepare_in(folder: Path, data: DataSection) -> Manifest:
    form = format_of(data)
    # The library `tokenizers` reads this variable when it starts its threads.
    if data.num_threads:
        os.environ.setdefault("RAYON_NUM_THREADS", str(data.num_threads))
    # Tokens that are made already stay where they are: the folder gets their counts.
    if form.describe is not None:
        tokenizer = build_tokenizer(data.tokenizer, ())
        before = FilesBefore(data.one_source, local_files(data))
        with before.unchanged():
            end_of_text_id, facts = form.describe(data, tokenizer)
        state = before.state
        return write_facts(folder, data, tokenizer, before.revision, state, end_of_text_id, facts)
    scratch = folder / "scratch"
    scratch.mkdir()
    source = load_documents(data, scratch)
    # Not where the documents are read: with a limit they are not read to their end.
    with source.unchanged():
        tokenizer, end_of_text_id, facts, left_out = _write_documents(folder, data, source)
    shutil.rmtree(scratch)
    revision = source.revision
    state = source.file_state
    return write_facts(folder, data, tokenizer, revision, state, end_of_text_id, facts, left_out)


def _write_documents(
    folder: Path, data: DataSection, source: Documents
) -> tuple[Tokenizer, int | None, dict[str, SplitFacts], int]:
    """Write both splits. Return the tokenizer, the id of the token that ends each document, the
    facts of the splits, and the number of rows that were left out.
    """
    form = format_of(data)
    assert form.texts is not None
    assert form.encoder is not None
    # 1. Read. A tokenizer that is made from the documents reads them before they are encoded.
    is_made = data.tokenizer in MADE_TOKENIZERS
    is_trained = data.tokenizer == "bpe"
    train = Reading(source.train, form.texts if is_made else None)
    documents = replace(source, train=train)
    # 2. Choose what is held out. With streaming or a limit the documents are counted when they are
    # encoded, and so they are if nothing needs the choice before.
    # `held` is (documents,) of bool: whether each document is held out. None: not chosen yet.
    held = None
    several = True
    left_out = 0
    if documents.validation is None and not data.streaming and data.max_tokens is None:
        # Two documents tell whether there are several; a single one is cut.
        first = train.first(2)
        if not first:
            documents.bad_rows["train"].left_out(0)
            raise DataError(f"data.source: {data.one_source}: empty; there is no text to train on")
        if len(first) == 1 and form.cut is not None:
            several = False
            left_out = documents.bad_rows["train"].left_out(1)
            parts = form.cut(first[0], data.validation_fraction)
            documents = Documents(lambda: parts[:1], lambda: parts[1:], documents.revision)
        elif documents.count or is_trained:
            # `bpe` learns from the training split alone, so the documents are counted first. Else
            # they are counted when they are encoded.
            count = documents.count or sum(1 for _ in _bar(documents.train(), "counting"))
            held = held_out(count, data, documents.noun)
    # 3. Make or load the tokenizer.
    texts = _texts(documents, held, is_trained, form.texts)
    tokenizer = build_tokenizer(data.tokenizer, texts, data.vocab_size, data.bpe_pattern)
    # A single document needs no end-of-text token (nor does the cut through it).
    end_of_text_id = tokenizer.end_of_text_id if several else None
    # 4. Encode, and write the shards of both splits.
    encode = form.encoder(tokenizer, end_of_text_id)
    facts, more = _write_splits(folder, data, documents, held, encode)
    return tokenizer, end_of_text_id, facts, left_out + more


class Spool:
    """Rows in a scratch file, to write them when the number of their documents is known.

    It is a tempfile.TemporaryFile, which no other user can open: pickle runs code of its input.
    """

    def __init__(self, file: IO[bytes], rows: Iterable[tuple[int, list[Row]]]):
        self.documents = self._batches = 0
        self._file = file
        for self.documents, batch in rows:
            pickle.dump(batch, file)
            self._batches += 1

    def __iter__(self) -> Iterator[list[Row]]:
        self._file.seek(0)
        for _ in range(self._batches):
            yield pickle.load(self._file)


def _texts(
    documents: Documents,
    held: np.ndarray | None,
    is_trained: bool,
    texts_of: Callable[[Any], Iterable[str]],
) -> Iterator[str]:
    """Every text of the documents that the tokenizer is made from."""
    chosen = documents.train()
    # `char` has to know the characters of both splits; `bpe` learns from the training split alone.
    if held is not None and is_trained:
        chosen = itertools.compress(chosen, ~held)
    elif documents.validation is not None and not is_trained:
        chosen = itertools.chain(chosen, documents.validation())
    for document in chosen:
        yield from texts_of(document)


def _bar(documents: Iterable[Any], what: str, total: int | None = None) -> Any:
    return tqdm(documents, what, total, unit=" documents", disable=not shows_bars())


def _write_splits(
    folder: Path, data: DataSection, documents: Documents, held: np.ndarray | None, encode: Encode
) -> tuple[dict[str, SplitFacts], int]:
    """Write both splits. Return their facts, and the number of rows that were left out."""
    in_threads = format_of(data).in_threads
    threads = (data.num_threads or allowed_cores()) if in_threads else 1
    # Rows of both splits.
    left_out = 0

    def encoded_split(split: str) -> Iterator[tuple[int, list[Row]]]:
        nonlocal left_out
        logged = time.monotonic()
        count = 0
        bar = _bar(getattr(documents, split)(), "tokenizing", documents.count)
        bad = documents.bad_rows[split]
        # Threads would find the documents that cannot be encoded in any order.
        in_order = encode if in_threads else _without_bad_rows(encode, bad)
        for count, rows in encoded(bar, in_order, threads, data.max_tokens):
            if time.monotonic() > logged + _SECONDS_BETWEEN_LINES:
                logged = time.monotonic()
                logger.info(f"{data.dir}: {count:,} documents tokenized")
            yield count, rows
        left_out += bad.left_out(count)

    writers = {split: ShardWriter(folder / split) for split in SPLITS}
    if documents.validation is not None:
        for split, writer in writers.items():
            for _, rows in encoded_split(split):
                writer.write(rows)
    else:
        # In the folder of the data: it is on the disk that has room for it.
        with tempfile.TemporaryFile(dir=folder) as file:
            batches = (rows for _, rows in encoded_split("train"))
            if held is None:
                # The number of documents is known when all are encoded.
                batches = Spool(file, encoded_split("train"))
                held = held_out(batches.documents, data, documents.noun)
            # All rows of a document go to the same split.
            for rows in batches:
                if rows and rows[-1].document >= len(held):
                    raise changed_while_read(data.one_source)
                writers["train"].write([row for row in rows if not held[row.document]])
                writers["validation"].write([row for row in rows if held[row.document]])
    facts = {split: writer.close() for split, writer in writers.items()}
    for split, of_split in facts.items():
        if not of_split.tokens:
            raise DataError(
                f"data.source: {data.one_source}: too little text: none is left for {split}"
            )
    return facts, left_out


def _without_bad_rows(encode: Encode, bad: BadRows) -> Encode:
    """An encoder that leaves out the documents that it cannot encode, if it may."""

    def encode_others(documents: list[Any], first: int) -> list[Row]:
        # Almost always all can be encoded at once, which is faster. Else one by one, to find those
        # that cannot.
        try:
            return encode(documents, first)
        except (DataError, UnicodeError):
            rows = []
        for number, document in enumerate(documents, first):
            try:
                rows += encode([document], number)
            except DataError as error:
                bad.add_document(number, str(error))
            # Half of a pair of surrogates, which JSON can write and UTF-8 has no bytes for.
            except UnicodeError as error:
                bad.add_document(number, f"holds a character that is no text: {one_line(error)}")
        return rows

    return encode_others


def write_facts(
    folder: Path,
    data: DataSection,
    tokenizer: Tokenizer,
    revision: str,
    state: str | None,
    end_of_text_id: int | None,
    facts: dict[str, SplitFacts],
    left_out: int = 0,
) -> Manifest:
    """Write tokenizer and manifest, the end of every preparation; return the manifest.

    `state` is the `file_state` of local files before they were read.
    """
    save_tokenizer(tokenizer.hf, folder / TOKENIZER)
    form = format_of(data)
    manifest = Manifest(
        recipe={knob: getattr(data, knob) for knob in DECIDING_KNOBS},
        revision=revision,
        file_state=state,
        tokenizer_hash=vocabulary_hash(tokenizer.hf),
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=end_of_text_id,
        train=facts["train"],
        validation=facts["validation"],
        start_of_text_id=tokenizer.start_of_text_id if form.starts_documents else None,
        left_out=left_out,
    )
    # A text that is too short for a block is refused before the folder is complete.
    open_blocks(folder, manifest, data)
    write_manifest(folder, manifest)
    return manifest
