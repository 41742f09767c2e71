"""Reading metrics.jsonl: events, columns, smoothing, damaged lines."""

import json

import numpy as np
import pytest

from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import column, names, read_metrics, smooth


def test_read_metrics_skips_other_lines(tmp_path):
    run = RunFolder(tmp_path)
    assert read_metrics(run) == []
    run.metrics.write_text('{"step": 1, "train/loss": 2.0}\nnot JSON\n[1]\n{"no": "step"}\n{"step": 2, "train/lo')
    assert read_metrics(run) == [{"step": 1, "train/loss": 2.0}]


def test_column_has_only_finite_numbers():
    events = [
        {"step": 1, "tokens": 10, "seconds": 0.5, "train/loss": 2.0},
        {"step": 2, "tokens": 20, "seconds": 1.0, "train/loss": None},
        {"step": 3, "tokens": 30, "seconds": 1.5, "train/loss": float("nan"), "val/loss": 3},
        {"step": 3, "tokens": 30, "seconds": 1.5, "samples": [{"prompt": "a", "text": "b"}]},
        {"step": 4, "tokens": 40, "seconds": 2.0, "train/loss": True},
    ]
    tokens, values = column(events, "train/loss", "tokens")
    assert (tokens.tolist(), values.tolist()) == ([10], [2])
    assert names(events) == ["train/loss", "val/loss"]
    tokens, values = column(events, "nothing")
    assert len(tokens) == len(values) == 0


def test_smooth_keeps_a_constant_and_the_first_value():
    assert smooth(np.full(50, 3.0), 10) == pytest.approx(np.full(50, 3.0))
    assert smooth(np.array([2.0, 4.0]), 10)[0] == pytest.approx(2.0)


DAMAGE = {
    "null tokens": '"tokens": null',
    "NaN": '"tokens": NaN',
    "text": '"tokens": "many"',
    "infinite": '"seconds": Infinity',
    "negative": '"seconds": -1',
    "number beyond what plots can show": '"val/loss": 1e308',
    "number beyond floats": '"val/loss": ' + "9" * 400,
    "number beyond Python's limit of digits": '"val/loss": ' + "9" * 5000,
    "metric as text": '"val/loss": "low"',
    "boolean": '"train/loss": true',
    "list": '"train/loss": [1]',
    "samples": '"samples": "text"',
    "samples of numbers": '"samples": [1]',
    "sample with a number": '"samples": [{"prompt": 1}]',
    "deeply nested": '"x": ' + "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_line_is_skipped_and_named(tmp_path, caplog, damage):
    run = RunFolder(tmp_path)
    valid = [{"step": 1, "tokens": 10, "seconds": 0.5, "val/loss": 2.0}, {"step": 3, "val/loss": None}]
    run.metrics.write_text(f'{json.dumps(valid[0])}\n{{"step": 2, {damage}}}\n{json.dumps(valid[1])}\n')
    assert read_metrics(run) == valid
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{run.metrics}: skipped line 2: ")
    assert len(record.getMessage()) < 500


def test_damaged_lines_are_one_warning_without_partial_last_line(tmp_path, caplog):
    run = RunFolder(tmp_path)
    run.metrics.write_text('{"step": 1}\nx\n{"step": -1}\n{"step": true}\n{"step": 2, "train/lo')
    assert read_metrics(run) == [{"step": 1}]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{run.metrics}: skipped line 2: ")
    assert "2 more" in record.getMessage()
