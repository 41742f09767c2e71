"""Rows of a file or data set -> conversations."""

from collections.abc import Iterator
from pathlib import Path

from nanogpt_hf.data.files import check_text, read_rows
from nanogpt_hf.errors import DataError

Conversation = list[dict[str, str]]  # [{"role": system, user or assistant, "content": text}, ...]

_SHAPES = "messages, prompt and completion, or instruction and output (input may be left out)"


def read_conversations(path: Path) -> Iterator[Conversation]:
    """The conversations of a file. Raises DataError with file and line for a row that is not a conversation."""
    for where, row in read_rows(path):
        try:
            yield conversation_of(row)
        except ValueError as error:
            raise DataError(f"{path}: {where}: {error}") from None


def conversation_of(row: object) -> Conversation:
    """A row as messages. Raises ValueError if it is not a conversation.

    A conversation may start with a system message; then user and assistant alternate, and the assistant is last.
    """
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with {_SHAPES}, got {row!r:.40}")
    has = {key for key, value in row.items() if value is not None}
    if "messages" in has:
        return _checked(_named_messages(row["messages"]))
    if has >= {"prompt", "completion"}:
        return _checked([("prompt", "user", row["prompt"]), ("completion", "assistant", row["completion"])])
    if has >= {"instruction", "output"}:
        _require_text("instruction", row["instruction"])
        more = row.get("input") or ""
        if not isinstance(more, str):
            raise ValueError(f"input holds {more!r:.40}, not text")
        question = f"{str(row['instruction']).strip()}\n\n{more.strip()}".strip()
        return _checked([("instruction", "user", question), ("output", "assistant", row["output"])])
    raise ValueError(f"expected {_SHAPES}; it has: {', '.join(map(str, row)) or 'nothing'}")


def _named_messages(messages: object) -> list[tuple[str, object, object]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages: expected a list of objects with role and content, got {messages!r:.40}")
    named = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"message {number}: expected an object with role and content, got {message!r:.60}")
        named.append((f"message {number}", message["role"], message["content"]))
    return named


def _require_text(name: str, content: object) -> None:
    if not isinstance(content, str):
        raise ValueError(f"{name} holds {content!r:.40}, not text")
    if not content.strip():
        raise ValueError(f"{name} is empty; leave the row out, or fill it")
    check_text(content)


def _checked(named: list[tuple[str, object, object]]) -> Conversation:
    expected = "user"
    for number, (name, role, content) in enumerate(named):
        if role not in ("system", "user", "assistant"):
            raise ValueError(f"{name}: role {role!r:.40}: expected system, user or assistant")
        if role != expected and (role, number) != ("system", 0):
            raise ValueError(f"{name}: expected the {expected}'s turn, got the {role}'s")
        if role != "system":
            expected = "assistant" if role == "user" else "user"
        _require_text(name, content)
    if named[-1][1] != "assistant":
        raise ValueError(f"the last message is the {named[-1][1]}'s: expected an answer of the assistant")
    return [{"role": str(role), "content": str(content)} for _, role, content in named]
