"""What makes a file that this package wrote damaged: its encoding, its JSON, the types of its
fields; one warning for what is skipped.
"""

import json
from dataclasses import dataclass
from typing import Any, TypedDict

import pytest

from nanogpt_hf.errors import DamagedFileError
from nanogpt_hf.own_files import as_type, read_json
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.runs.provenance import branched_at, read_starts, read_verifications


@dataclass
class Size:
    width: int
    ratio: float
    names: list[str] | None = None


class Open(TypedDict):
    size: dict[str, int]


@pytest.mark.parametrize(
    ("value", "kind", "problem"),
    [
        ({"width": 1, "ratio": 2}, Size, ""),
        ({"width": 1, "ratio": 0.5, "names": ["a"]}, Size, ""),
        ({"size": {"a": 1}, "more": [1]}, Open, ""),
        ([1, None], list[Any], ""),
        ({"width": 1}, Size, "ratio: is missing"),
        ({"width": 1, "ratio": 2, "more": 3}, Size, "more: unknown field"),
        ({"width": True, "ratio": 2}, Size, "width: expected an integer, got True"),
        ({"width": 1, "ratio": "2"}, Size, "ratio: expected a number, got '2'"),
        ({"width": 1, "ratio": 2, "names": [1]}, Size, r"names\[0\]: expected a text, got 1"),
        ({"width": 1, "ratio": 2, "names": "a"}, Size, "names: expected a list, got 'a'"),
        ({"size": {"a": None}}, Open, "size.a: expected an integer, got None"),
        ({}, Open, "size: is missing"),
        (None, Open, "content: expected a mapping of fields, got None"),
        ([], dict[str, int], "content: expected a mapping of fields, got "),
    ],
)
def test_types_of_fields(value, kind, problem):
    if problem:
        with pytest.raises(ValueError, match=problem):
            as_type(value, kind)
    else:
        as_type(value, kind)


# Deeper than any Python reads.
DEPTH = 200_000
DEEP = "[" * DEPTH
NOT_JSON = {
    "empty": b"",
    "cut": b'{"a": 1, "b',
    "no UTF-8": b'{"a": "\xff"}',
    "deep": DEEP.encode(),
    "deep and closed": f"{DEEP}{']' * DEPTH}".encode(),
    "a long number": b"1" * 5000,
}


@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON)
def test_content_that_is_no_json(tmp_path, content):
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError) as raised:
        read_json(path, Any)
    assert str(raised.value).startswith(f"{path}: is damaged: ")
    assert len(str(raised.value).splitlines()) == 1


def test_file_that_is_missing_or_a_folder(tmp_path):
    for name, problem in (("none", "is missing"), ("", "cannot be read: Is a directory")):
        with pytest.raises(DamagedFileError, match=problem):
            read_json(tmp_path / name, Any)


GOOD = {"step": 1, "tokens": 8, "seconds": 0.5, "train/loss": None}
BAD_LINES = [
    *NOT_JSON.values(),
    *(json.dumps(tree).encode() for tree in (5, [1], None, {}, "x", True)),
    *(json.dumps({"step": step}).encode() for step in (None, "1", -1, 1.0, 10**30, True)),
    *(json.dumps(GOOD | {"tokens": tokens}).encode() for tokens in (None, "1", -1, 1.5)),
    *(json.dumps(GOOD | {"val/loss": loss}).encode() for loss in ("1", [1], float("nan"), 10**400)),
    *(json.dumps(GOOD | {"samples": texts}).encode() for texts in (None, [1], {}, [{"text": 1}])),
]


@pytest.mark.parametrize("line", BAD_LINES)
def test_damaged_line_of_metrics_is_skipped_with_one_warning(tmp_path, caplog, line):
    run = RunFolder(tmp_path)
    good = json.dumps(GOOD).encode()
    run.metrics.write_bytes(b"\n".join([good, line, good, b""]))
    assert read_metrics(run) == [GOOD, GOOD]
    assert read_metrics(run) == [GOOD, GOOD]
    expected = [f"{run.metrics}: skipped 1 damaged line, the first in line 2"] * bool(line)
    assert [record.getMessage() for record in caplog.records] == expected


START = {"step": 0, "processes": 1, "precision": "fp32", "fingerprint": {"threads": "1"}, "x": [1]}
BAD_STARTS = [
    *(None, 5, "x", []),
    *(START | {"step": step} for step in (None, "0", -1)),
    *(START | {"processes": count} for count in (None, "1", 0)),
    *(START | {"precision": precision} for precision in (None, 32)),
    *(START | {"dynamo": name} for name in (None, 5, "", "foo", "inductor, foo", "no, regional")),
    *(START | {"fingerprint": print} for print in (None, [], {"id": 1}, {"threads": "x"})),
    *(START | {"fingerprint": {"threads": "0"}}, START | {"branch_of": 5}),
]


@pytest.mark.parametrize("start", BAD_STARTS)
def test_damaged_start_is_left_out_with_one_warning(tmp_path, caplog, start):
    run = RunFolder(tmp_path)
    run.machine.write_text(json.dumps({"starts": [START, start, START]}))
    assert read_starts(run) == read_starts(run) == [START, START]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{run.machine}: skipped start 2, which is damaged: ")


NO_STARTS = [*NOT_JSON.values(), b"null", b"[]", b"{}", b'{"starts": 5}', b'{"starts": null}']


@pytest.mark.parametrize("content", NO_STARTS)
def test_damaged_machine_file_has_no_starts(tmp_path, caplog, content):
    run = RunFolder(tmp_path)
    assert read_starts(run) == []
    run.machine.write_bytes(content)
    assert read_starts(run) == []
    assert branched_at(run) == (0, "")
    assert len(caplog.records) == 1


def test_run_that_is_no_branch_begins_at_0_though_its_first_start_is_lost(tmp_path):
    run = RunFolder(tmp_path)
    run.machine.write_text(json.dumps({"starts": [START | {"step": 40}]}))
    assert branched_at(run) == (0, "")


def test_damaged_verification_is_skipped(tmp_path):
    run = RunFolder(tmp_path)
    event = {"from": 0, "step": 2, "result": "equal", "time": "now"}
    event["machine"] = "here"
    lines = [event, 5, event | {"step": "2"}, event | {"result": None}, event]
    run.verified.write_text("\n".join(map(json.dumps, lines)))
    assert read_verifications(run) == [event, event]
