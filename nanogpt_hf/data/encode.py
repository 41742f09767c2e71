"""Encode documents as rows of token ids and write them as arrow shards, in one pass."""

import hashlib
import json
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow

from nanogpt_hf.data.files import file_digest
from nanogpt_hf.data.manifest import Shard, SplitFacts
from nanogpt_hf.errors import DataError

SHARD_BYTES = 500_000_000
_RECORD_TOKENS = 2**20  # in a record batch, or the tokens of one row
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 1000, 2**20  # encoded at once by a thread


class Row(NamedTuple):
    """An encoded document, or conversation or a part of one."""

    document: int  # its number
    ids: np.ndarray
    bytes: int  # of its text; in conversations, of its answers
    mask: np.ndarray | None = None  # in conversations 1 for each token of an answer


# (documents, number of the first) -> their rows; an empty document has none
Encode = Callable[[list[Any], int], list[Row]]


def encoded(
    documents: Iterable[Any], encode: Encode, num_threads: int = 1, limit: int | None = None
) -> Iterator[tuple[int, list[Row]]]:
    """(number of documents so far, rows) of the first documents that have at most `limit` tokens in
    all, in order.

    With one thread the caller's encodes; the libraries that tokenize text do so without Python's
    lock, so that threads are enough.
    """
    tokens = 0
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
            except DataError as error:  # comes after the batches before it, as with one thread
                failed = Future()
                failed.set_exception(error)
                yield 0, failed

        try:
            for batch in submitted():
                pending.append(batch)
                if len(pending) > 2 * num_threads:
                    count, rows = pending.popleft()
                    yield count, rows.result()
            for count, rows in pending:
                yield count, rows.result()
        finally:
            pool.shutdown(cancel_futures=True)  # if it was interrupted


def _batches(documents: Iterable[Any]) -> Iterator[tuple[int, list[Any]]]:
    """(number of the first, documents), of a bounded size."""
    first, batch, size = 0, [], 0
    for document in documents:
        batch.append(document)
        size += len(document or "")
        if len(batch) == _BATCH_DOCUMENTS or size > _BATCH_CHARACTERS:
            yield first, batch
            first, batch, size = first + len(batch), [], 0
    if batch:
        yield first, batch


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


class ShardWriter:
    """Write rows as arrow shards that `datasets.load_from_disk` reads; count and hash them."""

    def __init__(self, folder: Path):
        from datasets import Features  # slow to import, and reading does without

        folder.mkdir()
        self._folder, self._features, self._stream = folder, Features(), None
        self._digests = [hashlib.sha256() for _ in range(3)]  # for ids, mask and lengths
        self._pending: list[Row] = []
        self._shards: dict[str, Shard] = {}
        self._documents = self._tokens = self._bytes = self._answers = self._pending_tokens = 0

    def write(self, rows: list[Row]) -> None:
        """Add rows, whose documents are complete."""
        if rows and not self._features:
            from datasets import Features, List, Value

            columns = {"input_ids": rows[0].ids, "assistant_mask": rows[0].mask}
            self._features = Features(
                {
                    name: List(Value(values.dtype.name))
                    for name, values in columns.items()
                    if values is not None
                }
            )
        for row in rows:
            mask = np.zeros(0) if row.mask is None else row.mask
            for digest, values in zip(self._digests, (row.ids, mask, len(row.ids)), strict=True):
                digest.update(np.ascontiguousarray(values, dtype="<u4").data)
            self._pending_tokens += len(row.ids)
            self._bytes += row.bytes
            self._answers += int(mask.sum())
        self._documents += len({row.document for row in rows})
        self._pending += rows
        if self._pending_tokens >= _RECORD_TOKENS:
            self._write_pending()

    def _write_pending(self) -> None:
        if self._stream is None:
            self._path = self._folder / f"data-{len(self._shards):05}.arrow"
            self._file = pyarrow.OSFile(str(self._path), "wb")
            self._stream = pyarrow.ipc.new_stream(self._file, self._features.arrow_schema)
        columns: dict[str, list[Any]] = {"input_ids": [row.ids for row in self._pending]}
        if len(self._features) > 1:
            columns["assistant_mask"] = [row.mask for row in self._pending]
        schema = self._features.arrow_schema
        self._stream.write_batch(pyarrow.RecordBatch.from_pydict(columns, schema))
        self._tokens += self._pending_tokens
        self._pending, self._pending_tokens = [], 0
        if self._file.tell() >= SHARD_BYTES:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._file.close()
            self._shards[self._path.name] = {"sha256": file_digest([self._path])}
            self._stream = None

    def close(self) -> SplitFacts:
        """Write what is left, and the files that `datasets` keeps beside the shards."""
        from datasets import DatasetInfo

        if self._pending:
            self._write_pending()
        self._end_shard()
        ids, *others = (digest.hexdigest() for digest in self._digests)
        has_mask = len(self._features) > 1
        sha256 = hashlib.sha256("".join([ids, *others]).encode()).hexdigest() if has_mask else ids
        DatasetInfo(features=self._features).write_to_directory(str(self._folder))
        state = dict.fromkeys(("_format_columns", "_format_type", "_split")) | {
            "_data_files": [{"filename": name} for name in self._shards],
            "_fingerprint": sha256[:16],
            "_format_kwargs": {},
            "_output_all_columns": False,
        }
        (self._folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
        answers = self._answers if has_mask else None
        return SplitFacts(
            self._documents, self._tokens, self._bytes, answers, sha256, shards=self._shards
        )
