"""Messages of a row, checked, with the fields and roles by which chat templates know them."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from nanogpt_hf.data.tools import functions_of
from nanogpt_hf.data.values import check_value, checked_text, is_empty, named_field

# A message has a role (system, user, assistant or tool), content (a text, or None in an answer that
# calls tools), and other fields for the chat template.
Message = dict[str, Any]
THOUGHT = "reasoning_content"  # the field with the thought of an answer


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


def spoken(content: str, thought: str) -> Message:
    """An answer of the assistant, with its thought if it has one."""
    return {"role": "assistant", "content": content} | ({THOUGHT: thought} if thought else {})


def exchange(question: Any, answer: Any) -> list[Message]:
    """A question of the user and the assistant's answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


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
    check_value(message)
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
