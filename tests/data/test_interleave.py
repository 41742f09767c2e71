import random

import numpy as np
import pytest

from nanogpt_hf.data.blocks import Interleave

THREE = [[7, 2, 1], [5, 3, 2], [6, 3, 1], [8, 1, 1], [3, 2, 1], [45, 35, 20]]


@pytest.mark.parametrize("weights", THREE)
def test_counts_follow_the_weights_at_any_number_of_samples(weights):
    order, total = Interleave(weights), sum(weights)
    for samples in (10, 1_000, 1_000_000):
        wanted = np.array(weights) * samples / total
        assert np.abs(order.counts(samples) - wanted).max() <= 0.6, samples
        sources, _ = order(np.arange(samples))
        np.testing.assert_array_equal(np.bincount(sources, minlength=3), order.counts(samples))
    sources, _ = order(np.arange(5 * total))
    counts = np.cumsum(np.eye(3, dtype=int)[sources], axis=0)
    ideal = np.outer(np.arange(1, 5 * total + 1), np.array(weights) / total)
    assert np.abs(counts - ideal).max() <= 0.6 + 1e-9


def test_deviation_stays_below_one_and_a_quarter_samples():
    draw = random.Random(0)
    for _ in range(40):
        weights = [draw.randint(1, 60) for _ in range(draw.randint(1, 12))]
        sources, _ = Interleave(weights)(np.arange(sum(weights)))
        counts = np.cumsum(np.eye(len(weights))[sources], axis=0)
        ideal = np.outer(np.arange(1, sum(weights) + 1), np.array(weights) / sum(weights))
        assert np.abs(counts - ideal).max() < 1.25, weights


def test_each_source_is_read_in_order_without_gaps():
    order = Interleave([7, 2, 1])
    sources, numbers = order(np.arange(1234))
    for source in range(3):
        own = numbers[sources == source]
        np.testing.assert_array_equal(own, np.arange(len(own)))


def test_any_sample_is_found_at_once():
    order = Interleave([5, 3, 2])
    near, far = np.arange(30), np.arange(30) + 10**15
    np.testing.assert_array_equal(order(near)[0], order(far)[0])
    np.testing.assert_array_equal(
        order(near)[1] + 10**14 * np.array([5, 3, 2])[order(near)[0]], order(far)[1]
    )


def test_the_order_is_pinned():
    # A run that is resumed after an upgrade continues with the same data: these numbers may never
    # change.
    assert Interleave([5, 3, 2])(np.arange(10))[0].tolist() == [0, 1, 2, 0, 0, 1, 0, 2, 1, 0]
