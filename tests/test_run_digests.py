"""The digests tool: it finds every difference between reference runs, and no others."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

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
    changed, ((fact, value),) = FACTS | change, change.items()
    before = FACTS.get(fact, tool.ABSENT)
    assert tool.differences(FACTS, changed) == [(fact, before, value)]
    assert tool.differences(changed, FACTS) == [(fact, value, before)]
    assert tool.digest(changed) != tool.digest(FACTS)
    assert tool.digest(dict(reversed(FACTS.items()))) == tool.digest(FACTS)


def test_metrics_facts_exclude_times():
    lines = [
        {"step": 0, "tokens": 0, "seconds": 0.1, "val/loss": 4.1},
        {"step": 1, "tokens": 9, "seconds": 0.2, "train/loss": 4.0, "train/tokens_per_second": 9.0},
        {"step": 1, "tokens": 9, "seconds": 0.3, "val/loss": None},
        {"step": 1, "tokens": 9, "seconds": 0.3, "pushed": True},
    ]
    assert tool.metrics_facts(lines) == {
        "step 0: tokens": [0],
        "step 0: val/loss": [4.1],
        "step 1: tokens": [9, 9],
        "step 1: train/loss": [4.0],
        "step 1: val/loss": [None],
    }


def test_model_facts_are_names_dtypes_shapes_and_bytes(tmp_path):
    def facts(**tensors) -> tuple[str, ...]:
        save_file(tensors, tmp_path / "model.safetensors")
        return tuple(tool.model_facts(tmp_path).values())

    ones = np.ones((2, 2), dtype=np.float32)
    tiny = np.nextafter(ones, np.float32(2))
    variants = [{"a": ones}, {"a": tiny}, {"a": ones.reshape(4)}, {"a": ones.view(np.int32)}]
    variants.append({"a": ones, "b": ones})
    assert facts(a=ones) == facts(b=ones)
    assert len({facts(**tensors) for tensors in variants}) == len(variants)


def test_exit_status_is_1_if_anything_differs(monkeypatch, tmp_path, capsys):
    def run_as(pretrain) -> tuple[int, str]:
        monkeypatch.setitem(tool.RUNS, "pretrain", pretrain)
        status = tool.main(["--only", "pretrain", "resumed", "--against", str(before)])
        return status, capsys.readouterr().out

    def broken(bench, name):
        raise tool.RunError("exit status 1")

    before = tmp_path / "before.json"
    runs = {name: {"facts": FACTS} for name in ("pretrain", "resumed")}
    before.write_text(json.dumps({"environment": tool.environment(), "runs": runs}))
    monkeypatch.setitem(tool.RUNS, "resumed", lambda bench, name: bench.facts("pretrain"))
    assert run_as(lambda bench, name: FACTS)[0] == 0
    status, printed = run_as(lambda bench, name: FACTS | {"text": "the bat"})
    assert status == 1
    assert printed.count("1 of 3 values differ\n  text: the cat -> the bat") == 2
    status, printed = run_as(broken)
    assert status == 1
    assert printed.count("FAILED: exit status 1") == 2
