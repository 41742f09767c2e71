"""Read chats that Telegram Desktop has exported as JSON (result.json).

python examples/chats/telegram.py result.json chats.jsonl --me "Ada Lovelace"
"""

import json
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from rows import Message, write_rows


def read(path: Path) -> Iterator[Message]:
    export = json.loads(path.read_text(encoding="utf-8"))
    # The export of an account has a list of chats, the export of one chat is that chat.
    chats = export["chats"]["list"] if "chats" in export else [export]
    for number, chat in enumerate(chats):
        for message in chat["messages"]:
            # Others are of type "service": calls, pinned messages, who joined.
            if message["type"] != "message":
                continue
            text = text_of(message["text"]).strip()
            if text and message.get("from"):
                time = datetime.fromisoformat(message["date"])
                yield Message(f"{number} {chat.get('name')}", time, message["from"], text)


def text_of(parts: str | list) -> str:
    """Text with links or formatting is a list of strings and of objects with a text."""
    if isinstance(parts, str):
        return parts
    return "".join(part if isinstance(part, str) else part["text"] for part in parts)


if __name__ == "__main__":
    sys.exit(write_rows(read, None, __doc__.splitlines()[0]))
