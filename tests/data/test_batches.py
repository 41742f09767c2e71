"""Batches: shapes, orders of an epoch, the same tokens on any number of processes, random
access.
"""

import numpy as np
import pytest
import torch

from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.blocks import TokenBlocks, TokenStream


def batches(
    tokens=1001,
    block_size=8,
    order="shuffled",
    seed=0,
    micro_batch_size=2,
    accumulation=4,
    **machine,
):
    """Batches over the stream 0, 1, 2, ...: each token equals its position."""
    stream = (
        tokens
        if isinstance(tokens, TokenStream)
        else TokenStream([np.arange(tokens, dtype=np.uint16)])
    )
    return Batches(
        TokenBlocks(stream, block_size, stride=1 if order == "random" else None),
        order=order,
        seed=seed,
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        **machine,
    )


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def whole_step(step, num_processes, sequences=16, micro_batch_size=2, **arguments):
    """The input_ids of a step in its order, joined from all processes."""
    micro_batches = {}
    for rank in range(num_processes):
        accumulation = sequences // (micro_batch_size * num_processes)
        part = batches(
            micro_batch_size=micro_batch_size,
            accumulation=accumulation,
            dp_rank=rank,
            dp_size=num_processes,
            **arguments,
        )
        for index, batch in enumerate(part.micro_batches(step)):
            micro_batches[part.micro_batch_number(index)] = batch["input_ids"]
    assert sorted(micro_batches) == list(range(sequences // micro_batch_size))
    return torch.cat([micro_batches[number] for number in sorted(micro_batches)])


@pytest.mark.parametrize("order", ["shuffled", "random"])
def test_targets_are_the_next_tokens(order):
    for step in range(20):
        for input_ids, targets in (
            batch.values() for batch in batches(order=order).micro_batches(step)
        ):
            assert torch.equal(targets, input_ids + 1)  # the stream counts up
            assert torch.equal(input_ids[:, 1:], targets[:, :-1])


def test_batches_cross_chunks():
    chunks = [np.arange(1001, dtype=np.uint16)[i : i + 5] for i in range(0, 1001, 5)]
    whole, pieces = batches(), batches(TokenStream(chunks))
    for one, other in zip(whole.micro_batches(3), pieces.micro_batches(3), strict=True):
        assert equal(one, other)


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    # a block needs the token after it
    [(1001, 125), (1000, 124), (1008, 125), (1009, 126), (9, 1), (16, 1), (17, 2)],
)
def test_epoch_has_every_block_with_a_next_token(tokens, blocks):
    assert len(batches(tokens).blocks) == blocks


@pytest.mark.parametrize(
    ("tokens", "sequences"),
    [
        (1001, 5),  # 125 blocks: an epoch ends with a step
        (1001, 8),  # steps cross the epoch's end
        (1001, 125),  # a step is an epoch
        (57, 8),  # 7 blocks: a step is more than an epoch
        (17, 16),  # 2 blocks: eight epochs per step
        (9, 4),  # one block
    ],
)
def test_each_block_occurs_once_per_epoch(tokens, sequences):
    part = batches(tokens, micro_batch_size=1, accumulation=sequences)
    blocks, epochs = len(part.blocks), 6
    steps = -(-blocks * epochs // sequences)
    indices = np.concatenate([part.indices(step) for step in range(steps)])[: blocks * epochs]
    assert len(indices) == blocks * epochs
    for epoch in indices.reshape(epochs, blocks):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(blocks))


@pytest.mark.parametrize("order", ["shuffled", "random"])
def test_order_is_pinned(order):
    # A run resumed after an upgrade must continue with the same data: these numbers may never
    # change.
    pinned = {
        "shuffled": [[64, 520, 160, 248, 0, 872, 552, 456], [872, 456, 320, 176, 744, 832, 8, 448]],
        "random": [
            [437, 283, 400, 38, 305, 470, 244, 705],
            [67, 473, 633, 633, 393, 506, 331, 187],
        ],
    }[order]
    part = batches(order=order, seed=1337)
    assert [(part.indices(step) * part.blocks.stride).tolist() for step in (0, 100)] == pinned


@pytest.mark.parametrize("order", ["shuffled", "random"])
@pytest.mark.parametrize("step", [0, 1, 7, 8, 1000])
def test_step_has_same_tokens_on_any_number_of_processes(order, step):
    alone = whole_step(step, 1, order=order)
    assert alone.shape == (16, 8)
    for num_processes in (2, 4, 8):
        assert torch.equal(whole_step(step, num_processes, order=order), alone)


@pytest.mark.parametrize("order", ["shuffled", "random"])
def test_step_has_same_tokens_for_any_micro_batch_size(order):
    alone = whole_step(3, 1, order=order)
    for micro_batch_size in (1, 4, 8, 16):
        assert torch.equal(whole_step(3, 1, micro_batch_size=micro_batch_size, order=order), alone)


@pytest.mark.parametrize("order", ["shuffled", "random"])
def test_step_does_not_depend_on_earlier_steps(order):
    used = batches(order=order)
    consecutive = {
        step: list(used.micro_batches(step)) for step in (0, 1, 2, 40, 3, 999, 15, 16, 17)
    }
    remembered = {"seconds_waited", "_orders"}  # a clock, and what any step can compute again
    before = {name: value for name, value in vars(used).items() if name not in remembered}
    for step in reversed(consecutive):
        for fresh_or_used in (batches(order=order), used):
            for one, other in zip(
                consecutive[step], fresh_or_used.micro_batches(step), strict=True
            ):
                assert equal(one, other)
    assert {name: value for name, value in vars(used).items() if name not in remembered} == before
    assert len(used._orders) <= 2


@pytest.mark.parametrize("tokens", [9, 10, 24, 1001])
def test_random_windows_cover_every_offset(tokens):
    part = batches(tokens, order="random", micro_batch_size=100, accumulation=100)
    starts = np.concatenate([part.indices(step) for step in range(2)])
    last = tokens - 8 - 1  # the last offset with room for window and next token, as in nanoGPT
    assert set(starts) == set(range(last + 1))
    for batch in part.micro_batches(0):
        assert batch["input_ids"].min() >= 0
        assert batch["shift_labels"].max() <= tokens - 1


@pytest.mark.parametrize("order", ["shuffled", "random"])
def test_cost_of_a_batch_does_not_depend_on_the_step(order, monkeypatch):
    # Counted instead of timed: orders drawn and windows read, over a virtual stream of ten billion
    # tokens.
    class Counting(TokenStream):
        def __init__(self):
            super().__init__([])
            self.read = 0

        def __len__(self):
            return 10**10

        def windows(self, starts, length):
            self.read += len(starts) * length
            return np.zeros((len(starts), length), dtype=np.int64)

    draws_of_order = []
    philox = np.random.Philox

    class Drawing:
        def __init__(self, key):
            self.bits = philox(key=key)

        def random_raw(self, count):
            draws_of_order.append(count)
            return self.bits.random_raw(count)

    monkeypatch.setattr(np.random, "Philox", Drawing)
    costs = []
    for step in (10, 1_000_000):
        stream = Counting()
        draws_of_order.clear()
        blocks = TokenBlocks(stream, 10**4, stride=1 if order == "random" else None)
        part = Batches(blocks, order=order, seed=0, micro_batch_size=8, accumulation=4)
        assert len(list(part.micro_batches(step))) == 4
        costs.append((stream.read, list(draws_of_order)))
    assert costs[0] == costs[1]
    assert costs[0][0] == 32 * 2 * 10**4  # inputs and targets


@pytest.mark.parametrize("processes", [1, 2])
def test_num_targets_is_known_to_every_process(processes):
    parts = [batches(dp_size=processes, dp_rank=rank) for rank in range(processes)]
    total = sum(
        (batch["shift_labels"] != -100).sum().item()
        for part in parts
        for batch in part.micro_batches(3)
    )
    assert [part.num_targets(3) for part in parts] == [total] * processes


def test_targets_beyond_the_stream_are_not_counted():
    blocks = TokenBlocks(TokenStream([np.arange(11, dtype=np.uint16)]), 8, partial=True)
    assert len(blocks) == 2
    assert blocks.num_targets(np.array([0, 1])) == 8 + 2


def test_pin_memory_pins_every_tensor(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    tensors = [
        tensor for batch in batches(pin_memory=True).micro_batches(0) for tensor in batch.values()
    ]
    assert len(pinned) == len(tensors) == 2 * 4
    assert all(a is b for a, b in zip(pinned, tensors, strict=True))


def test_batch_time_excludes_their_use(monkeypatch):
    clock, part = [0.0], batches(accumulation=3)
    monkeypatch.setattr("nanogpt_hf.data.batches.time.perf_counter", lambda: clock[0])
    made = part.blocks.batch

    def slow(indices):
        clock[0] += 2.0
        return made(indices)

    monkeypatch.setattr(part.blocks, "batch", slow)
    for _ in part.micro_batches(10):
        clock[0] += 100.0
    assert part.seconds_waited == 6.0
