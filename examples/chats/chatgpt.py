"""Read conversations.json of a ChatGPT data export.

python examples/chats/chatgpt.py conversations.json chatgpt.jsonl
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rows import Message, write_rows


def read(path: Path) -> Iterator[Message]:
    for number, conversation in enumerate(json.loads(path.read_text(encoding="utf-8"))):
        nodes = conversation["mapping"]
        # Answers that were asked for again are branches of a tree; the path to current_node is
        # what the user saw last.
        branch = []
        name = conversation["current_node"]
        while name is not None:
            if len(branch) > len(nodes):
                raise ValueError("a message is its own parent")
            branch.append(nodes[name].get("message"))
            name = nodes[name].get("parent")
        for message in reversed(branch):
            if message is None or message["author"]["role"] not in ("user", "assistant"):
                continue
            # Other types are code of tools, thoughts and images.
            if message["content"]["content_type"] != "text":
                continue
            parts = message["content"]["parts"]
            text = "\n".join(part for part in parts if isinstance(part, str)).strip()
            if text:
                yield Message(str(number), None, message["author"]["role"], text)


if __name__ == "__main__":
    sys.exit(write_rows(read, "assistant", __doc__.splitlines()[0]))
