"""Code of a data format: how its source is read, encoded and opened as blocks.

config/formats.py has a row of facts for each format, and names the file whose FORMAT is its code.
"""

import importlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nanogpt_hf.config.formats import FORMATS
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.data.manifest import Manifest, SplitFacts
from nanogpt_hf.data.shards import Row
from nanogpt_hf.data.tokenizer import Tokenizer
from nanogpt_hf.errors import DataError

# A thread encodes at most this number of documents at once, and about this number of characters.
# Larger batches would let one thread work while the others are done.
_BATCH_DOCUMENTS = 1000
_BATCH_CHARACTERS = 2**20


# (documents, number of the first) -> their rows; an empty document has none
Encode = Callable[[list[Any], int], list[Row]]


@dataclass(frozen=True)
class Format:
    """Code of a value of `data.format`.

    A format whose source holds text has `document`, `texts` and `encoder`; one whose source holds
    tokens has `describe`.
    """

    endings: tuple[str, ...]  # the files of a folder that are read
    # The blocks of a split. The arguments are the prepared folder, the split and its manifest.
    blocks: Callable[[Path, str, Manifest, DataSection], Blocks]
    # Reads a row, or a whole file of plain text. Raises ValueError if it is no document. A false
    # document, such as "" and None, is an empty row of a Hub data set.
    document: Callable[[Any, DataSection], Any] | None = None
    # All texts of a document: what a tokenizer that is made from the data has to know.
    texts: Callable[[Any], Iterable[str]] | None = None
    # Makes the encoder, from the tokenizer and the id that ends each document, None if there is
    # one document.
    encoder: Callable[[Tokenizer, int | None], Encode] | None = None
    reads_plain_text: bool = False  # whether it reads files that have no rows, such as .txt
    # Whether several threads may encode at once. Then a document that cannot be encoded ends the
    # preparation; else it is a bad row, which data.max_bad_rows may leave out.
    in_threads: bool = False
    # Whether the encoder puts the tokenizer's start-of-text token before each document.
    starts_documents: bool = False
    # Cuts the only document of a source into its train and its validation part, by the fraction
    # of the latter. None: a source needs two documents.
    cut: Callable[[Any, float], tuple[Any, Any]] | None = None
    # The token that ends an answer, which ends a generated text, too. Raises DataError if it is
    # not certain.
    end_of_turn: Callable[[PreTrainedTokenizerBase], int | None] = lambda hf: None
    # The id that ends each document, None without one, and the facts of both splits.
    describe: (
        Callable[[DataSection, Tokenizer], tuple[int | None, dict[str, SplitFacts]]] | None
    ) = None


def format_of(data: DataSection) -> Format:
    """Return the code of the recipe's format."""
    return importlib.import_module(f"nanogpt_hf.data.{FORMATS[data.format].code}").FORMAT


def encoded(
    documents: Iterable[Any], encode: Encode, num_threads: int = 1, limit: int | None = None
) -> Iterator[tuple[int, list[Row]]]:
    """(number of documents so far, rows) of the first documents that have at most `limit` tokens in
    all, in order.

    With one thread the caller's encodes; the libraries that tokenize text do so without Python's
    lock, so that threads are enough.
    """
    tokens = 0
    # Rows are counted one by one: which documents are within the limit must not depend on how they
    # were batched for the threads.
    for count, rows in _encoded(documents, encode, num_threads):
        for row in rows:
            tokens += len(row.ids)
            if limit is not None and tokens > limit:
                yield row.document, [kept for kept in rows if kept.document < row.document]
                return
        yield count, rows


def _encoded(
    documents: Iterable[Any], encode: Encode, num_threads: int
) -> Iterator[tuple[int, list[Row]]]:
    if num_threads == 1:
        for first, batch in _batches(documents):
            yield first + len(batch), encode(batch, first)
        return
    pending: deque[tuple[int, Future[list[Row]]]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:

        def submitted() -> Iterator[tuple[int, Future[list[Row]]]]:
            try:
                for first, batch in _batches(documents):
                    yield first + len(batch), pool.submit(encode, batch, first)
            except DataError as error:
                # A row that cannot be read. Its error takes its turn behind the batches before it,
                # as with one thread: which error a user sees does not depend on their number.
                failed = Future()
                failed.set_exception(error)
                yield 0, failed

        try:
            # Two batches per thread are read ahead: enough that no thread waits for the reader, and
            # few enough that memory is bounded.
            for batch in submitted():
                pending.append(batch)
                if len(pending) > 2 * num_threads:
                    count, rows = pending.popleft()
                    yield count, rows.result()
            for count, rows in pending:
                yield count, rows.result()
        finally:
            # After an interruption the batches that wait are not encoded any more.
            pool.shutdown(cancel_futures=True)


def _batches(documents: Iterable[Any]) -> Iterator[tuple[int, list[Any]]]:
    """(number of the first, documents), of a bounded size."""
    first = 0
    batch = []
    # Characters of texts. Other documents count by their number alone.
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document or "")
        if len(batch) == _BATCH_DOCUMENTS or size > _BATCH_CHARACTERS:
            yield first, batch
            first += len(batch)
            batch = []
            size = 0
    if batch:
        yield first, batch
