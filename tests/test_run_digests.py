"""The digests tool: it finds every difference between reference runs, and no others."""

import json
import math

import pytest
from safetensors.numpy import save_file

import run_digests as tool

FACTS = {"step 1: train/loss": [2.5], "step 1: tokens": [256, 256], "text": "the cat"}
LINES = [
    {"step": 0, "tokens": 0, "seconds": 0.1, "val/loss": 4.1},
    {"step": 1, "tokens": 256, "seconds": 0.2, "train/loss": 4.0, "train/tokens_per_second": 9.0},
    {"step": 1, "tokens": 256, "seconds": 0.3, "val/loss": None},
    {"step": 1, "tokens": 256, "seconds": 0.3, "pushed": True},
]


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"step 1: train/loss": [math.nextafter(2.5, 3)]}, "step 1: train/loss"),
        ({"step 1: tokens": [256]}, "step 1: tokens"),
        ({"text": "the cat "}, "text"),
        ({"step 2: train/loss": [2.5]}, "step 2: train/loss"),
    ],
)
def test_changed_value_is_found_and_changes_the_digest(change, fact):
    changed = FACTS | change
    assert [found for found, _, _ in tool.differences(FACTS, changed)] == [fact]
    assert tool.differences(FACTS, changed) == [(fact, FACTS.get(fact, tool.ABSENT), changed[fact])]
    assert tool.differences(changed, FACTS) == [(fact, changed[fact], FACTS.get(fact, tool.ABSENT))]
    assert tool.digest(changed) != tool.digest(FACTS)


def test_equal_values_have_equal_digests_in_any_order():
    repeated = json.loads(json.dumps(dict(reversed(FACTS.items()))))
    assert tool.differences(FACTS, repeated) == []
    assert tool.digest(repeated) == tool.digest(FACTS)


def test_metrics_facts_exclude_times_and_follow_renamed_keys(monkeypatch):
    facts = {
        "step 0: tokens": [0],
        "step 0: val/loss": [4.1],
        "step 1: tokens": [256, 256],
        "step 1: train/loss": [4.0],
        "step 1: val/loss": [None],
    }
    assert tool.metrics_facts(LINES) == facts
    renamed = [
        {key.replace("val/", "validation/"): value for key, value in line.items()} for line in LINES
    ]
    assert tool.metrics_facts(renamed) != facts
    monkeypatch.setitem(tool.METRICS, "val/loss", ("validation/loss", "val/loss"))
    assert tool.metrics_facts(renamed) == tool.metrics_facts(LINES) == facts


def test_model_facts_are_names_dtypes_shapes_and_bytes(tmp_path):
    import numpy as np

    def facts(**tensors) -> list[str]:
        save_file(tensors, tmp_path / "model.safetensors")
        return list(tool.model_facts(tmp_path).values())

    names = np.ones((2, 2), dtype=np.float32)
    tiny = names.copy()
    tiny[0, 0] = np.nextafter(names[0, 0], np.float32(2))
    variants = [
        {"a": names},
        {"a": tiny},
        {"a": names.reshape(4)},
        {"a": names.view(np.int32)},
        {"a": names, "b": names},
    ]
    assert facts(a=names) == facts(b=names)
    assert len({tuple(facts(**tensors)) for tensors in variants}) == len(variants)


def test_renamed_knob_is_set_by_its_name_in_the_checkout(monkeypatch):
    before, after = "  --optim.old  meaning (--optim.older)\n", "  --optim.new_one  meaning\n"
    monkeypatch.setitem(tool.KNOBS, "optim.old", ("optim.new_one", "optim.old"))
    monkeypatch.setitem(tool.KNOBS, "optim.dropped", ("optim.dropped", None))
    assert [tool.knob_name("optim.old", text) for text in (before, after)] == [
        "optim.old",
        "optim.new_one",
    ]
    assert tool.knob_name("optim.dropped", after) is None
    with pytest.raises(tool.RunError, match=r"optim\.new: add the new name to KNOBS"):
        tool.knob_name("optim.new", after)


def test_exit_status_is_1_if_anything_differs(monkeypatch, tmp_path, capsys):
    before = str(tmp_path / "before.json")
    only = ["--only", "pretrain", "resumed"]
    monkeypatch.setitem(tool.RUNS, "pretrain", lambda bench: FACTS)
    monkeypatch.setitem(tool.RUNS, "resumed", lambda bench: bench.facts("pretrain"))
    assert tool.main([*only, "--json", before]) == 0
    assert tool.main([*only, "--against", before]) == 0
    monkeypatch.setitem(tool.RUNS, "pretrain", lambda bench: FACTS | {"text": "the bat"})
    capsys.readouterr()
    assert tool.main([*only, "--against", before]) == 1
    printed = capsys.readouterr().out
    assert printed.count("1 of 3 values differ\n  text: the cat -> the bat") == 2

    def broken(bench):
        raise tool.RunError("exit status 1")

    monkeypatch.setitem(tool.RUNS, "pretrain", broken)
    assert tool.main([*only, "--against", before]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: exit status 1" in printed
    assert "FAILED: it needs the run pretrain, which failed" in printed


def test_run_without_its_package_is_skipped_with_reason(monkeypatch, capsys):
    monkeypatch.setitem(tool.RUNS, "zero3", lambda bench: tool.needs("no_such_package"))
    assert tool.main(["--only", "zero3"]) == 0
    assert "zero3        skipped: no_such_package is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "{}", "[]", "not JSON"])
def test_invalid_file_to_compare_is_refused_first(tmp_path, content):
    file = tmp_path / "before.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as ended:
        tool.main(["--against", str(file)])
    assert ended.value.code == 2
