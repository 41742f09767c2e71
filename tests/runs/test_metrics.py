"""Reading metrics.jsonl: events, columns, smoothing, damaged lines."""

import numpy as np
import pytest

from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import column, names, read_metrics, smooth


def test_column_has_only_finite_numbers():
    events = [
        {"step": 1, "tokens": 10, "seconds": 0.5, "train/loss": 2.0},
        {"step": 2, "tokens": 20, "seconds": 1.0, "train/loss": None},
        {"step": 3, "tokens": 30, "seconds": 1.5, "train/loss": float("nan"), "val/loss": 3},
        {"step": 3, "tokens": 30, "seconds": 1.5, "samples": [{"prompt": "a", "text": "b"}]},
    ]
    tokens, values = column(events, "train/loss", "tokens")
    assert (tokens.tolist(), values.tolist()) == ([10], [2])
    assert names(events) == ["train/loss", "val/loss"]
    tokens, values = column(events, "nothing")
    assert len(tokens) == len(values) == 0


def test_smooth_keeps_a_constant_and_the_first_value():
    assert smooth(np.full(50, 3.0), 10) == pytest.approx(np.full(50, 3.0))
    assert smooth(np.array([2.0, 4.0]), 10)[0] == pytest.approx(2.0)


def test_an_incomplete_last_line_is_left_out(tmp_path):
    run = RunFolder(tmp_path)
    run.metrics.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(run) == [{"step": 1}]
