"""Conversations in blocks: none lost or split, and pure functions of the index."""

import numpy as np
import pytest
import torch

from nanogpt_hf.data.blocks import TokenStream
from nanogpt_hf.data.examples import Examples, pack


def examples(lengths, packing="packed", mask=None) -> Examples:
    """Examples in blocks of 16 whose tokens count up over all of them, in small chunks; the second
    half of each is the answer.
    """
    total = sum(lengths)
    ids = np.arange(total, dtype=np.uint16)
    if mask is None:
        mask = np.concatenate([np.arange(n) >= n / 2 for n in lengths]).astype(np.uint8)
    streams = (TokenStream([a[i : i + 7] for i in range(0, total, 7)]) for a in (ids, mask))
    return Examples(*streams, np.array(lengths), block_size=16, packing=packing)


# 17 tokens are 16 positions: a block
LENGTHS = np.random.default_rng(0).integers(2, 18, 200).tolist()


def test_packing_keeps_examples_whole_and_wastes_little():
    lengths = np.random.default_rng(1).integers(1, 65, 5000)
    blocks = pack(lengths, 64)
    assert sorted(number for block in blocks for number in block) == list(range(5000))
    filled = [sum(lengths[block]) for block in blocks]
    assert max(filled) <= 64
    assert len(blocks) <= 1.02 * lengths.sum() / 64 + 1
    assert blocks == pack(lengths, 64)


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_each_target_occurs_once(packing):
    data = examples(LENGTHS, packing=packing)
    batch = data.batch(np.arange(len(data)))
    targets = batch["shift_labels"][batch["shift_labels"] != -100]
    ends = np.cumsum(LENGTHS)
    expected_targets = [
        i
        for end, n in zip(ends, LENGTHS, strict=True)
        for i in range(end - n, end)
        if i - (end - n) >= n / 2
    ]
    assert sorted(targets.tolist()) == expected_targets
    # the stream counts up
    assert torch.equal(batch["input_ids"][batch["shift_labels"] != -100], targets - 1)
    assert (data.cut, data.skipped) == (0, 0)
    some = np.arange(0, len(data), 3)
    assert data.num_targets(some) == (data.batch(some)["shift_labels"] != -100).sum().item()


def test_positions_restart_with_each_example():
    data = examples([5, 9, 3, 17])  # 4, 8, 2 and 16 positions
    batch = data.batch(np.arange(len(data)))
    assert [data.blocks[0], data.blocks[1]] == [[3], [1, 0, 2]]
    assert batch["position_ids"][0].tolist() == list(range(16))
    assert batch["position_ids"][1].tolist() == [*range(8), *range(4), *range(2), *range(2)]
    padded = examples([5, 9, 3, 17], packing="padded").batch(np.array([0]))
    assert list(padded) == ["input_ids", "shift_labels"]
    assert padded["input_ids"].tolist() == [[0, 1, 2, 3] + [0] * 12]
    assert padded["shift_labels"].tolist() == [[-100, -100, 3, 4] + [-100] * 12]


def test_long_examples_are_cut_and_dropped_without_answer():
    mask = np.concatenate([[0] * 16 + [1] * 4, [0] * 17 + [1] * 3, [0, 1]]).astype(np.uint8)
    data = examples([20, 20, 2], mask=mask)
    assert (data.cut, data.skipped) == (1, 1)
    assert sorted(number for block in data.blocks for number in block) == [0, 2]
    batch = data.batch(np.arange(len(data)))
    # the 17th token, and the last
    assert batch["shift_labels"][batch["shift_labels"] != -100].tolist() == [16, 41]
    assert len(examples([20], mask=mask[20:40])) == 0
