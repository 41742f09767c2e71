"""Batches: orders of an epoch, the same tokens on any number of processes, random access."""

import numpy as np
import pytest
import torch

from nanogpt_hf.data import batches as module
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.blocks import TokenBlocks, TokenStream

orders = pytest.mark.parametrize("order", ["shuffled", "shifted", "random"])


def batches(
    tokens=1001, order="shuffled", *, chunk=2000, micro_batch_size=2, accumulation=4, **options
):
    """Batches of blocks of 8 over the stream 0, 1, 2, ...: each token equals its position."""
    ids = np.arange(tokens, dtype=np.uint16)
    stream = TokenStream([ids[i : i + chunk] for i in range(0, tokens, chunk)])
    blocks = TokenBlocks(stream, 8, stride=None if order == "shuffled" else 1)
    sizes = {"micro_batch_size": micro_batch_size, "accumulation": accumulation}
    return Batches(blocks, order=order, **{"seed": 0} | sizes | options)


def whole_step(step, processes, micro_batch_size=2, **options):
    """The input_ids of a step of 16 blocks in its order, joined from all processes."""
    micro_batches = {}
    for rank in range(processes):
        part = batches(
            micro_batch_size=micro_batch_size,
            accumulation=16 // (micro_batch_size * processes),
            dp_rank=rank,
            dp_size=processes,
            **options,
        )
        for index, batch in enumerate(part.micro_batches(step)):
            micro_batches[part.micro_batch_number(index)] = batch["input_ids"]
    assert sorted(micro_batches) == list(range(16 // micro_batch_size))
    return torch.cat([micro_batches[number] for number in sorted(micro_batches)])


@pytest.mark.parametrize(
    ("tokens", "sequences"),
    [
        (1001, 8),  # steps cross the epoch's end
        (57, 8),  # 7 blocks: a step is more than an epoch
        (17, 16),  # 2 blocks: eight epochs per step
    ],
)
def test_each_block_occurs_once_per_epoch(tokens, sequences):
    part = batches(tokens, micro_batch_size=1, accumulation=sequences)
    blocks = len(part.blocks)
    epochs = 6
    steps = -(-blocks * epochs // sequences)
    indices = np.concatenate([part.indices(step) for step in range(steps)])[: blocks * epochs]
    for epoch in indices.reshape(epochs, blocks):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(blocks))


@pytest.mark.parametrize(
    ("order", "pinned"),
    [
        (
            "shuffled",
            [[64, 520, 160, 248, 0, 872, 552, 456], [872, 456, 320, 176, 744, 832, 8, 448]],
        ),
        (
            "random",
            [[437, 283, 400, 38, 305, 470, 244, 705], [67, 473, 633, 633, 393, 506, 331, 187]],
        ),
        (
            "shifted",
            [[67, 523, 163, 251, 3, 875, 555, 459], [11, 451, 187, 59, 475, 83, 331, 931]],
        ),
    ],
)
def test_order_is_pinned(order, pinned):
    # A run resumed after an upgrade must continue with the same data: these numbers may never
    # change.
    part = batches(order=order, seed=1337)
    assert [(part.indices(step) * part.blocks.stride).tolist() for step in (0, 100)] == pinned


@orders
@pytest.mark.parametrize("step", [0, 7, 8, 1000])
def test_step_has_same_tokens_on_any_number_of_processes_and_for_any_micro_batch(order, step):
    alone = whole_step(step, 1, order=order)
    assert alone.shape == (16, 8)
    for processes, size in ((2, 2), (8, 2), (1, 16), (2, 4)):
        assert torch.equal(whole_step(step, processes, size, order=order), alone)
    assert torch.equal(whole_step(step, 1, order=order, chunk=5), alone), "blocks cross chunks"


@orders
def test_step_does_not_depend_on_earlier_steps(order):
    used = batches(order=order)
    steps = (0, 1, 2, 40, 3, 999, 15, 16, 17)
    consecutive = {step: list(used.micro_batches(step)) for step in steps}
    for step in reversed(steps):
        for again in (batches(order=order), used):
            for one, other in zip(consecutive[step], again.micro_batches(step), strict=True):
                assert one.keys() == other.keys()
                assert all(torch.equal(one[name], other[name]) for name in one)
    assert sum(order.cache_info().currsize for order in used._orders) <= 2


@pytest.mark.parametrize("tokens", [9, 12, 17, 24, 25, 1001])
def test_shifted_blocks_of_an_epoch_lie_end_to_end_from_an_offset_of_its_own(tokens):
    part = batches(tokens, order="shifted", micro_batch_size=1, accumulation=5)
    # The last block has room for the target of its last token, whatever the offset is.
    epochs = 40
    length = max(1, (tokens - 8) // 8)
    indices = np.concatenate([part.indices(step) for step in range(epochs * length // 5)])
    offsets = []
    for epoch in indices.reshape(epochs, length):
        starts = np.sort(epoch)
        np.testing.assert_array_equal(np.diff(starts), np.full(length - 1, 8))
        offsets.append(starts[0])
    assert set(offsets) == set(range(min(8, tokens - 8)))
    assert max(indices) + 8 < tokens
    for batch in part.micro_batches(0):
        assert torch.equal(batch["shift_labels"], batch["input_ids"] + 1)  # it counts up


@pytest.mark.parametrize("tokens", [9, 10, 24, 1001])
def test_random_windows_cover_every_offset(tokens):
    part = batches(tokens, order="random", micro_batch_size=100, accumulation=100)
    starts = np.concatenate([part.indices(step) for step in range(2)])
    # the last offset has room for window and next token, as in nanoGPT
    assert set(starts) == set(range(tokens - 8))
    for batch in part.micro_batches(0):
        assert torch.equal(batch["shift_labels"], batch["input_ids"] + 1)  # it counts up


def test_pin_memory_pins_every_tensor(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    tensors = [t for batch in batches(pin_memory=True).micro_batches(0) for t in batch.values()]
    assert len(pinned) == len(tensors) == 2 * 4
    assert all(a is b for a, b in zip(pinned, tensors, strict=True))


def test_batch_time_excludes_their_use(monkeypatch):
    clock = [0.0]
    part = batches(accumulation=3)
    monkeypatch.setattr("nanogpt_hf.data.batches.time.perf_counter", lambda: clock[0])
    made = part.blocks.batch

    def slow(indices):
        clock[0] += 2.0
        return made(indices)

    monkeypatch.setattr(part.blocks, "batch", slow)
    for _ in part.micro_batches(10):
        clock[0] += 100.0
    assert part.seconds_waited == 6.0


def test_order_of_a_step_is_computed_once(monkeypatch):
    computed = []
    derive_seed = module.derive_seed
    monkeypatch.setattr(
        module, "derive_seed", lambda *parts: computed.append(parts) or derive_seed(*parts)
    )
    part = batches(order="random")
    for step in range(3):
        targets = part.num_targets(step)
        assert targets == sum(batch["input_ids"].numel() for batch in part.micro_batches(step))
    assert len(computed) == 3
