"""Tokens in memory-mapped shards, and the blocks that batches and evaluations draw from them; those
of several sources, with the order in which a mixture takes them.
"""

import hashlib
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
import pyarrow
import torch

from nanogpt_hf.data.manifest import Manifest
from nanogpt_hf.errors import DamagedFileError, DataError
from nanogpt_hf.own_files import read_json, reading


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The dtype of token ids on the disk."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


class _DataFile(TypedDict):
    filename: str


class _DataFiles(TypedDict):
    """What is read of state.json, which `datasets` keeps beside its shards."""

    _data_files: list[_DataFile]


def read_column(folder: Path, name: str) -> list[Any]:
    """The arrow chunks of a column of lists in shards, memory-mapped. Raises DataError if it cannot
    be read.
    """
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
            f"{folder}: cannot be read as prepared tokens: {error}; prepare the data again"
        ) from None
    return chunks


class TokenStream:
    """The tokens of all documents, concatenated over any number of arrow chunks and shards."""

    def __init__(self, chunks: list[np.ndarray], vocab_size: int | None = None):
        self.vocab_size = vocab_size  # upper bound of the ids; None allows any
        self.chunks = [chunk for chunk in chunks if len(chunk)]
        self._ends = np.cumsum([len(chunk) for chunk in self.chunks], dtype=np.int64)

    @classmethod
    def open(
        cls, folder: Path, vocab_size: int | None = None, column: str = "input_ids"
    ) -> "TokenStream":
        """A column of a split as `datasets.save_to_disk` wrote it, memory-mapped.

        Raises DataError if it cannot be read.
        """
        chunks = read_column(folder, column)
        return cls([np.from_dlpack(chunk.flatten()) for chunk in chunks], vocab_size)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def sha256(self) -> str:
        """The sha256 of the ids as 32-bit numbers: independent of chunks and dtype."""
        digest = hashlib.sha256()
        for chunk in self.chunks:
            digest.update(np.ascontiguousarray(chunk, dtype="<u4").data)
        return digest.hexdigest()

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` tokens from each offset in `starts`: int64 (len(starts), length).

        Raises DataError for an id beyond the vocabulary.
        """
        out = np.empty((len(starts), length), dtype=np.int64)
        first_chunks = np.searchsorted(self._ends, starts, side="right")
        for row, start, number in zip(out, starts.tolist(), first_chunks.tolist(), strict=True):
            filled = 0
            offset = start - (int(self._ends[number - 1]) if number else 0)
            while filled < length:  # once, unless the window runs across a chunk's end
                piece = self.chunks[number][offset : offset + length - filled]
                row[filled : filled + len(piece)] = piece
                filled, number, offset = filled + len(piece), number + 1, 0
        if self.vocab_size is not None and out.size and out.max() >= self.vocab_size:
            raise DataError(
                f"the prepared data holds token {out.max()}, beyond its vocabulary of "
                f"{self.vocab_size:,} tokens: it is damaged; remove it to prepare it again"
            )
        return out


def open_tokens(
    folder: Path, split: str, manifest: Manifest, column: str = "input_ids"
) -> TokenStream:
    """The tokens of a split of prepared data, or another column, which may hold any number.

    Ids are checked against the vocabulary when they are read, and all bytes by `check_prepared`.
    Raises DataError if the tokens are elsewhere, cannot be read, or are not as many as the
    manifest says, such as shards of another split.
    """
    facts = getattr(manifest, split)
    if facts.shards is None:
        raise DataError(
            f"{folder}: holds no tokens: they are in the .ds files that datatrove wrote"
        )
    largest = manifest.vocab_size if column == "input_ids" else None
    stream = TokenStream.open(folder / split, largest, column)
    if len(stream) != facts.tokens:
        raise DataError(
            f"{folder / split}: holds {len(stream):,} tokens in {column}, and manifest.json says "
            f"{facts.tokens:,}; copy it again, or remove {folder} to prepare it again"
        )
    return stream


class Blocks(Protocol):
    """Equally long sequences with their targets, by index. Derive kinds of blocks from it.

    The blocks of a mixture are those of its sources, its `parts`, one after another.
    """

    block_size: int
    weights: Sequence[int] = (1,)  # of the parts

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """The blocks at `indices` as keyword arguments of `forward`.

        input_ids and shift_labels, the token after each (-100 if it is not a target), are int64
        (len(indices), block_size); packed conversations and documents add position_ids.
        """
        ...

    def num_targets(self, indices: np.ndarray) -> int:
        """Number of targets in the blocks at `indices`, those of -100 not counted."""
        ...

    @cached_property
    def parts(self) -> Sequence["Blocks"]:
        return [self]

    @property
    def lengths(self) -> list[int]:
        """The number of blocks of each part."""
        return [len(part) for part in self.parts]

    @property
    def samples_per_epoch(self) -> float:
        """How many blocks hold all tokens once."""
        return len(self)

    @cached_property
    def interleave(self) -> "Interleave":
        """The order of training; validation, which has none, does not make its table."""
        return Interleave.of(tuple(self.weights))

    def epochs(self, counts: np.ndarray | Sequence[int]) -> list[float]:
        """How often each part is read in as many of its samples as `counts` has."""
        return [
            float(count / part.samples_per_epoch)
            for count, part in zip(counts, self.parts, strict=True)
        ]

    def owners(self, indices: np.ndarray) -> np.ndarray:
        """The number of the part that has each of the blocks at `indices`."""
        return np.searchsorted(np.cumsum(self.lengths), indices, side="right")

    def _split(self, indices: np.ndarray) -> list[tuple["Blocks", np.ndarray, np.ndarray]]:
        """(part, rows, its own indices) of each part for the blocks at `indices`."""
        owners, starts = self.owners(indices), np.cumsum([0, *self.lengths[:-1]])
        rows = [np.flatnonzero(owners == number) for number in range(len(self.parts))]
        return [
            (part, own, indices[own] - start)
            for part, own, start in zip(self.parts, rows, starts, strict=True)
        ]


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
        self.stream, self.block_size, self.starts = stream, block_size, starts
        self.stride = stride or block_size
        rest = len(stream) - 1 - block_size  # targets after the first block
        self._length = max(0, rest // self.stride + 1)
        if partial and len(stream) > 1:
            self._length = 1 + max(0, -(-rest // self.stride))

    def __len__(self) -> int:
        return self._length

    @property
    def samples_per_epoch(self) -> float:
        return len(self) * self.stride / self.block_size  # windows at random offsets overlap

    def targets_of(self, indices: np.ndarray) -> np.ndarray:
        """Targets in each of the blocks at `indices`: fewer than block_size only at the stream's
        end.
        """
        return np.minimum(self.block_size, len(self.stream) - 1 - indices * self.stride)

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """The blocks at `indices`: input_ids, shift_labels; int64 (len(indices), block_size).

        Past the stream's end the input is 0 and the target -100.
        """
        counts = self.targets_of(indices)
        inputs = np.zeros((len(indices), self.block_size), dtype=np.int64)
        targets = np.full_like(inputs, -100)
        for count in np.unique(counts):
            rows = np.flatnonzero(counts == count)
            windows = self.stream.windows(indices[rows] * self.stride, count + 1)
            inputs[rows, :count], targets[rows, :count] = windows[:, :-1], windows[:, 1:]
        batch = {"input_ids": inputs, "shift_labels": targets}
        if self.starts is not None:
            places = indices[:, None] * self.stride + np.arange(self.block_size)
            begins = self.starts[np.searchsorted(self.starts, places, side="right") - 1]
            batch["position_ids"] = places - np.maximum(begins, places[:, :1])
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def num_targets(self, indices: np.ndarray) -> int:
        """All tokens of the blocks but those past the stream's end."""
        return int(self.targets_of(indices).sum())


class Interleave:
    """The order of a mixture: sources by sample number, in shares given by integer `weights`.

    Greedy, as in Megatron-LM's blended data sets (helpers.cpp), but in integers: sample n goes
    to the source that is furthest behind its share of n + 1 samples. With integer weights that
    order repeats after their sum, so a table of one period gives any sample at once, without
    counting up to it.
    """

    def __init__(self, weights: Sequence[int]):
        self.weights, self.period = np.array(weights, dtype=np.int64), sum(weights)
        self._source = np.empty(self.period, dtype=np.int64)
        # the sample's number within its source and period
        self._number = np.empty(self.period, dtype=np.int64)
        counts = [0] * len(weights)
        for n in range(self.period):
            behind = [
                weight * (n + 1) - count * self.period
                for weight, count in zip(weights, counts, strict=True)
            ]
            source = behind.index(max(behind))
            self._source[n], self._number[n] = source, counts[source]
            counts[source] += 1

    @classmethod
    @cache
    def of(cls, weights: tuple[int, ...]) -> "Interleave":
        """The order for `weights`, whose table is made once."""
        return cls(weights)

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each sample number, the source and the number of the sample within that source."""
        periods, places = np.divmod(numbers, self.period)
        sources = self._source[places]
        return sources, periods * self.weights[sources] + self._number[places]

    def counts(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples come from each source."""
        periods, rest = divmod(samples, self.period)
        return periods * self.weights + np.bincount(
            self._source[:rest], minlength=len(self.weights)
        )


class MixedBlocks(Blocks):
    """The blocks of several sources, one after another by index; `interleave` gives the order of
    training.
    """

    def __init__(self, parts: Sequence[Blocks], weights: Sequence[int]):
        self.parts, self.weights = parts, weights
        self.block_size = parts[0].block_size

    def __len__(self) -> int:
        return sum(self.lengths)

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """The blocks at `indices`, in their order.

        Next to packed conversations text has positions from 0 on.
        """
        batches = [(rows, part.batch(own)) for part, rows, own in self._split(indices) if len(rows)]
        positions = torch.arange(self.block_size)
        mixed = {
            name: torch.empty(len(indices), self.block_size, dtype=torch.int64)
            for _, batch in batches
            for name in batch
        }
        for rows, batch in batches:
            for name, tensor in mixed.items():
                tensor[rows] = batch.get(name, positions)
        return mixed

    def num_targets(self, indices: np.ndarray) -> int:
        return sum(part.num_targets(own) for part, _, own in self._split(indices))
