"""Documents of a text: where each begins in the tokens, and rows that begin with a document."""

from pathlib import Path

import numpy as np

from nanogpt_hf.data.blocks import TokenStream, read_column
from nanogpt_hf.data.examples import Examples, pack
from nanogpt_hf.data.manifest import Manifest


def document_lengths(folder: Path) -> np.ndarray:
    """Tokens of each document of a split, with those that begin and end it."""
    chunks = read_column(folder, "input_ids")
    return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks]).astype(np.int64)


def read_from_end(manifest: Manifest) -> bool:
    """Whether a document is read from the token that ended the one before it.

    It stands for the beginning of a text, as it does for prompts, unless the tokenizer has a token
    of its own for that.
    """
    return manifest.end_of_text_id is not None and manifest.start_of_text_id is None


def document_starts(lengths: np.ndarray, from_end: bool) -> np.ndarray:
    """Where each document begins to be read."""
    starts = np.cumsum(lengths) - lengths
    starts[1:] -= from_end
    return starts


class DocumentBlocks(Examples):
    """Rows that begin with a document, filled by best-fit decreasing (Ding et al. 2024,
    arXiv:2404.10830). A document longer than a row is cut into parts, which are packed alike.

    Every token is predicted once per epoch, but for a document's first. Which documents share a
    row depends only on their lengths.
    """

    def __init__(
        self, ids: TokenStream, lengths: np.ndarray, *, block_size: int, from_end: bool, apart: bool
    ):
        self.block_size, self.packing, self.apart = block_size, "documents", apart
        starts = document_starts(lengths, from_end)
        sizes = np.cumsum(lengths) - 1 - starts  # the last token is only predicted
        parts = -(-sizes // block_size)
        self._documents = np.repeat(np.arange(len(lengths)), parts)
        before = block_size * (
            np.arange(len(self._documents)) - np.repeat(np.cumsum(parts) - parts, parts)
        )
        self._ids, self._starts = ids, starts[self._documents] + before
        self._positions = np.minimum(sizes[self._documents] - before, block_size)
        self.blocks = pack(self._positions, block_size)
        self.filled, self.cut = int(self._positions.sum()), int((parts > 1).sum())

    def _targets_of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        count = int(self._positions[number])
        tokens = self._ids.windows(self._starts[number : number + 1], count + 1)[0]
        return tokens, np.ones(count, dtype=bool)

    def documents_of(self, block: int) -> list[int]:
        return self._documents[self.blocks[block]].tolist()

    def num_targets(self, indices: np.ndarray) -> int:
        """The tokens of the rows at `indices` without padding."""
        return sum(int(self._positions[self.blocks[index]].sum()) for index in indices.tolist())
