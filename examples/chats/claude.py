"""Read conversations.json of a Claude data export.

python examples/chats/claude.py conversations.json claude.jsonl
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rows import Message, write_rows


def read(path: Path) -> Iterator[Message]:
    for conversation in json.loads(path.read_text(encoding="utf-8")):
        for message in conversation["chat_messages"]:
            # `content` has a part for each text, tool and thought; older exports have `text` alone.
            parts = message.get("content") or [{"type": "text", "text": message["text"]}]
            texts = [part["text"] for part in parts if part["type"] == "text"]
            text = "\n".join(texts).strip()
            if text:
                yield Message(conversation["uuid"], None, message["sender"], text)


if __name__ == "__main__":
    sys.exit(write_rows(read, "assistant", __doc__.splitlines()[0]))
