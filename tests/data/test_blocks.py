"""Blocks of a token stream: consecutive, overlapping, at any offset, at the end."""

import numpy as np
import pytest

from nanogpt_hf.data.blocks import TokenBlocks, TokenStream


def stream(length: int) -> TokenStream:
    """The stream 0, 1, 2, ...: each token equals its position."""
    return TokenStream([np.arange(length, dtype=np.uint16)])


@pytest.mark.parametrize("length", [2, 3, 16, 17, 18, 100, 1001])
@pytest.mark.parametrize(("block_size", "stride"), [(16, 16), (16, 5), (16, 1), (64, 32), (1, 1)])
def test_partial_blocks_predict_every_token_but_the_first(length, block_size, stride):
    blocks, predicted = TokenBlocks(stream(length), block_size, stride=stride, partial=True), set()
    for index in range(len(blocks)):
        batch = blocks.batch(np.array([index]))
        targets = batch["shift_labels"][0]
        targets = targets[targets != -100].tolist()
        assert (
            len(targets)
            == blocks.num_targets(np.array([index]))
            == blocks.targets_of(np.array([index]))[0]
        )
        new = [target for target in targets if target not in predicted]
        assert new  # each block predicts new tokens
        for target in new:
            assert target - index * stride >= min(target, block_size - stride + 1)
        predicted |= set(new)
    assert predicted == set(range(1, length))


@pytest.mark.parametrize(("length", "blocks"), [(8, 0), (9, 1), (16, 1), (17, 2), (1001, 125)])
def test_whole_blocks_drop_the_remainder(length, blocks):
    assert len(TokenBlocks(stream(length), 8)) == blocks


@pytest.mark.parametrize("length", [9, 10, 24])
def test_stride_1_starts_at_every_token(length):
    blocks = TokenBlocks(stream(length), 8, stride=1)
    batch = blocks.batch(np.arange(len(blocks)))
    assert batch["input_ids"][:, 0].tolist() == list(range(length - 8))
    assert batch["shift_labels"][-1, -1] == length - 1


def test_beyond_the_end_input_is_0_without_target():
    batch = TokenBlocks(stream(11), 8, partial=True).batch(np.array([0, 1]))
    assert batch["input_ids"].tolist() == [list(range(8)), [8, 9, 0, 0, 0, 0, 0, 0]]
    assert batch["shift_labels"].tolist() == [
        list(range(1, 9)),
        [9, 10, -100, -100, -100, -100, -100, -100],
    ]
