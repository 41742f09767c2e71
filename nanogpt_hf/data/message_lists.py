"""Messages as lists of objects, whatever wrote the file: an object of lists, maps or JSON text."""

import contextlib
import json
from typing import Any

_JSON = ("[", "{", " ", "\n")  # how JSON of messages may begin
# The columns that may hold messages.
_MESSAGES = ("messages", "conversations", "prompt", "chosen", "rejected", "completion")


def unpacked(row: Any) -> Any:
    """A row whose messages are lists of objects.

    `datasets` and polars write them as an object of lists, too, duckdb as maps, and all as JSON
    text. A prompt and answers are text unless all of them are JSON of messages.
    """
    if type(row) is not dict or all(map(_is_listed, map(row.get, _MESSAGES))):
        return row
    parsed = {
        column: _if_json(row[column]) for column in ("messages", "conversations") if column in row
    }
    # A text that looks like JSON may be an answer in JSON. It is taken for messages only if all
    # answers of the row, or prompt and completion, are.
    answers = [name for name in ("chosen", "rejected", "completion") if name in row]
    if answers == ["completion"]:
        answers.append("prompt")
    messages = {name: _json_messages(row.get(name)) for name in (*answers, "prompt")}
    if answers and all(messages[name] for name in answers):
        parsed |= {name: value for name, value in messages.items() if value}
    row = row | parsed
    return row | {name: _as_list(row[name]) for name in _MESSAGES if name in row}


def _is_listed(value: Any) -> bool:
    """Whether a value has no messages, or is a list of objects already."""
    if isinstance(value, list):
        return all(type(message) is dict for message in value)
    return value is None or (isinstance(value, str) and value[:1] not in _JSON)


def _if_json(value: Any) -> Any:
    """Read a JSON text; return another value as it is."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _json_messages(value: Any) -> list[Any] | None:
    """Return the messages of a value, which may be JSON text; None if it is another text."""
    value = _as_list(_if_json(value))
    is_list = isinstance(value, list) and value
    return value if is_list and all({"role", "from"} & set(_object(m)) for m in value) else None


def _object(message: Any) -> dict[str, Any]:
    """A message of any layout as an object; {} for another value."""
    message = _if_json(message)
    if isinstance(message, list) and all(type(pair) is tuple for pair in message):  # a map
        message = dict(message)
    return message if isinstance(message, dict) else {}


def _as_list(value: Any) -> Any:
    """Messages as a list of objects. Another value is returned, and refused with its row."""
    if isinstance(value, dict):
        parts = {name: part for name, part in value.items() if part is not None}
        if not parts or not all(isinstance(part, list) for part in parts.values()):
            return value
        if len({len(part) for part in parts.values()}) > 1:
            raise ValueError("the lists of its messages have different lengths")
        # {"role": ["user", ...], "content": ["Why?", ...]} -> a message for each place
        messages = zip(*parts.values(), strict=True)
        return [dict(zip(parts, message, strict=True)) for message in messages]
    if isinstance(value, list):
        return [_object(message) or message for message in value]
    return value
