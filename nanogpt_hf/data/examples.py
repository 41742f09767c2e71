"""Blocks of conversations: several examples packed into each block, or one with padding."""

from bisect import bisect_left, insort
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from nanogpt_hf.data.blocks import Blocks, TokenStream, read_column


class Examples(Blocks):
    """Examples in blocks: several per block that do not attend to each other (packed), or one
    (padded).

    An example of n tokens takes n - 1 positions: its last token is only predicted. One longer
    than a block is cut at its end, and skipped if it has no answer then. Which examples share a
    block depends only on their lengths, so every epoch has the same blocks, and only their order
    is random.
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
        self.block_size, self.packing, self.apart = block_size, packing, packing == "packed"
        self._ids, self._assistant_mask = ids, assistant_mask
        self._starts = np.cumsum(lengths) - lengths
        self._positions = np.minimum(lengths - 1, block_size)
        long = np.flatnonzero(lengths - 1 > block_size)
        without = [number for number in long.tolist() if not self._targets_of(number)[1].any()]
        self.cut, self.skipped = len(long) - len(without), len(without)
        chosen = np.setdiff1d(np.arange(len(lengths)), without)
        if packing == "packed":
            self.blocks = [
                chosen[block].tolist() for block in pack(self._positions[chosen], block_size)
            ]
        else:
            self.blocks = [[number] for number in chosen.tolist()]
        # positions that hold a token of an example
        self.filled = int(self._positions[chosen].sum())

    @classmethod
    def open(
        cls, folder: Path, *, block_size: int, packing: str, vocab_size: int | None = None
    ) -> "Examples":
        """A split as `datasets.save_to_disk` wrote it, memory-mapped.

        Raises DataError if it cannot be read.
        """
        lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in read_column(folder, "input_ids")]
        return cls(
            TokenStream.open(folder, vocab_size),
            TokenStream.open(folder, column="assistant_mask"),
            np.concatenate(lengths).astype(np.int64),
            block_size=block_size,
            packing=packing,
        )

    def __len__(self) -> int:
        return len(self.blocks)

    def _targets_of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of an example that fit into a block, and whether each after the first is a
        target.
        """
        start, length = self._starts[number : number + 1], int(self._positions[number]) + 1
        return self._ids.windows(start, length)[0], self._assistant_mask.windows(start, length)[
            0, 1:
        ] == 1

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """The blocks at `indices` as keyword arguments of `forward`, int64 (len(indices),
        block_size).

        shift_labels is -100 if the next token is not part of an answer. If examples are `apart`,
        position_ids restart at 0 with each example; transformers infers from that which tokens
        attend to each other.
        """
        block_size = self.block_size
        inputs = np.zeros((len(indices), block_size), dtype=np.int64)
        targets = np.full_like(inputs, -100)
        positions = np.zeros_like(inputs)
        for row, block in enumerate(indices.tolist()):
            filled = 0
            for number in self.blocks[block]:
                tokens, is_target = self._targets_of(number)
                place = slice(filled, filled := filled + len(is_target))
                inputs[row, place] = tokens[:-1]
                targets[row, place] = np.where(is_target, tokens[1:], -100)
                positions[row, place] = np.arange(len(is_target))
            positions[row, filled:] = np.arange(block_size - filled)
        batch = {"input_ids": inputs, "shift_labels": targets}
        if self.apart:
            batch["position_ids"] = positions
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def documents_of(self, block: int) -> list[int]:
        """The numbers of the conversations in a block."""
        return self.blocks[block]

    def num_targets(self, indices: np.ndarray) -> int:
        """The tokens of answers in the blocks at `indices`."""
        numbers = (number for block in indices.tolist() for number in self.blocks[block])
        return sum(int(self._targets_of(number)[1].sum()) for number in numbers)


def pack(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Best-fit decreasing: which of `lengths`, by index, share a block of `size`."""
    blocks: list[list[int]] = []
    with_space: dict[int, list[int]] = defaultdict(list)  # free positions -> blocks
    spaces: list[int] = []  # the keys of those that are not empty, sorted
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            space, block = size, len(blocks)
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
