"""Write rows of token ids as arrow shards, counted and hashed."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow

from nanogpt_hf.data.manifest import Shard, SplitFacts, file_digest
from nanogpt_hf.errors import DataError

# The size at which a shard ends.
SHARD_BYTES = 500_000_000
# A record batch has at least this number of tokens: its header costs little then, and the memory
# that the writer needs is bounded.
_RECORD_TOKENS = 2**20
# A record batch counts its tokens in 31 bits. What is left is for the documents beside the longest.
_LONGEST_DOCUMENT = 2**31 - 2**23


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the dtype of token ids on the disk."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


class Row(NamedTuple):
    """An encoded document, or a part of one: a conversation may become several rows."""

    document: int  # the number of the document
    ids: np.ndarray
    # The bytes of the text whose tokens are learned: the unit of bits per byte.
    bytes: int
    # 1 for each token that is learned, and 0 for the others. None: all are learned.
    mask: np.ndarray | None = None


class ShardWriter:
    """Write rows as arrow shards that `datasets.load_from_disk` reads; count and hash them."""

    def __init__(self, folder: Path):
        # datasets is slow to import, and reading does without it.
        from datasets import Features

        folder.mkdir()
        self._folder = folder
        # The columns are known when the first row is written.
        self._features = Features()
        # The open shard.
        self._stream = None
        # Digests of ids, mask and lengths: the content, whatever shards it is in.
        self._digests = [hashlib.sha256() for _ in range(3)]
        # Rows of the next record batch.
        self._pending: list[Row] = []
        self._pending_tokens = 0
        self._shards: dict[str, Shard] = {}
        self._documents = 0
        self._tokens = 0
        self._bytes = 0
        self._learned = 0

    def write(self, rows: list[Row]) -> None:
        """Add rows, whose documents are complete. Raises DataError if these are too long."""
        for row in rows:
            if len(row.ids) > _LONGEST_DOCUMENT:
                raise DataError(
                    f"document {row.document + 1:,} has {len(row.ids):,} tokens, and a document "
                    f"may have {_LONGEST_DOCUMENT:,}; divide it into several files"
                )
        if rows and not self._features:
            from datasets import Features, List, Value

            # The mask is called what transformers calls it in conversations.
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
            # As 32-bit numbers, so that the digest does not depend on the dtype of the shards.
            for digest, values in zip(self._digests, (row.ids, mask, len(row.ids)), strict=True):
                digest.update(np.ascontiguousarray(values, dtype="<u4").data)
            self._pending_tokens += len(row.ids)
            self._bytes += row.bytes
            self._learned += int(mask.sum())
        self._documents += len({row.document for row in rows})
        self._pending += rows
        # A document is never in two record batches: its rows come in one call.
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
        self._pending = []
        self._pending_tokens = 0
        if self._file.tell() >= SHARD_BYTES:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._file.close()
            self._shards[self._path.name] = {"sha256": file_digest([self._path])}
            self._stream = None

    def close(self) -> SplitFacts:
        """Write what is left, and the files that `datasets` keeps next to the shards."""
        from datasets import DatasetInfo

        if self._pending:
            self._write_pending()
        self._end_shard()
        ids, *others = (digest.hexdigest() for digest in self._digests)
        has_mask = len(self._features) > 1
        sha256 = hashlib.sha256("".join([ids, *others]).encode()).hexdigest() if has_mask else ids
        DatasetInfo(features=self._features).write_to_directory(str(self._folder))
        # What `datasets.load_from_disk` expects: the names of the shards, and no format.
        state = dict.fromkeys(("_format_columns", "_format_type", "_split")) | {
            "_data_files": [{"filename": name} for name in self._shards],
            "_fingerprint": sha256[:16],
            "_format_kwargs": {},
            "_output_all_columns": False,
        }
        (self._folder / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
        return SplitFacts(
            documents=self._documents,
            tokens=self._tokens,
            bytes=self._bytes,
            assistant_tokens=self._learned if has_mask else None,
            sha256=sha256,
            shards=self._shards,
        )
