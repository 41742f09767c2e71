"""Blocks of whole examples: conversations, several packed into each block or one with padding; and
documents.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.blocks import Blocks, TokenStream, open_tokens, read_column
from nanogpt_hf.data.manifest import Manifest


class ExampleBlocks(Blocks):
    """Blocks of whole examples: stretches of a token stream, one or several in each block.

    An example of n tokens takes n - 1 positions: its last token is only predicted. `blocks` has the
    numbers of the examples in each block. If examples are `apart`, they do not attend to each
    other.
    """

    def __init__(
        self,
        stream: TokenStream,
        starts: np.ndarray,
        positions: np.ndarray,
        *,
        block_size: int,
        apart: bool,
    ):
        self.stream = stream
        self.block_size = block_size
        self.apart = apart
        # For each example its first token in the stream, and the positions that it takes.
        self._starts = starts
        self._positions = positions
        # A subclass fills the blocks. It counts the positions that hold a token of an example, and
        # the examples that are cut or left out.
        self.blocks: list[list[int]] = []
        self.filled = 0
        self.cut = 0
        self.skipped = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def documents_of(self, block: int) -> list[int]:
        """Return the numbers of the documents or conversations in a block."""
        return self.blocks[block]

    def _tokens_of(self, number: int) -> np.ndarray:
        """Return the tokens of an example that fit into a block: one more than its positions."""
        start = self._starts[number : number + 1]
        return self.stream.windows(start, int(self._positions[number]) + 1)[0]

    def _is_target(self, number: int) -> np.ndarray:
        """Return whether each of these tokens after the first is a target: bool (positions,)."""
        return np.ones(int(self._positions[number]), dtype=bool)

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the blocks at `indices` as keyword arguments of `forward`, int64 (len(indices),
        block_size).

        shift_labels is -100 if the next token is no target. If examples are `apart`, position_ids
        restart at 0 with each example; transformers infers from that which tokens attend to each
        other.
        """
        block_size = self.block_size
        inputs = np.zeros((len(indices), block_size), dtype=np.int64)
        targets = np.full_like(inputs, -100)
        positions = np.zeros_like(inputs)
        for row, block in enumerate(indices.tolist()):
            # Positions of the row that are taken.
            filled = 0
            for number in self.blocks[block]:
                tokens = self._tokens_of(number)
                is_target = self._is_target(number)
                place = slice(filled, filled := filled + len(is_target))
                inputs[row, place] = tokens[:-1]
                targets[row, place] = np.where(is_target, tokens[1:], -100)
                positions[row, place] = np.arange(len(is_target))
            # Padding is an example of its own, so that no other one attends to it.
            positions[row, filled:] = np.arange(block_size - filled)
        batch = {"input_ids": inputs, "shift_labels": targets}
        if self.apart:
            batch["position_ids"] = positions
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def num_targets(self, indices: np.ndarray) -> int:
        """Count the targets in the blocks at `indices`."""
        numbers = (number for block in indices.tolist() for number in self.blocks[block])
        return sum(int(self._is_target(number).sum()) for number in numbers)


class Examples(ExampleBlocks):
    """Examples with a mask of what is learned, such as conversations: several per block that do not
    attend to each other (packed), or one (padded).

    One longer than a block is cut at its end, and skipped if nothing of it is learned then. Which
    examples share a block depends only on their lengths, so every epoch has the same blocks, and
    only their order is random.
    """

    def __init__(
        self,
        ids: TokenStream,
        assistant_mask: TokenStream,
        lengths: np.ndarray,
        *,
        block_size: int,
        packing: str,
    ):
        starts = np.cumsum(lengths) - lengths
        positions = np.minimum(lengths - 1, block_size)
        is_packed = packing == "packed"
        super().__init__(ids, starts, positions, block_size=block_size, apart=is_packed)
        self._assistant_mask = assistant_mask
        # Only an example that is cut can lose what is to be learned, so only these are read here.
        long = np.flatnonzero(lengths - 1 > block_size)
        without = [number for number in long.tolist() if not self._is_target(number).any()]
        self.cut = len(long) - len(without)
        self.skipped = len(without)
        chosen = np.setdiff1d(np.arange(len(lengths)), without)
        self.filled = int(positions[chosen].sum())
        if is_packed:
            self.blocks = [chosen[block].tolist() for block in pack(positions[chosen], block_size)]
        else:
            self.blocks = [[number] for number in chosen.tolist()]

    def _is_target(self, number: int) -> np.ndarray:
        start = self._starts[number : number + 1]
        mask = self._assistant_mask.windows(start, int(self._positions[number]) + 1)[0]
        # The mask is about tokens, the targets are the tokens after each position.
        return mask[1:] == 1


def masked_blocks(folder: Path, split: str, manifest: Manifest, data: DataSection) -> Examples:
    """Return the blocks of a format whose encoder gives a mask: whole examples, by data.packing."""
    return Examples(
        open_tokens(folder, split, manifest),
        open_tokens(folder, split, manifest, "assistant_mask"),
        row_lengths(folder / split),
        block_size=data.block_size,
        packing=data.packing,
    )


def pack(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Best-fit decreasing: which of `lengths`, by index, share a block of `size`."""
    # The largest first, each into the block with the least free space that is enough; a new block
    # if there is none. The keys of `with_space` are kept sorted, so that each step is a bisection.
    blocks: list[list[int]] = []
    # Blocks by the number of their free positions, and the numbers that some block has, sorted.
    with_space: dict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            space = size
            block = len(blocks)
            blocks.append([])
        else:
            space = spaces[place]
            block = with_space[space].pop()
            if not with_space[space]:
                del spaces[place]
        blocks[block].append(number)
        space -= length
        if space:
            if not with_space[space]:
                insort(spaces, space)
            with_space[space].append(block)
    return blocks


def row_lengths(folder: Path) -> np.ndarray:
    """Tokens of each row of a split, such as a document with those that begin and end it."""
    # Arrow keeps the offsets of the rows of a list column: no token is read.
    chunks = read_column(folder, "input_ids")
    return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in chunks]).astype(np.int64)


def read_from_end(manifest: Manifest) -> bool:
    """Whether a document is read from the end-of-text token of the document before it.

    That token stands for the beginning of a text, as in prompts, unless the tokenizer has a start
    token.
    """
    return manifest.end_of_text_id is not None and manifest.start_of_text_id is None


def document_starts(lengths: np.ndarray, from_end: bool) -> np.ndarray:
    """Where each document begins to be read."""
    starts = np.cumsum(lengths) - lengths
    # No token is before the first document.
    starts[1:] -= from_end
    return starts


class DocumentBlocks(ExampleBlocks):
    """Rows that begin with a document, filled by best-fit decreasing (Ding et al. 2024,
    arXiv:2404.10830). A document longer than a row is cut into parts, which are packed alike.

    Every token is predicted once per epoch, but for a document's first. Which documents share a
    row depends only on their lengths.
    """

    def __init__(
        self, ids: TokenStream, lengths: np.ndarray, *, block_size: int, from_end: bool, apart: bool
    ):
        starts = document_starts(lengths, from_end)
        # The last token of a document is predicted, and predicts nothing.
        sizes = np.cumsum(lengths) - 1 - starts
        # The number of parts of each document, rounded up.
        parts = -(-sizes // block_size)
        # For each part its document, and the positions of the document before it.
        self._documents = np.repeat(np.arange(len(lengths)), parts)
        before = block_size * (
            np.arange(len(self._documents)) - np.repeat(np.cumsum(parts) - parts, parts)
        )
        positions = np.minimum(sizes[self._documents] - before, block_size)
        starts = starts[self._documents] + before
        super().__init__(ids, starts, positions, block_size=block_size, apart=apart)
        self.blocks = pack(positions, block_size)
        self.filled = int(positions.sum())
        self.cut = int((parts > 1).sum())

    def documents_of(self, block: int) -> list[int]:
        return self._documents[self.blocks[block]].tolist()
