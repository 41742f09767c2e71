"""Blocks: the protocol that batches and evaluations draw training data from, and the blocks of a token stream."""

from typing import Protocol

import numpy as np
import torch

from nanogpt_hf.data.tokens import TokenStream


class Blocks(Protocol):
    """Equally long sequences with their targets, by index. Token streams and conversations are two of these."""

    block_size: int

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """The blocks at `indices` as keyword arguments of `forward`.

        input_ids and shift_labels, the token after each (-100 if it is not a target), are int64
        (len(indices), block_size); packed conversations add position_ids.
        """
        ...

    def num_targets(self, indices: np.ndarray) -> int:
        """Number of targets in the blocks at `indices`, those of -100 not counted."""
        ...


class TokenBlocks:
    """Blocks of a token stream; block i starts at token i · stride.

    By default blocks lie end to end and a shorter rest is dropped. With stride 1 a block starts at any token. With
    `partial` the last block may be shorter, so that every token but the first is predicted.
    """

    def __init__(self, stream: TokenStream, block_size: int, *, stride: int | None = None, partial: bool = False):
        self.stream, self.block_size = stream, block_size
        self.stride = stride or block_size
        rest = len(stream) - 1 - block_size  # targets after the first block
        self._length = max(0, rest // self.stride + 1)
        if partial and len(stream) > 1:
            self._length = 1 + max(0, -(-rest // self.stride))

    def __len__(self) -> int:
        return self._length

    def targets_of(self, indices: np.ndarray) -> np.ndarray:
        """Targets in each of the blocks at `indices`: fewer than block_size only at the stream's end."""
        return np.minimum(self.block_size, len(self.stream) - 1 - indices * self.stride)

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """The blocks at `indices`: input_ids and shift_labels, both int64 (len(indices), block_size).

        Past the stream's end the input is 0 and the target -100.
        """
        starts, size = indices * self.stride, self.block_size
        counts = self.targets_of(indices)
        if (counts == size).all():
            inputs, targets = self.stream.windows(starts, size), self.stream.windows(starts + 1, size)
            return {"input_ids": torch.from_numpy(inputs), "shift_labels": torch.from_numpy(targets)}
        inputs = torch.zeros(len(starts), size, dtype=torch.int64)
        targets = torch.full_like(inputs, -100)
        for row, count in enumerate(counts.tolist()):
            window = torch.from_numpy(self.stream.windows(starts[row : row + 1], count + 1)[0])
            inputs[row, :count], targets[row, :count] = window[:-1], window[1:]
        return {"input_ids": inputs, "shift_labels": targets}

    def num_targets(self, indices: np.ndarray) -> int:
        """All tokens of the blocks but those past the stream's end."""
        return int(self.targets_of(indices).sum())
