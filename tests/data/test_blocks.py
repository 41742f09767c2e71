"""Streams of tokens and their blocks: windows over chunks and shards, without copies; blocks at
any offset and at the end; the order of a mixture; damaged data.
"""

import tracemalloc

import datasets
import numpy as np
import pyarrow
import pytest

from assertions import refusal
from nanogpt_hf.data.blocks import TokenBlocks, TokenStream
from nanogpt_hf.data.mixture import Interleave


@pytest.fixture
def saved(tmp_path):
    """Save rows of ids as in prepared data; return the folder."""

    def save(rows, num_shards=1, kind="uint16"):
        features = datasets.Features({"input_ids": datasets.List(datasets.Value(kind))})
        ids = [np.asarray(row, dtype=kind) for row in rows]
        rows = datasets.Dataset.from_dict({"input_ids": ids}, features)
        rows.save_to_disk(tmp_path / "train", num_shards=num_shards)
        return tmp_path / "train"

    return save


def counting(length: int) -> TokenStream:
    """The stream 0, 1, 2, ...: each token equals its position."""
    return TokenStream([np.arange(length, dtype=np.uint16)])


# --- streams
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_windows_equal_plain_concatenation(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, rng.choice([1, 3, 50, 400]) + 1, size=rng.integers(2, 60))
    chunks = [rng.integers(0, 2**16, size=size).astype(np.uint16) for size in lengths]
    flat = np.concatenate(chunks).astype(np.int64)
    stream = TokenStream(chunks)  # some chunks are empty
    assert len(stream) == len(flat) > 0
    for length in {1, 2, min(7, len(flat)), len(flat) // 2, len(flat)}:
        starts = rng.integers(0, len(flat) - length + 1, size=30)
        starts[:2] = 0, len(flat) - length  # the first and the last
        windows = stream.windows(starts, length)
        assert windows.dtype == np.int64
        np.testing.assert_array_equal(windows, [flat[start : start + length] for start in starts])


@pytest.mark.parametrize(("kind", "largest"), [("uint16", 2**16 - 1), ("uint32", 2**20)])
def test_stream_joins_chunks_and_shards(saved, kind, largest):
    rng = np.random.default_rng(0)
    # An arrow chunk holds 1,000 rows.
    rows = [rng.integers(0, largest, size=length) for length in rng.integers(0, 5, size=4500)]
    rows[0] = np.array([largest])
    stream = TokenStream.open(saved(rows, 3, kind))
    flat = np.concatenate(rows)
    assert len(stream.chunks) > 3
    np.testing.assert_array_equal(stream.windows(np.array([0]), len(flat))[0], flat)


def test_opening_a_stream_copies_nothing(saved):
    folder = saved([np.arange(1000)] * 1000)  # 2 MB
    tracemalloc.start()  # counts numpy's allocations; arrow has its own counter
    before = pyarrow.total_allocated_bytes()
    stream = TokenStream.open(folder)
    allocated = tracemalloc.get_traced_memory()[0] + pyarrow.total_allocated_bytes() - before
    tracemalloc.stop()
    assert len(stream) == 1_000_000
    assert allocated < 500_000


def test_damaged_data_is_an_error(saved, tmp_path):
    folder = saved([[1, 2, 3]] * 200, num_shards=2)
    shard = folder / "data-00001-of-00002.arrow"
    whole = shard.read_bytes()
    for data in (b"", whole[: len(whole) // 2], b"not arrow" * 100):
        shard.write_bytes(data)
        assert str(folder) in refusal(TokenStream.open, folder)
    shard.unlink()
    for broken in (folder, tmp_path):
        assert str(broken) in refusal(TokenStream.open, broken)


# --- blocks
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 3, 16, 17, 18, 100, 301])
@pytest.mark.parametrize(("block_size", "stride"), [(16, 16), (16, 5), (16, 1), (64, 32), (1, 1)])
def test_partial_blocks_predict_every_token_but_the_first(length, block_size, stride):
    blocks = TokenBlocks(counting(length), block_size, stride=stride, partial=True)
    predicted = set()
    for index in range(len(blocks)):
        number = np.array([index])
        targets = blocks.batch(number)["shift_labels"][0]
        targets = targets[targets != -100].tolist()
        assert len(targets) == blocks.num_targets(number) == blocks.targets_of(number)[0]
        new = set(targets) - predicted
        assert new  # each block predicts new tokens
        for target in new:
            assert target - index * stride >= min(target, block_size - stride + 1)
        predicted |= new
    assert predicted == set(range(1, length))


@pytest.mark.parametrize(
    ("length", "blocks"),
    # a block needs the token after it
    [(8, 0), (9, 1), (16, 1), (17, 2), (1000, 124), (1001, 125), (1008, 125), (1009, 126)],
)
def test_whole_blocks_drop_the_remainder(length, blocks):
    assert len(TokenBlocks(counting(length), 8)) == blocks


def test_beyond_the_end_input_is_0_without_target():
    blocks = TokenBlocks(counting(11), 8, partial=True)
    batch = blocks.batch(np.array([0, 1]))
    assert batch["input_ids"].tolist() == [[*range(8)], [8, 9, *[0] * 6]]
    assert batch["shift_labels"].tolist() == [[*range(1, 9)], [9, 10, *[-100] * 6]]
    assert blocks.num_targets(np.array([0, 1])) == 8 + 2


# --- the order of a mixture
# ------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [[7, 2, 1], [8, 1, 1], [45, 35, 20]])
def test_counts_follow_the_weights_at_any_number_of_samples(weights):
    order = Interleave(weights)
    for samples in (*range(1, 100), 1_000, 100_000):
        wanted = np.array(weights) * samples / sum(weights)
        assert np.abs(order.counts(samples) - wanted).max() <= 0.65, samples
        sources, _ = order(np.arange(samples))
        np.testing.assert_array_equal(np.bincount(sources, minlength=3), order.counts(samples))


def test_each_source_is_read_in_order_and_any_sample_is_found_at_once():
    order = Interleave([5, 3, 2])
    weights = np.array([5, 3, 2])
    sources, numbers = order(np.arange(1234))
    for source in range(3):
        own = numbers[sources == source]
        np.testing.assert_array_equal(own, np.arange(len(own)))
    far_sources, far_numbers = order(np.arange(1234) + 10**15)
    np.testing.assert_array_equal(far_sources, sources)
    np.testing.assert_array_equal(far_numbers, numbers + 10**14 * weights[sources])
    # A run that is resumed after an upgrade continues with the same data: these numbers may never
    # change.
    assert sources[:10].tolist() == [0, 1, 2, 0, 0, 1, 0, 2, 1, 0]
