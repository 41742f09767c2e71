"""(seed, step, rank) -> batch. Nothing is remembered between steps, so a run can start anywhere and be moved."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch

from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.data.examples import Examples
from nanogpt_hf.data.tokens import TokenStream


class Batches:
    """Which tokens each step sees, split over micro-batches and processes.

    A step sees the same `sequences_per_step` windows in the same order however many processes share it: micro-batch i
    of process r is number i · num_processes + r of the step.
    """

    def __init__(
        self,
        tokens: TokenStream | Examples,
        *,
        block_size: int,
        order: str,
        seed: int,
        micro_batch_size: int,
        accumulation: int,
        rank: int = 0,
        num_processes: int = 1,
        pin_memory: bool = False,
    ):
        self.tokens, self.block_size, self.order, self.seed = tokens, block_size, order, seed
        self.micro_batch_size, self.accumulation = micro_batch_size, accumulation
        self.rank, self.num_processes, self.pin_memory = rank, num_processes, pin_memory
        self.sequences_per_step = micro_batch_size * accumulation * num_processes
        self.blocks_per_epoch = tokens.positions // block_size
        self._epoch_order = lru_cache(maxsize=2)(self._draw_epoch_order)  # two: a step may cross an epoch's end
        self.starts = lru_cache(maxsize=1)(self._draw_starts)  # asked for twice a step: to count, and to draw

    def _draw_epoch_order(self, epoch: int) -> np.ndarray:
        # Sorting raw bits gives a permutation that no version of NumPy changes.
        bits = np.random.Philox(key=derive_seed(self.seed, "order", epoch)).random_raw(self.blocks_per_epoch)
        return np.argsort(bits, kind="stable")

    def _draw_starts(self, step: int) -> np.ndarray:
        """Offsets of all windows of a step (0 is the first), in the step's order: int64 (sequences_per_step,)."""
        count = self.sequences_per_step
        if self.order == "random":
            bits = np.random.Philox(key=derive_seed(self.seed, "order", step)).random_raw(count)
            return (bits % np.uint64(self.tokens.positions + 1 - self.block_size)).astype(np.int64)
        epochs, positions = np.divmod(np.arange(step * count, (step + 1) * count), self.blocks_per_epoch)
        blocks = np.empty(count, dtype=np.int64)
        for epoch in np.unique(epochs):
            blocks[epochs == epoch] = self._epoch_order(int(epoch))[positions[epochs == epoch]]
        return blocks * self.block_size

    def micro_batch_number(self, index: int) -> int:
        """The number within the step of this process's micro-batch `index`, the same on any number of processes."""
        return index * self.num_processes + self.rank

    def counted(self, step: int) -> int:
        """Targets that count in a step, over all its windows: every process knows them all and need not ask."""
        return self.tokens.counted(self.starts(step), self.block_size)

    def at(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """This process's micro-batches of a step, as keyword arguments of `forward`.

        input_ids and shift_labels, the token after each (-100 where it does not count), are int64
        (micro_batch_size, block_size); packed conversations bring position_ids, too. With `pin_memory` they lie where
        a GPU can fetch them while the host goes on.
        """
        starts = self.starts(step).reshape(-1, self.micro_batch_size)
        for index in range(self.accumulation):
            batch = self.tokens.batch(starts[self.micro_batch_number(index)], self.block_size)
            yield {name: tensor.pin_memory() for name, tensor in batch.items()} if self.pin_memory else batch
