"""Turn messages of a chat into rows to fine-tune on: conversations of user and assistant in turns.

The readers in this folder yield messages; `write_rows` is the command that each of them is.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path


@dataclass(frozen=True)
class Message:
    """A message: which conversation it belongs to, when it was sent (None: unknown), by whom."""

    chat: str
    time: datetime | None
    sender: str
    text: str


def conversations(messages: Iterable[Message], me: str, gap: timedelta) -> Iterator[list[dict]]:
    """Yield the conversations that teach a model to answer as `me`.

    A pause longer than `gap`, or another chat, begins a new conversation. Messages of the same
    side are one turn, a line each. A conversation begins with the other side and ends with `me`:
    messages before and after are left out, and so is a conversation without an answer. In a
    group, each message of the others begins with its sender.
    """
    turns: list[dict] = []
    senders: dict[str, set[str]] = {}
    messages = list(messages)
    for message in messages:
        senders.setdefault(message.chat, set()).add(message.sender)
    before = None
    for message in messages:
        if before is not None and is_new_conversation(before, message, gap):
            yield from complete(turns)
            turns = []
        before = message
        role = "assistant" if message.sender == me else "user"
        is_group = len(senders[message.chat] - {me}) > 1
        text = f"{message.sender}: {message.text}" if is_group and role == "user" else message.text
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n{text}"
        elif turns or role == "user":
            turns.append({"role": role, "content": text})
    yield from complete(turns)


def is_new_conversation(before: Message, message: Message, gap: timedelta) -> bool:
    if before.chat != message.chat:
        return True
    return bool(before.time and message.time and message.time - before.time > gap)


def complete(turns: list[dict]) -> list[list[dict]]:
    """The conversation up to its last answer, in a list; an empty list if there is none."""
    end = len(turns) - (bool(turns) and turns[-1]["role"] == "user")
    return [turns[:end]] if end else []


def write_rows(read: Callable[[Path], Iterable[Message]], me: str | None, description: str) -> int:
    """Command of a reader: read an export, write JSON lines. `me` None: --me is asked for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("export", type=Path, help="the file that the service has exported")
    parser.add_argument("rows", type=Path, help="the .jsonl to write")
    if me is None:
        parser.add_argument("--me", required=True, help="whose answers to learn, as named there")
        parser.add_argument(
            "--gap", type=float, default=6, help="hours of silence that end a conversation (6)"
        )
    arguments = parser.parse_args()
    try:
        messages = list(read(arguments.export))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"{arguments.export}: not an export that this reads: {error!r}", file=sys.stderr)
        return 2
    answering = me or arguments.me
    names = sorted({message.sender for message in messages})
    if answering not in names:
        known = ", ".join(names) or "none"
        reason = f"no message is from {answering!r}; senders: {known}"
        print(f"{arguments.export}: {reason}", file=sys.stderr)
        return 2
    gap = timedelta(hours=getattr(arguments, "gap", 24 * 365 * 100))
    rows = list(conversations(messages, answering, gap))
    lines = [json.dumps({"messages": turns}, ensure_ascii=False) for turns in rows]
    arguments.rows.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    answers = sum(turn["role"] == "assistant" for turns in rows for turn in turns)
    print(f"{arguments.rows}: {len(rows)} conversations with {answers} answers")
    return 0
