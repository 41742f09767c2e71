"""What metrics.jsonl holds, as the reports read it."""

import numpy as np
import pytest

from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import column, names, read_metrics, smooth


def test_lines_that_are_no_events_are_left_out(tmp_path):
    run = RunFolder(tmp_path)
    assert read_metrics(run) == []
    run.metrics.write_text('{"step": 1, "train/loss": 2.0}\nnot JSON\n[1]\n{"no": "step"}\n{"step": 2, "train/lo')
    assert read_metrics(run) == [{"step": 1, "train/loss": 2.0}]


def test_a_column_has_only_numbers_and_samples_are_no_metric():
    events = [
        {"step": 1, "tokens": 10, "seconds": 0.5, "train/loss": 2.0},
        {"step": 2, "tokens": 20, "seconds": 1.0, "train/loss": None},
        {"step": 3, "tokens": 30, "seconds": 1.5, "train/loss": float("nan"), "val/loss": 3},
        {"step": 3, "tokens": 30, "seconds": 1.5, "samples": [{"prompt": "a", "text": "b"}]},
        {"step": 4, "tokens": 40, "seconds": 2.0, "train/loss": True},
    ]
    where, values = column(events, "train/loss", "tokens")
    assert (where.tolist(), values.tolist()) == ([10], [2])
    assert names(events) == ["train/loss", "val/loss"]
    where, values = column(events, "nothing")
    assert len(where) == len(values) == 0


def test_smoothing_keeps_a_constant_and_starts_at_the_first_value():
    assert smooth(np.full(50, 3.0), 10) == pytest.approx(np.full(50, 3.0))
    assert smooth(np.array([2.0, 4.0]), 10)[0] == pytest.approx(2.0)
