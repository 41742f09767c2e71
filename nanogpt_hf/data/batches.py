"""Batches as a function of (seed, step, rank): no state between steps, so a run can start at any
step and be moved.
"""

import time
from collections.abc import Iterator, Sequence
from functools import cache, cached_property, lru_cache, partial

import numpy as np
import torch

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.config.sources import sources_of
from nanogpt_hf.config.stages import stages_of
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

        Next to packed conversations text has positions from 0 on.
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


class Batches:
    """Blocks of each step, split over micro-batches and data-parallel ranks.

    A step sees the same `blocks_per_step` blocks in the same order however many ranks share it:
    the ranks take turns, each for `turn` micro-batches. `shuffled` takes every block once per
    epoch, `random` draws them with replacement. In a mixture each source has the order that
    it would have alone. The first step is `first_step`, and `read` blocks of each source were read
    before it. `seconds_waited` adds up how long the host took to make micro-batches.
    """

    def __init__(
        self,
        blocks: Blocks,
        *,
        order: str,
        seed: int,
        micro_batch_size: int,
        accumulation: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        pin_memory: bool = False,
        turn: int = 1,
        first_step: int = 0,
        read: Sequence[int] = (),
    ):
        self.blocks = blocks
        self.order = order
        self.seed = seed
        self.micro_batch_size = micro_batch_size
        self.accumulation = accumulation
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.pin_memory = pin_memory
        self.turn = turn
        self.first_step = first_step
        # The same on all processes, and whatever their number is, if the product is.
        self.blocks_per_step = micro_batch_size * accumulation * dp_size
        self.seconds_waited = 0.0
        # The order is computed for a mixture; one source is a mixture of it alone.
        self._mixture = as_mixture(blocks)
        lengths = self._mixture.lengths
        self._read = np.array(read or [0] * len(lengths), dtype=np.int64)
        # Each source keeps the order of its last two epochs, since a step may cross an epoch's end.
        self._orders = [
            lru_cache(2)(partial(epoch_order, seed, length=length)) for length in lengths
        ]
        # A step asks twice: for its targets, and for its micro-batches.
        self._indices = lru_cache(1)(self._indices_at)

    def indices(self, step: int) -> np.ndarray:
        """Indices of all blocks of a step (0 is the first), in its order: int64, 1-D."""
        return self._indices(step)

    def _indices_at(self, step: int) -> np.ndarray:
        count = self.blocks_per_step
        first = (step - self.first_step) * count
        # The step's samples, numbered from the beginning of the stage: for each its source, and
        # its number within this source.
        sources, numbers = self._mixture.interleave(np.arange(first, first + count))
        numbers = numbers + self._read[sources]
        # Raw bits of a counter-based generator: a function of seed and step, which no version of
        # NumPy changes.
        bits = np.empty(0)
        if self.order == "random":
            bits = np.random.Philox(key=derive_seed(self.seed, "order", step)).random_raw(count)
        indices = np.empty(count, dtype=np.int64)
        # The index of the source's first block in the mixture.
        start = 0
        for source, length in enumerate(self._mixture.lengths):
            rows = np.flatnonzero(sources == source)
            if self.order == "random":
                indices[rows] = start + (bits[rows] % np.uint64(length)).astype(np.int64)
            else:
                # Each epoch has a permutation of its own, and a step may have parts of several.
                epochs, places = np.divmod(numbers[rows], length)
                for epoch in np.unique(epochs):
                    now = epochs == epoch
                    order = self._orders[source](int(epoch))
                    indices[rows[now]] = start + order[places[now]]
            start += length
        return indices

    def epochs(self, step: int) -> list[float]:
        """How often each source was read before `step`."""
        samples = (step - self.first_step) * self.blocks_per_step
        return self._mixture.epochs(self._read + self._mixture.interleave.counts(samples))

    def micro_batch_number(self, index: int) -> int:
        """Return the number within the step of this rank's micro-batch `index`, the same on any
        number of ranks.
        """
        # The step's micro-batches in rounds: `turn` of rank 0, `turn` of rank 1, ...
        turns, place = divmod(index, self.turn)
        return (turns * self.dp_size + self.dp_rank) * self.turn + place

    def num_targets(self, step: int) -> int:
        """Targets in all blocks of a step.

        Every rank knows all blocks, so no communication is needed.
        """
        return self.blocks.num_targets(self.indices(step))

    def micro_batches(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """This rank's micro-batches of a step, as keyword arguments of `forward` (see
        Blocks.batch).

        With `pin_memory` they are in pinned memory, from which a GPU copies while the host
        continues.
        """
        # (micro-batches of all ranks, micro_batch_size)
        rows = self.indices(step).reshape(-1, self.micro_batch_size)
        for index in range(self.accumulation):
            started = time.perf_counter()
            batch = self.blocks.batch(rows[self.micro_batch_number(index)])
            if self.pin_memory:
                batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
            self.seconds_waited += time.perf_counter() - started
            yield batch


def blocks_read(config: Config, step: int) -> list[int]:
    """How many blocks of each source, of the length at `step`, were read before it: the tokens of
    all stages up to there, rounded up.
    """
    # Tokens and not blocks are added up, since stages may have blocks of other lengths.
    tokens = np.zeros(len(sources_of(config.data)), dtype=np.int64)
    size = config.data.block_size
    for stage in stages_of(config):
        # The stages that have begun; the last of them has the length at `step`.
        if stage.first > step:
            break
        size = stage.config.data.block_size
        if steps := min(step, stage.last) - stage.first:
            weights = tuple(source.weight for source in sources_of(stage.config.data))
            samples = steps * (stage.config.train.tokens_per_step // size)
            tokens += Interleave.of(weights).counts(samples) * size
    return (-(-tokens // size)).tolist()


def epoch_order(seed: int, epoch: int, length: int) -> np.ndarray:
    """Return the order of `length` blocks in an epoch: a permutation that no version of NumPy
    changes, by sorting raw bits.
    """
    # Each block gets 64 random bits, and the blocks are sorted by them: all permutations are
    # equally likely. A stable sort also decides, the same everywhere, about equal numbers.
    return np.argsort(
        np.random.Philox(key=derive_seed(seed, "order", epoch)).random_raw(length), kind="stable"
    )
