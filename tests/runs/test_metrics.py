"""What metrics.jsonl holds, as the reports read it."""

import json

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


DAMAGE = {
    "null tokens": '"tokens": null',
    "NaN": '"tokens": NaN',
    "text": '"tokens": "many"',
    "infinite": '"seconds": Infinity',
    "negative": '"seconds": -1',
    "a number no float holds": '"val/loss": ' + "9" * 400,
    "a number Python reads no more": '"val/loss": ' + "9" * 5000,
    "a metric of text": '"val/loss": "low"',
    "a truth value": '"train/loss": true',
    "a list": '"train/loss": [1]',
    "samples": '"samples": "text"',
    "numbers as samples": '"samples": [1]',
    "numbers in samples": '"samples": [{"prompt": 1}]',
    "deep": '"x": ' + "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_line_with_nonsense_in_it_is_left_out_and_named(tmp_path, caplog, damage):
    run = RunFolder(tmp_path)
    good = [{"step": 1, "tokens": 10, "seconds": 0.5, "val/loss": 2.0}, {"step": 3, "val/loss": None}]
    run.metrics.write_text(f'{json.dumps(good[0])}\n{{"step": 2, {damage}}}\n{json.dumps(good[1])}\n')
    assert read_metrics(run) == good
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{run.metrics}: skipped line 2: ")
    assert len(record.getMessage()) < 500


def test_many_damaged_lines_are_one_warning_and_a_line_being_written_is_none(tmp_path, caplog):
    run = RunFolder(tmp_path)
    run.metrics.write_text('{"step": 1}\nx\n{"step": -1}\n{"step": true}\n{"step": 2, "train/lo')
    assert read_metrics(run) == [{"step": 1}]
    (record,) = caplog.records
    assert record.getMessage() == f"{run.metrics}: skipped line 2: not JSON, and 2 more such lines"
