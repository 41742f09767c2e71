"""Batches as a function of (seed, step, rank): no state between steps, so a run can start at any
step and be moved.
"""

import time
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.config.sources import sources_of
from nanogpt_hf.config.stages import stages_of
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.data.mixture import Interleave, as_mixture


class Batches:
    """Blocks of each step, split over micro-batches and data-parallel ranks.

    A step sees the same `blocks_per_step` blocks in the same order however many ranks share it:
    the ranks take turns, each for `turn` micro-batches. In a mixture each source has the order that
    it would have alone. The first step is `first_step`, and `read` blocks of each source were read
    before it. `seconds_waited` adds up how long the host took to make micro-batches.

    `shuffled` takes every block once per epoch, `random` draws them with replacement. `shifted`
    needs blocks that begin at any token: an epoch has blocks that lie end to end, and each epoch
    draws the offset of the first one.
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
        # Blocks that begin at any token lie end to end if their indices are block_size apart.
        self._spacing = blocks.block_size if order == "shifted" else 1
        # Each source keeps the order of its last two epochs, since a step may cross an epoch's end.
        self._orders = [
            lru_cache(2)(partial(epoch_order, seed, length=length, spacing=self._spacing))
            for length in lengths
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
                epochs, places = np.divmod(numbers[rows], epoch_length(length, self._spacing))
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


def epoch_length(length: int, spacing: int) -> int:
    """How many of `length` blocks an epoch has, if their indices are `spacing` apart."""
    return max(1, length // spacing)


def epoch_order(seed: int, epoch: int, length: int, spacing: int = 1) -> np.ndarray:
    """Return the order of `length` blocks in an epoch: a permutation that no version of NumPy
    changes, by sorting raw bits. With a `spacing` it has indices that are so far apart, from an
    offset that the epoch draws.
    """
    # Each block gets 64 random bits, and the blocks are sorted by them: all permutations are
    # equally likely. A stable sort also decides, the same everywhere, about equal numbers.
    bits = np.random.Philox(key=derive_seed(seed, "order", epoch)).random_raw(
        epoch_length(length, spacing)
    )
    offset = np.random.Philox(key=derive_seed(seed, "offsets", epoch)).random_raw()
    return np.argsort(bits, kind="stable") * spacing + int(offset) % min(spacing, length)
