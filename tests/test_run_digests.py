"""The digests tool: it finds every difference between reference runs, and no others."""

import json
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
    changed, ((fact, value),) = FACTS | change, change.items()
    before = FACTS.get(fact, tool.ABSENT)
    assert tool.differences(FACTS, changed) == [(fact, before, value)]
    assert tool.differences(changed, FACTS) == [(fact, value, before)]
    assert tool.digest(changed) != tool.digest(FACTS)
    assert tool.digest(dict(reversed(FACTS.items()))) == tool.digest(FACTS)


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
