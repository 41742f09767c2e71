"""The digests tool: it finds every difference between reference runs, and no others."""

import math

import pytest

import run_digests as tool

FACTS = {"step 1: train/loss": [2.5], "step 1: tokens": [256, 256], "text": "the cat"}


@pytest.mark.parametrize(
    "change",
    [
        {"step 1: train/loss": [math.nextafter(2.5, 3)]},
        {"step 1: tokens": [256]},
        {"text": "the cat "},
        {"step 2: train/loss": [2.5]},
    ],
)
def test_changed_value_is_found_and_changes_the_digest(change):
    changed = FACTS | change
    ((fact, value),) = change.items()
    before = FACTS.get(fact, tool.ABSENT)
    assert tool.differences(FACTS, changed) == [(fact, before, value)]
    assert tool.differences(changed, FACTS) == [(fact, value, before)]
    assert tool.digest(changed) != tool.digest(FACTS)
    assert tool.digest(dict(reversed(FACTS.items()))) == tool.digest(FACTS)
