"""Encode documents as rows of token ids and write them as arrow shards, in one pass."""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow

from nanogpt_hf.data.files import file_digest
from nanogpt_hf.data.manifest import SplitFacts

SHARD_BYTES = 500_000_000
_RECORD_TOKENS = 2**20  # in a record batch, or the tokens of one row
_BATCH_DOCUMENTS, _BATCH_CHARACTERS = 1000, 2**20  # encoded at once by a thread


class Rows(NamedTuple):
    """Encoded rows, one after another."""

    ids: np.ndarray
    mask: np.ndarray  # in conversations 1 for each token of an answer; else empty
    lengths: np.ndarray  # each row's, in tokens
    documents: np.ndarray  # the number of the document of each row
    bytes: np.ndarray  # each row's text; in conversations, its answers

    @classmethod
    def of(
        cls, ids: list[Any], documents: list[int], sizes: list[int], masks: list[Any] | None = None
    ) -> "Rows":
        """Rows of the ids of each, arrays of one type."""
        lengths = np.array([len(row) for row in ids], dtype=np.int64)
        kind = ids[0].dtype if ids else np.uint16
        flat = np.concatenate([np.zeros(0, kind), *ids], dtype=kind, casting="unsafe")
        mask = np.concatenate([np.zeros(0, np.uint8), *(masks or ())], dtype=np.uint8)
        return cls(flat, mask, lengths, np.array(documents, np.int64), np.array(sizes, np.int64))

    def select(self, chosen: np.ndarray) -> "Rows":
        """The rows that are True in `chosen`."""
        tokens = np.repeat(chosen, self.lengths)
        mask = self.mask[tokens] if len(self.mask) else self.mask
        rest = (array[chosen] for array in (self.lengths, self.documents, self.bytes))
        return Rows(self.ids[tokens], mask, *rest)


# (documents, number of the first) -> their rows; an empty document has none
Encode = Callable[[list[Any], int], Rows]


def encoded(
    documents: Iterable[Any], encode: Encode, num_threads: int = 1, limit: int | None = None
) -> Iterator[tuple[int, Rows]]:
    """(number of documents so far, rows) of the first documents that have at most `limit` tokens in
    all, in order.

    With one thread the caller's encodes; the libraries that tokenize text do so without Python's
    lock, so that threads are enough.
    """
    tokens = 0
    for count, rows in _encoded(documents, encode, num_threads):
        ends = tokens + np.cumsum(rows.lengths)
        if limit is not None and len(ends) and ends[-1] > limit:
            count = int(rows.documents[np.argmax(ends > limit)])
            yield count, rows.select(rows.documents < count)
            return
        tokens += len(rows.ids)
        yield count, rows


def _encoded(
    documents: Iterable[Any], encode: Encode, num_threads: int
) -> Iterator[tuple[int, Rows]]:
    if num_threads == 1:
        for first, batch in _batches(documents):
            yield first + len(batch), encode(batch, first)
        return
    pending: deque[tuple[int, Future[Rows]]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for first, batch in _batches(documents):
                pending.append((first + len(batch), pool.submit(encode, batch, first)))
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
        size += len(document or "") if isinstance(document, str | None) else 1000
        if len(batch) == _BATCH_DOCUMENTS or size > _BATCH_CHARACTERS:
            yield first, batch
            first, batch, size = first + len(batch), [], 0
    if batch:
        yield first, batch


class Spool:
    """Rows in a scratch file, to write them when the number of their documents is known."""

    def __init__(self, path: Path, rows: Iterable[tuple[int, Rows]]):
        self.documents = self._batches = 0
        self._path = path
        with path.open("wb") as file:
            for self.documents, batch in rows:
                for array in batch:
                    np.save(file, array)
                self._batches += 1

    def __iter__(self) -> Iterator[Rows]:
        with self._path.open("rb") as file:
            for _ in range(self._batches):
                yield Rows(*(np.load(file) for _ in Rows._fields))


class ShardWriter:
    """Write rows as arrow shards that `datasets.load_from_disk` reads; count and hash them."""

    def __init__(self, folder: Path):
        from datasets import Features  # slow to import, and reading does without

        folder.mkdir()
        self._folder, self._features, self._stream = folder, Features(), None
        self._digests = [hashlib.sha256() for _ in range(3)]  # for ids, mask and lengths
        self._pending: list[Rows] = []
        self._shards: dict[str, dict[str, Any]] = {}
        self._documents = self._tokens = self._bytes = self._answers = 0

    def write(self, rows: Rows) -> None:
        """Add rows, whose documents are complete."""
        if not len(rows.lengths):
            return
        if not self._features:
            from datasets import Features, List, Value

            columns = zip(("input_ids", "assistant_mask"), rows, strict=False)
            self._features = Features(
                {name: List(Value(array.dtype.name)) for name, array in columns if len(array)}
            )
        for digest, array in zip(self._digests, rows, strict=False):
            digest.update(np.ascontiguousarray(array, dtype="<u4").data)
        self._documents += len(np.unique(rows.documents))
        self._tokens += len(rows.ids)
        self._bytes += int(rows.bytes.sum())
        self._answers += int(rows.mask.sum(dtype=np.int64))
        self._pending.append(rows)
        if sum(len(pending.ids) for pending in self._pending) >= _RECORD_TOKENS:
            self._write_pending()

    def _write_pending(self) -> None:
        rows = Rows(*map(np.concatenate, zip(*self._pending, strict=True)))
        self._pending = []
        if self._stream is None:
            self._path = self._folder / f"data-{len(self._shards):05}.arrow"
            self._file = pyarrow.OSFile(str(self._path), "wb")
            self._stream = pyarrow.ipc.new_stream(self._file, self._features.arrow_schema)
        # a document of 2^31 tokens is an error: arrow's lists count with 32 bits
        offsets = pyarrow.array(np.concatenate([[0], np.cumsum(rows.lengths)]), pyarrow.int32())
        lists = [
            pyarrow.ListArray.from_arrays(offsets, pyarrow.array(values))
            for values in rows[: len(self._features)]
        ]
        self._stream.write_batch(pyarrow.record_batch(lists, schema=self._features.arrow_schema))
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
