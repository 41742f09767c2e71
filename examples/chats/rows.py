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
    if before.time is None or message.time is None:
        return False
    # Some exports state the zone of some times only.
    return message.time.replace(tzinfo=None) - before.time.replace(tzinfo=None) > gap


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
        rows = read_rows(
            read, arguments.export, me or arguments.me, getattr(arguments, "gap", None)
        )
        write_whole(arguments.rows, arguments.export, rows)
    except (OSError, ValueError) as error:
        # An OSError has the file that it is about, whichever of the two that is.
        about = "" if isinstance(error, OSError) else f"{arguments.export}: "
        print(f"{about}{error}", file=sys.stderr)
        return 2
    answers = sum(turn["role"] == "assistant" for turns in rows for turn in turns)
    print(f"{arguments.rows}: {len(rows)} conversations with {answers} answers")
    return 0


def read_rows(
    read: Callable[[Path], Iterable[Message]], export: Path, me: str, gap: float | None
) -> list[list[dict]]:
    """The conversations of an export. Raises ValueError if it cannot be read, or has no `me`."""
    if gap is not None and not 0 <= gap <= 1e6:
        raise ValueError(f"--gap {gap:g}: expected hours, from 0 to a million")
    try:
        messages = list(read(export))
    # Services change their exports, so anything may be missing or of another type.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an export that this reads: {error!r:.200}") from None
    for message in messages:
        if not isinstance(message.sender, str) or not isinstance(message.text, str):
            raise ValueError(f"not an export that this reads: a message is {message!r:.100}")
    names = sorted({message.sender for message in messages})
    if me not in names:
        raise ValueError(f"no message is from {me!r}; senders: {', '.join(names) or 'none'}")
    # Assistants' chats are apart already.
    hours = timedelta.max if gap is None else timedelta(hours=gap)
    return list(conversations(messages, me, hours))


def write_whole(path: Path, export: Path, rows: list[list[dict]]) -> None:
    """Write JSON lines in one rename. Raises ValueError if that would replace the export, OSError
    if it would replace what is no file, such as a device.
    """
    if path.exists() and path.samefile(export):
        raise ValueError("is also the file to write; name another one")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path}: is no file; name another one")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: is in no folder; name another one")
    lines = [json.dumps({"messages": turns}, ensure_ascii=False) for turns in rows]
    partial = path.with_name(f".{path.name}.partial")
    try:
        # Half of a pair of surrogates, which JSON can write, has no bytes in UTF-8.
        partial.write_text("".join(f"{line}\n" for line in lines), "utf-8", errors="replace")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
