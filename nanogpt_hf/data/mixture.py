"""Blocks of a mixture of sources."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from nanogpt_hf.data.blocks import Blocks, TokenBlocks
from nanogpt_hf.data.interleave import Interleave


class MixedBlocks:
    """The blocks of several sources, one after another by index; `interleave` gives the order of training."""

    def __init__(self, parts: Sequence[Blocks], weights: list[int]):
        self.parts, self._weights = parts, weights
        self.block_size = parts[0].block_size
        self.lengths = [len(part) for part in parts]
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @cached_property
    def interleave(self) -> Interleave:
        """The order of training; validation, which has none, does not make its table."""
        return Interleave(self._weights)

    def owners(self, indices: np.ndarray) -> np.ndarray:
        """The number of the source that has each of the blocks at `indices`."""
        return np.searchsorted(self._ends, indices, side="right")

    def targets_by_source(self, indices: np.ndarray) -> list[int]:
        """Number of targets of each source in the blocks at `indices`."""
        owners, starts = self.owners(indices), self._ends - self.lengths
        own = (indices[owners == number] - starts[number] for number in range(len(self.parts)))
        return [part.num_targets(some) for part, some in zip(self.parts, own, strict=True)]

    def _split(self, indices: np.ndarray) -> list[tuple[Blocks, np.ndarray, np.ndarray]]:
        """(source, rows, its own indices) for each source that has some of `indices`."""
        owners, starts = self.owners(indices), self._ends - self.lengths
        split = ((number, np.flatnonzero(owners == number)) for number in range(len(self.parts)))
        return [(self.parts[number], rows, indices[rows] - starts[number]) for number, rows in split if len(rows)]

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """The blocks at `indices`, in their order. Next to packed conversations text has positions from 0 on."""
        batches = [(torch.from_numpy(rows), part.batch(own)) for part, rows, own in self._split(indices)]
        names = {name: None for _, batch in batches for name in batch}
        positions = torch.arange(self.block_size)
        mixed = {name: torch.empty(len(indices), self.block_size, dtype=torch.int64) for name in names}
        for rows, batch in batches:
            for name, tensor in mixed.items():
                tensor[rows] = batch.get(name, positions)
        return mixed

    def num_targets(self, indices: np.ndarray) -> int:
        return sum(part.num_targets(own) for part, _, own in self._split(indices))

    def epochs(self, samples: int) -> list[float]:
        """How often each source is read in the first `samples` samples."""
        counts = self.interleave.counts(samples).tolist()
        return [count / samples_per_epoch(part) for count, part in zip(counts, self.parts, strict=True)]


def samples_per_epoch(blocks: Blocks) -> float:
    """How many blocks hold all tokens once; windows at random offsets (stride 1) are more than that."""
    return len(blocks) * blocks.stride / blocks.block_size if isinstance(blocks, TokenBlocks) else len(blocks)
