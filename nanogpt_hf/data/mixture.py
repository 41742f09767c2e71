"""Mixtures of sources: in which order their samples are taken, and the blocks of all as one."""

from collections.abc import Sequence
from functools import cache, cached_property

import numpy as np
import torch

from nanogpt_hf.data.blocks import Blocks


class Interleave:
    """Order of a mixture: sources by sample number, in shares given by integer `weights`.

    Greedy, as in Megatron-LM's blended data sets (helpers.cpp), but in integers: sample n goes
    to the source that is furthest behind its share of n + 1 samples. With integer weights that
    order repeats after their sum, so a table of one period gives any sample at once, without
    counting up to it.
    """

    def __init__(self, weights: Sequence[int]):
        self.weights = np.array(weights, dtype=np.int64)
        self.period = sum(weights)
        # Two tables of one period: the source of each sample, and the sample's number within it.
        self._source = np.empty(self.period, dtype=np.int64)
        self._number = np.empty(self.period, dtype=np.int64)
        counts = [0] * len(weights)
        for n in range(self.period):
            # The share of n + 1 samples is weight · (n + 1) / period. All terms are multiplied by
            # the period, so that they are integers.
            behind = [
                weight * (n + 1) - count * self.period
                for weight, count in zip(weights, counts, strict=True)
            ]
            source = behind.index(max(behind))
            self._source[n] = source
            self._number[n] = counts[source]
            counts[source] += 1

    @classmethod
    @cache
    def of(cls, weights: tuple[int, ...]) -> "Interleave":
        """Return the order for `weights`, whose table is made once."""
        return cls(weights)

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each sample number, the source and the number of the sample within that source."""
        # Whole periods before the sample have weights[source] samples of each source.
        periods, places = np.divmod(numbers, self.period)
        sources = self._source[places]
        return sources, periods * self.weights[sources] + self._number[places]

    def counts(self, samples: int) -> np.ndarray:
        """Count how many of the first `samples` samples come from each source."""
        periods, rest = divmod(samples, self.period)
        return periods * self.weights + np.bincount(
            self._source[:rest], minlength=len(self.weights)
        )


class MixedBlocks(Blocks):
    """Blocks of several sources, its `parts`, one after another by index."""

    def __init__(self, parts: Sequence[Blocks], weights: Sequence[int]):
        self.parts = parts
        # Samples of each part in a period of the order of training.
        self.weights = weights
        self.block_size = parts[0].block_size
        self.lengths = [len(part) for part in parts]
        self._ends = np.cumsum(self.lengths)

    def __len__(self) -> int:
        return sum(self.lengths)

    @cached_property
    def interleave(self) -> Interleave:
        """Order of training. Validation, which has none, does not make its table."""
        return Interleave.of(tuple(self.weights))

    def epochs(self, counts: np.ndarray | Sequence[int]) -> list[float]:
        """Return how often each part is read in as many of its samples as `counts` has."""
        return [
            float(count / part.samples_per_epoch)
            for count, part in zip(counts, self.parts, strict=True)
        ]

    def owners(self, indices: np.ndarray) -> np.ndarray:
        """Return the number of the part that has each of the blocks at `indices`."""
        return np.searchsorted(self._ends, indices, side="right")

    def _split(self, indices: np.ndarray) -> list[tuple[Blocks, np.ndarray, np.ndarray]]:
        """(part, rows, its own indices) of each part for the blocks at `indices`."""
        # The number of the part that has each index: (len(indices),).
        owners = self.owners(indices)
        found = []
        # Block i of a part is block (start of the part + i) of the mixture.
        for number, part in enumerate(self.parts):
            rows = np.flatnonzero(owners == number)
            start = self._ends[number] - self.lengths[number]
            found.append((part, rows, indices[rows] - start))
        return found

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the blocks at `indices`, in their order.

        If a source has position_ids, as packed conversations do, the others get positions from 0
        on.
        """
        batches = [(rows, part.batch(own)) for part, rows, own in self._split(indices) if len(rows)]
        # Packed conversations have position_ids, which text has not.
        names = dict.fromkeys(name for _, batch in batches for name in batch)
        positions = torch.arange(self.block_size)
        mixed = {}
        for name in names:
            # (len(indices), block_size)
            tensor = torch.empty(len(indices), self.block_size, dtype=torch.int64)
            for rows, batch in batches:
                tensor[rows] = batch.get(name, positions)
            mixed[name] = tensor
        return mixed

    def num_targets(self, indices: np.ndarray) -> int:
        return sum(part.num_targets(own) for part, _, own in self._split(indices))


def as_mixture(blocks: Blocks) -> MixedBlocks:
    """Return the blocks of one source as a mixture of it alone; a mixture is returned as it is."""
    return blocks if isinstance(blocks, MixedBlocks) else MixedBlocks([blocks], [1])
