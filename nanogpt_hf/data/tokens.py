"""TokenStream: memory-mapped arrow shards as one flat array of tokens, without a copy."""

import hashlib
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from nanogpt_hf.errors import DataError


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The dtype of token ids on the disk."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def read_column(folder: Path, name: str, older_name: str | None = None) -> list[Any]:
    """The arrow chunks of a column that `datasets.save_to_disk` wrote, memory-mapped. Raises DataError without one.

    `older_name` is what older versions called it.
    """
    try:
        split = datasets.Dataset.load_from_disk(str(folder))
        return split.data.column(older_name if older_name in split.column_names else name).chunks
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder}: cannot be read as prepared tokens: {error}; prepare the data again") from None


class TokenStream:
    """The tokens of all documents, concatenated over any number of arrow chunks and shards."""

    def __init__(self, chunks: list[np.ndarray], vocab_size: int | None = None):
        self.vocab_size = vocab_size  # upper bound of the ids; None allows any
        self.chunks = [chunk for chunk in chunks if len(chunk)]
        self._ends = np.cumsum([len(chunk) for chunk in self.chunks], dtype=np.int64)

    @classmethod
    def open(cls, folder: Path, vocab_size: int | None = None) -> "TokenStream":
        """A split as `datasets.save_to_disk` wrote it, memory-mapped. Raises DataError if it cannot be read."""
        chunks = read_column(folder, "input_ids")
        try:
            return cls([chunk.flatten().to_numpy(zero_copy_only=True) for chunk in chunks], vocab_size)
        except (ValueError, AttributeError) as error:  # a column of something else
            raise DataError(f"{folder}: cannot be read as prepared tokens: {error}; prepare the data again") from None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def sha256(self) -> str:
        """The sha256 of the ids as 32-bit numbers: independent of chunks and dtype."""
        digest = hashlib.sha256()
        for chunk in self.chunks:
            digest.update(np.ascontiguousarray(chunk, dtype="<u4").data)
        return digest.hexdigest()

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` tokens from each offset in `starts`, as int64 of shape (len(starts), length).

        Raises IndexError if a window leaves the stream, DataError for an id beyond the vocabulary.
        """
        if len(starts) and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(f"a window of {length} from {starts.max()} leaves the stream of {len(self)} tokens")
        out = np.empty((len(starts), length), dtype=np.int64)
        first_chunks = np.searchsorted(self._ends, starts, side="right")
        for row, start, number in zip(out, starts.tolist(), first_chunks.tolist(), strict=True):
            filled = 0
            offset = start - (int(self._ends[number - 1]) if number else 0)
            while filled < length:  # once, unless the window runs across a chunk's end
                piece = self.chunks[number][offset : offset + length - filled]
                row[filled : filled + len(piece)] = piece
                filled, number, offset = filled + len(piece), number + 1, 0
        self._check_ids(out)
        return out

    def check_vocabulary(self) -> None:
        """Raises DataError for an id beyond the vocabulary. Reads all of them."""
        for chunk in self.chunks:
            self._check_ids(chunk)

    def _check_ids(self, ids: np.ndarray) -> None:
        if self.vocab_size is not None and ids.size and (largest := ids.max()) >= self.vocab_size:
            raise DataError(
                f"the prepared data holds token {largest}, beyond its vocabulary of {self.vocab_size:,} tokens: it is "
                "damaged; remove it to prepare it again"
            )
