"""Blocks of tokens, which batches and evaluations draw from memory-mapped shards."""

import hashlib
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
import pyarrow
import torch

from nanogpt_hf.data.manifest import Manifest
from nanogpt_hf.errors import DamagedFileError, DataError
from nanogpt_hf.own_files import read_json, reading


class _DataFile(TypedDict):
    filename: str


class _DataFiles(TypedDict):
    """The part of state.json that is read; `datasets` keeps the file next to its shards."""

    _data_files: list[_DataFile]


def read_column(folder: Path, name: str) -> list[Any]:
    """Return the arrow chunks of a column of lists in shards, memory-mapped. Raises DataError if it
    cannot be read.
    """
    # Only state.json knows which shards belong to the split, and their order.
    chunks = []
    try:
        for file in read_json(folder / "state.json", _DataFiles)["_data_files"]:
            path = folder / file["filename"]
            with reading(path):
                table = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()
                chunks += table.column(name).chunks
                if not all(isinstance(chunk, pyarrow.ListArray) for chunk in chunks):
                    raise ValueError(f"{name} is no column of lists")
    except DamagedFileError as error:
        raise DataError(
            f"{folder}: cannot be read as prepared tokens: {error}; copy it again, or remove "
            f"{folder.parent} to prepare it again"
        ) from None
    return chunks


class TokenStream:
    """Tokens of all documents, concatenated over any number of arrow chunks and shards."""

    def __init__(self, chunks: list[np.ndarray], vocab_size: int | None = None):
        # An upper bound of the ids. None allows any number, as in a column of a mask.
        self.vocab_size = vocab_size
        self.chunks = [chunk for chunk in chunks if len(chunk)]
        # The number of tokens up to the end of each chunk, to find a token's chunk by bisection.
        self._ends = np.cumsum([len(chunk) for chunk in self.chunks], dtype=np.int64)

    @classmethod
    def open(
        cls, folder: Path, vocab_size: int | None = None, column: str = "input_ids"
    ) -> "TokenStream":
        """A column of a split as `datasets.save_to_disk` wrote it, memory-mapped.

        Raises DataError if it cannot be read.
        """
        chunks = read_column(folder, column)
        # No copy: the arrays are views of the file, whose pages are read when a block needs them.
        return cls([np.from_dlpack(chunk.flatten()) for chunk in chunks], vocab_size)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def sha256(self) -> str:
        """Return the sha256 of the ids as 32-bit numbers: independent of chunks and dtype."""
        digest = hashlib.sha256()
        for chunk in self.chunks:
            digest.update(np.ascontiguousarray(chunk, dtype="<u4").data)
        return digest.hexdigest()

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Return the `length` tokens from each offset in `starts`: int64 (len(starts), length).

        Raises DataError for an id beyond the vocabulary.
        """
        out = np.empty((len(starts), length), dtype=np.int64)
        first_chunks = np.searchsorted(self._ends, starts, side="right")
        for row, start, number in zip(out, starts.tolist(), first_chunks.tolist(), strict=True):
            filled = 0
            offset = start - (int(self._ends[number - 1]) if number else 0)
            # One pass, unless the window runs across the end of a chunk.
            while filled < length:
                piece = self.chunks[number][offset : offset + length - filled]
                row[filled : filled + len(piece)] = piece
                filled += len(piece)
                number += 1
                offset = 0
        if self.vocab_size is not None and out.size and out.max() >= self.vocab_size:
            raise DataError(
                f"the prepared data holds token {out.max()}, beyond its vocabulary of "
                f"{self.vocab_size:,} tokens: it is damaged; remove it to prepare it again"
            )
        return out


def open_tokens(
    folder: Path, split: str, manifest: Manifest, column: str = "input_ids"
) -> TokenStream:
    """Return the tokens of a split of prepared data, or another column, which may hold any number.

    Ids are checked against the vocabulary when they are read, and all bytes by `check_prepared`.
    Raises DataError if the tokens are elsewhere, cannot be read, or are not as many as the
    manifest says, such as shards of another split.
    """
    facts = getattr(manifest, split)
    if facts.shards is None:
        raise DataError(
            f"{folder}: holds no tokens: they are in the .ds files that datatrove wrote"
        )
    # A larger id would be looked up beyond the end of the embedding.
    largest = manifest.vocab_size if column == "input_ids" else None
    stream = TokenStream.open(folder / split, largest, column)
    if len(stream) != facts.tokens:
        raise DataError(
            f"{folder / split}: holds {len(stream):,} tokens in {column}, and manifest.json says "
            f"{facts.tokens:,}; copy it again, or remove {folder} to prepare it again"
        )
    return stream


class Blocks(Protocol):
    """Equally long sequences with their targets, by index. Derive kinds of blocks from it."""

    block_size: int

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the blocks at `indices` as keyword arguments of `forward`.

        input_ids and shift_labels, the token after each (-100 if it is not a target), are int64
        (len(indices), block_size); packed conversations and documents add position_ids.
        """
        ...

    def num_targets(self, indices: np.ndarray) -> int:
        """Count the targets in the blocks at `indices`, without the -100s."""
        ...

    @property
    def samples_per_epoch(self) -> float:
        """How many blocks hold all tokens once."""
        return len(self)


class TokenBlocks(Blocks):
    """Blocks of a token stream; block i starts at token i · stride.

    By default blocks lie end to end and a shorter rest is dropped. With stride 1 a block starts
    at any token. With `partial` the last block may be shorter, so that every token but the first
    is predicted. With `starts`, where documents begin, position_ids restart there, which keeps
    documents apart in attention.
    """

    def __init__(
        self,
        stream: TokenStream,
        block_size: int,
        *,
        stride: int | None = None,
        partial: bool = False,
        starts: np.ndarray | None = None,
    ):
        self.stream = stream
        self.block_size = block_size
        self.starts = starts
        self.stride = stride or block_size
        # A block of n tokens reads n + 1: the last one is a target only. So a stream of N tokens
        # has N - 1 targets, and this many after the first block.
        rest = len(stream) - 1 - block_size
        self._length = max(0, rest // self.stride + 1)
        if partial and len(stream) > 1:
            self._length = 1 + max(0, -(-rest // self.stride))

    def __len__(self) -> int:
        return self._length

    @property
    def samples_per_epoch(self) -> float:
        # Blocks at any offset overlap: there are block_size times as many as disjoint ones.
        return len(self) * self.stride / self.block_size

    def targets_of(self, indices: np.ndarray) -> np.ndarray:
        """Targets in each of the blocks at `indices`: fewer than block_size only at the stream's
        end.
        """
        return np.minimum(self.block_size, len(self.stream) - 1 - indices * self.stride)

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the blocks at `indices`: input_ids, shift_labels; int64 (len(indices),
        block_size).

        Past the stream's end the input is 0 and the target -100.
        """
        counts = self.targets_of(indices)
        inputs = np.zeros((len(indices), self.block_size), dtype=np.int64)
        targets = np.full_like(inputs, -100)
        # All blocks have the same length, but for a last one that ends with the stream.
        for count in np.unique(counts):
            rows = np.flatnonzero(counts == count)
            # (len(rows), count + 1): each token but the last is read, each but the first predicted
            windows = self.stream.windows(indices[rows] * self.stride, count + 1)
            inputs[rows, :count] = windows[:, :-1]
            targets[rows, :count] = windows[:, 1:]
        batch = {"input_ids": inputs, "shift_labels": targets}
        if self.starts is not None:
            # A token's position counts from the beginning of its document, or of the block if the
            # document began before it. transformers infers from it what attends to what.
            places = indices[:, None] * self.stride + np.arange(self.block_size)
            begins = self.starts[np.searchsorted(self.starts, places, side="right") - 1]
            batch["position_ids"] = places - np.maximum(begins, places[:, :1])
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def num_targets(self, indices: np.ndarray) -> int:
        """All tokens of the blocks but those past the stream's end."""
        return int(self.targets_of(indices).sum())
