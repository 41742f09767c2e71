"""Messages of a row: as lists of objects, in the names of chat templates, and checked."""

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

# A message has a role (system, user, assistant or tool), content (a text, or None in an answer that
# calls tools), and other fields for the chat template.
Message = dict[str, Any]


class Conversation(NamedTuple):
    """Messages, the tools that the assistant may call, and what is not learned."""

    messages: list[Message]
    tools: list[Any] | None = None
    # The answers that are not trained on, as indices of messages.
    unlearned: frozenset[int] = frozenset()


_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "developer": "system",
    "observation": "tool",
    "tool_response": "tool",
}
# Roles whose text is a call of a tool, as JSON.
_CALLS = ("function_call", "tool_call")
# The roles that may follow a role; None is the beginning of a conversation.
_NEXT_ROLES = {
    None: ("user", "system"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
# The fields by which OpenAI and Mistral, axolotl, and ms-swift say whether an answer is learned.
MARKS = ("weight", "train", "loss")
_SYSTEM = ("system", "system_prompt")
# Columns of a conversation that have no place in the messages.
_UNSUPPORTED = (
    *("image", "images", "video", "videos", "audio", "audios"),
    *("functions", "chat_template_kwargs"),
)
_JSON = ("[", "{", " ", "\n")  # how JSON of messages may begin
_MESSAGES = ("messages", "conversations", "prompt", "chosen", "rejected", "completion")


def answers_of(messages: list[Message]) -> list[int]:
    """Return the indices of the assistant's messages."""
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def fields_of(messages: list[Message]) -> Iterator[tuple[int, str]]:
    """Yield the index and field of everything in the messages that has to change their tokens.

    What links the result of a tool with its call (`tool_call_id`, and the tool's `name`) may be
    left out by a template if the results are in the order of the calls.
    """
    # The results of tools are in the order of the calls, so a template need not write which call a
    # result belongs to. Each result takes the next call.
    calls: list[Any] = []
    for number, message in enumerate(messages):
        if message["role"] != "tool":
            calls = list(message.get("tool_calls", ()))
        call = calls.pop(0) if message["role"] == "tool" and calls else {}
        known = {"role": message["role"], "tool_call_id": call.get("id")}
        known["name"] = call.get("function", {}).get("name")
        for field, value in message.items():
            if not is_empty(value) and known.get(field) != value:
                yield number, field


def texts_of(conversation: Conversation) -> Iterator[str]:
    """Yield the texts of a conversation; what is no text is JSON."""
    for message in conversation.messages:
        for field, value in message.items():
            if field != "role" and value is not None:
                yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if conversation.tools:
        yield json.dumps(conversation.tools, ensure_ascii=False)


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
    """Whether a value is none of messages, or a list of objects already."""
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
    """A message of any layout as an object, {} if it is none."""
    message = _if_json(message)
    if isinstance(message, list) and all(type(pair) is tuple for pair in message):  # a map
        message = dict(message)
    return message if isinstance(message, dict) else {}


def _as_list(value: Any) -> Any:
    """Messages as a list of objects; what is none is left, to be refused with the row."""
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


def exchange(question: Any, answer: Any) -> list[Message]:
    """A question of the user and the assistant's answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def checked_text(name: str, content: Any) -> str:
    if not isinstance(content, str) or not content.strip():
        raise ValueError(
            f"{name}: expected text, got {content!r:.40}; leave the row out, or fill it"
        )
    _check(content)
    return content


def is_empty(value: Any) -> bool:
    """Whether a field has no content. Numbers and truth values always are content."""
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], {})


def listed(messages: Any) -> list[Message]:
    if type(messages) is not list or not all(type(message) is dict for message in messages):
        raise _no_messages(messages)
    return messages


def _no_messages(messages: Any) -> ValueError:
    return ValueError(
        "expected a list of messages, objects with role and content, or from and value, got "
        f"{messages!r:.60}"
    )


def standard_message(message: Message) -> Message:
    """Rename ShareGPT's fields and roles as chat templates call them."""
    rest = dict(message)
    role = "role"
    content = "content"
    if message.get("from") is not None and "value" in message:
        role = "from"
        content = "value"
    if rest.get(role) is None or not (content in rest or rest.get("tool_calls")):
        raise _no_messages([message])
    named = rest.pop(role)
    renamed = {"role": _ROLES.get(named, named) if isinstance(named, str) else named}
    renamed["content"] = rest.pop(content, None)
    # The text of such a message is the call: it becomes an answer with that call.
    if named in _CALLS:
        renamed = {"role": "assistant", "content": None, "tool_calls": renamed["content"]}
    if clash := renamed.keys() & {key for key in rest if not is_empty(rest[key])}:
        raise ValueError(f"{min(clash)}: is given twice, also as {role} or {content}")
    return rest | renamed


def checked_conversation(messages: Any, row: dict[str, Any]) -> Conversation:
    """Check messages and the other columns of their row, and return them as a conversation."""
    for column in _UNSUPPORTED:
        if not is_empty(row.get(column)):
            raise ValueError(f"{column}: is not supported in a conversation; leave the row out")
    for mark in MARKS:
        if row.get(mark) not in (None, 1):
            raise ValueError(
                f"{mark}: {row[mark]!r:.40} beside the messages would be ignored; mark the answers "
                "themselves, or leave the row or the column out"
            )
    # The exchanges and the system message that a row has in columns of their own come first.
    messages = [*_history(row), *listed(messages)]
    if system := _system(row):
        renamed = [standard_message(message) for message in messages[:1]]
        if renamed and renamed[0]["role"] == "system":
            if renamed[0]["content"] != system:
                raise ValueError("system: the conversation has another system message")
        else:
            messages.insert(0, {"role": "system", "content": system})
    checked = []
    unlearned = set[int]()
    previous = None  # the role of the message before
    for number, message in enumerate(messages, 1):
        with named_field(f"message {number}"):
            learned, message = _message(message, previous)
        if message["role"] == "assistant" and not learned:
            unlearned.add(number - 1)
        checked.append(message)
        previous = message["role"]
    if previous != "assistant":
        raise ValueError("the last message has to be an answer of the assistant")
    with named_field("tools"):
        tools = functions_of(row.get("tools"))
    return Conversation(checked, tools, frozenset(unlearned))


def _system(row: dict[str, Any]) -> str | None:
    texts = {checked_text(name, row[name]) for name in _SYSTEM if not is_empty(row.get(name))}
    if len(texts) > 1:
        raise ValueError(f"{' and '.join(_SYSTEM)} differ")
    return next(iter(texts), None)


def _history(row: dict[str, Any]) -> list[Message]:
    """Return the exchanges before the row's own: pairs of question and answer (LLaMA-Factory)."""
    history = row.get("history")
    if is_empty(history):
        return []
    if type(history) is not list or not all(
        type(pair) is list and len(pair) == 2 for pair in history
    ):
        raise ValueError(f"history: expected a list of [question, answer], got {history!r:.40}")
    return [message for pair in history for message in exchange(*pair)]


def _message(message: Message, previous: str | None) -> tuple[bool, Message]:
    """Whether a message is learned, and its fields that have content."""
    _check(message)
    renamed = standard_message(message)
    role = renamed["role"]
    expected = _NEXT_ROLES[previous]
    if role not in expected:
        raise ValueError(f"role: expected {' or '.join(expected)}, got {role!r:.40}")
    learned = True
    for mark in MARKS:
        if (value := renamed.pop(mark, None)) is None:
            continue
        if value not in (0, 1) or (value and role != "assistant"):
            raise ValueError(
                f"{mark}: expected 0 or 1, and 1 for an answer only, got {value!r:.40}"
            )
        learned = learned and bool(value)
    # What remains are fields for the chat template. null, "", [] and {} are no content.
    calls = renamed.pop("tool_calls", None)
    content = renamed.pop("content")
    fields = {key: value for key, value in renamed.items() if not is_empty(value)}
    with named_field("tool_calls"):
        if calls := functions_of(calls):
            fields["tool_calls"] = calls
    if is_empty(content) and role == "assistant" and "tool_calls" in fields:
        fields["content"] = content if isinstance(content, str) else None
    elif is_empty(content) and role == "tool":  # a tool may find nothing
        fields["content"] = ""
    else:
        fields["content"] = checked_text("content", _joined(content))
    return learned, fields


def _joined(content: Any) -> Any:
    """Return the text of a content's parts."""
    if type(content) is not list:
        return content
    texts = []
    # null stands for a field of other rows in tables.
    for part in content:
        given = {k: v for k, v in part.items() if v is not None} if type(part) is dict else part
        if type(given) is not dict or given.keys() != {"type", "text"} or given["type"] != "text":
            raise ValueError(
                "content: expected a text, or a list of parts of type text (images are not "
                f"supported), got {part!r:.60}"
            )
        texts.append(checked_text("text", given["text"]))
    return "".join(texts)


def functions_of(value: Any) -> list[Any] | None:
    """Tools, or calls of tools, in OpenAI's form; None if there are none. They may be JSON text.

    Raises ValueError if they are none.
    """
    if is_empty(value):
        return None
    _check(value)
    if isinstance(value, str):
        value = _json(value)
    items = value if type(value) is list else [] if value is None else [value]
    return [_function(item) for item in items] or None


def _json(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"expected JSON, got {text!r:.40}") from None
    _check(value)
    return value


def _function(value: Any) -> dict[str, Any]:
    """A tool, or a call of one: `{"type": "function", "function": {...}}`.

    null is no content: tables write it for the fields of other rows. Arguments that are JSON text,
    as OpenAI's are, become what they say, which is what chat templates expect.
    """
    # A bare {"name": ..., "arguments": ...} is a function without its wrapper.
    value = _without_null(value)
    if type(value) is dict and "function" not in value and "name" in value:
        value = {"type": "function", "function": value}
    function = value.get("function") if type(value) is dict else None
    if type(function) is not dict or not isinstance(function.get("name"), str):
        raise ValueError(f"expected a function with a name, got {value!r:.60}")
    # OpenAI writes the arguments as JSON text, and templates would put quotes around it again.
    if isinstance(arguments := function.get("arguments"), str):
        with named_field("arguments"):
            function = function | {"arguments": _json(arguments.strip() or "{}")}
    return value | {"function": function}


@contextlib.contextmanager
def named_field(name: str) -> Iterator[None]:
    """Context in which a ValueError gets the name of a field."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _without_null(value: Any) -> Any:
    if type(value) is dict:
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if type(value) is list else value


def _check(value: Any, levels: int = 100) -> None:
    """Raises ValueError unless a value is text, a number or null, or lists and objects of them, not
    too many inside of another. JSON can escape half a character, which UTF-8 cannot encode.
    """
    if isinstance(value, str):
        value.encode()
    elif type(value) in (list, dict) and not levels:
        raise ValueError("has too many lists and objects inside of each other")
    elif type(value) is list:
        for item in value:
            _check(item, levels - 1)
    elif type(value) is dict:
        for name, item in value.items():
            if not isinstance(name, str):
                raise ValueError(f"{name!r:.40} is no name of a field")
            name.encode()
            _check(item, levels - 1)
    elif value is not None and type(value) not in (bool, int):
        if type(value) is float and math.isfinite(value):
            return
        raise ValueError(f"{value!r:.40} is no text, number, list or object")
