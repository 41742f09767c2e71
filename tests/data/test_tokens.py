"""TokenStream: windows over chunks and shards, without copies; damaged data."""

import json
import tracemalloc

import datasets
import numpy as np
import pyarrow
import pytest

from assertions import refusal
from nanogpt_hf.data.blocks import TokenStream


@pytest.fixture
def saved(tmp_path):
    """Save rows of ids as in prepared data; return the folder."""

    def save(rows, num_shards=1, kind="uint16"):
        features = datasets.Features({"input_ids": datasets.List(datasets.Value(kind))})
        rows = datasets.Dataset.from_dict(
            {"input_ids": [np.asarray(row, dtype=kind) for row in rows]}, features
        )
        rows.save_to_disk(tmp_path / "train", num_shards=num_shards)
        return tmp_path / "train"

    return save


def random_chunks(rng, count, longest, kind=np.uint16):
    lengths = rng.integers(0, longest + 1, size=count)
    return [rng.integers(0, 2**16, size=length).astype(kind) for length in lengths]


@pytest.mark.parametrize("seed", range(20))
def test_windows_equal_plain_concatenation(seed):
    rng = np.random.default_rng(seed)
    longest = int(rng.choice([1, 3, 50, 400]))
    chunks = random_chunks(rng, count=int(rng.integers(2, 60)), longest=longest)  # some are empty
    flat = np.concatenate(chunks).astype(np.int64)
    stream = TokenStream(chunks)
    assert len(stream) == len(flat) > 0
    for length in {1, 2, min(7, len(flat)), len(flat) // 2, len(flat)}:
        starts = rng.integers(0, len(flat) - length + 1, size=30)
        starts[:2] = 0, len(flat) - length  # the first and the last
        windows = stream.windows(starts, length)
        assert windows.dtype == np.int64
        np.testing.assert_array_equal(windows, [flat[start : start + length] for start in starts])


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(("kind", "largest"), [("uint16", 2**16 - 1), ("uint32", 2**20)])
def test_stream_joins_chunks_and_shards(saved, num_shards, kind, largest):
    rng = np.random.default_rng(0)
    # An arrow chunk holds 1,000 rows.
    rows = [
        rng.integers(0, largest, size=length, endpoint=True)
        for length in rng.integers(0, 5, size=4500)
    ]
    rows[0] = np.array([largest])
    stream = TokenStream.open(saved(rows, num_shards, kind))
    flat = np.concatenate(rows)
    assert flat.max() == largest
    assert len(stream.chunks) > num_shards
    assert len(stream) == len(flat)
    np.testing.assert_array_equal(stream.windows(np.arange(len(flat) - 30), 31)[:, 0], flat[:-30])
    np.testing.assert_array_equal(stream.windows(np.array([0]), len(flat))[0], flat)


def test_opening_a_stream_copies_nothing(saved):
    rows = [np.arange(1000)] * 1000  # 2 MB
    folder = saved(rows)
    tracemalloc.start()  # counts numpy's allocations; arrow has its own counter
    before = pyarrow.total_allocated_bytes()
    stream = TokenStream.open(folder)
    allocated = tracemalloc.get_traced_memory()[0] + pyarrow.total_allocated_bytes() - before
    tracemalloc.stop()
    assert len(stream) == 1_000_000
    assert allocated < 500_000


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (9, 2), (10, 1), (0, 11), (100, 1)])
def test_window_outside_the_stream_is_an_error(start, length):
    stream = TokenStream([np.arange(4), np.arange(6)])
    with pytest.raises(IndexError, match="10 tokens"):
        stream.windows(np.array([0, start, 1]), length)


def test_stream_of_nothing_is_empty():
    for chunks in ([], [np.array([], dtype=np.uint16)]):
        stream = TokenStream(chunks)
        assert len(stream) == 0
        with pytest.raises(IndexError):
            stream.windows(np.array([0]), 1)


def test_folder_without_prepared_data_is_an_error(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        assert str(folder) in refusal(TokenStream.open, folder)


def test_damaged_data_is_an_error(saved):
    folder = saved([[1, 2, 3]] * 200, num_shards=2)
    shard = folder / "data-00001-of-00002.arrow"
    whole = shard.read_bytes()
    for data in (b"", whole[:100], whole[: len(whole) // 2], b"not arrow" * 100):
        shard.write_bytes(data)
        assert str(folder) in refusal(TokenStream.open, folder)
    shard.unlink()
    assert str(folder) in refusal(TokenStream.open, folder)
    shard.write_bytes(whole)
    (folder / "state.json").write_text(json.dumps({}))
    assert str(folder) in refusal(TokenStream.open, folder)
