"""Rows of a file or data set -> conversations, preference pairs, labeled answers."""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# role (system, user, assistant or tool), content (a text, or None in an answer that calls tools),
# and other fields for the chat template
Message = dict[str, Any]


class Conversation(NamedTuple):
    """Messages, the tools that the assistant may call, and what is not learned."""

    messages: list[Message]
    tools: list[Any] | None = None
    # the answers that are not trained on, as indices of messages
    unlearned: frozenset[int] = frozenset()


Pair = tuple[Conversation, Conversation]  # the chosen answer and the rejected one
Labeled = tuple[Conversation, bool]  # whether its last answer is good

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "developer": "system",
    "observation": "tool",
    "tool_response": "tool",
}
_CALLS = ("function_call", "tool_call")  # roles whose text is a call of a tool, as JSON
_NEXT_ROLES = {
    None: ("user", "system"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
_MARKS = ("weight", "train", "loss")  # of OpenAI and Mistral, of axolotl, of ms-swift
_SYSTEM = ("system", "system_prompt")
# Columns of a conversation that have no place in the messages.
_UNSUPPORTED = (
    *("image", "images", "video", "videos", "audio", "audios"),
    *("functions", "chat_template_kwargs"),
)
_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's notes for a calculator: 48/2 = <<48/2=24>>24
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Anthropic's HH: a whole conversation as a text
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def conversation_of(row: Any) -> Conversation:
    """A row as messages. Raises ValueError if it is not a conversation, or none of its answers may
    be learned.

    A conversation may start with a system message; then user and assistant alternate, and the
    assistant is last. Messages of a tool follow an answer, and another answer follows them.
    """
    has = _columns(row)
    for columns, messages_of in _SHAPES.items():
        if has.issuperset(columns):
            conversation = _conversation(messages_of(row), row)
            answers = answers_of(conversation.messages)
            if conversation.unlearned.issuperset(answers):
                raise ValueError("no answer of the conversation is marked to be learned")
            return conversation
    raise _no_row(row, *_SHAPES)


def pair_of(row: Any, _: object = None) -> Pair:
    """A row as two conversations that differ in their last message, an answer: the chosen and the
    rejected one. Raises ValueError if it is none.

    `chosen` and `rejected` are texts or messages. A `prompt` of messages comes before those that
    do not begin with it, a text as the user's message before a single one.
    """
    if not {"chosen", "rejected"} <= _columns(row):
        raise _no_row(row, ("prompt", "chosen", "rejected"))
    chosen, rejected = _answered(row, "chosen"), _answered(row, "rejected")
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise ValueError("chosen and rejected differ before their last message")
    if chosen.messages == rejected.messages:
        raise ValueError("chosen and rejected are equal, which prefers nothing; leave the row out")
    return chosen, rejected


def labeled_of(row: Any, _: object = None) -> Labeled:
    """A row of prompt, completion and label as a conversation whose answer is good, or not.

    Prompt and completion are texts or messages, as of a pair. Raises ValueError if it is none.
    """
    if not {"completion", "label"} <= _columns(row):
        raise _no_row(row, ("prompt", "completion", "label"))
    if not isinstance(row["label"], bool):
        raise ValueError(f"label: expected true or false, got {row['label']!r:.40}")
    return _answered(row, "completion"), row["label"]


def answers_of(messages: list[Message]) -> list[int]:
    """The indices of the assistant's messages."""
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def fields_of(messages: list[Message]) -> Iterator[tuple[int, str]]:
    """The index and field of everything in the messages that has to change their tokens.

    What links the result of a tool with its call (`tool_call_id`, and the tool's `name`) may be
    left out by a template if the results are in the order of the calls.
    """
    calls: list[Any] = []
    for number, message in enumerate(messages):
        if message["role"] != "tool":
            calls = list(message.get("tool_calls", ()))
        call = calls.pop(0) if message["role"] == "tool" and calls else {}
        known = {"role": message["role"], "tool_call_id": call.get("id")}
        known["name"] = call.get("function", {}).get("name")
        for field, value in message.items():
            if not _is_empty(value) and known.get(field) != value:
                yield number, field


def texts_of(conversation: Conversation) -> Iterator[str]:
    """The texts of a conversation; what is no text is JSON."""
    for message in conversation.messages:
        for field, value in message.items():
            if field != "role" and value is not None:
                yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if conversation.tools:
        yield json.dumps(conversation.tools, ensure_ascii=False)


def _answered(row: dict[str, Any], column: str) -> Conversation:
    """The conversation of a row's prompt and the answer in a column. Only that is learned."""
    prompt, messages = _prompt_of(row), row[column]
    if isinstance(messages, str):
        if prompt is None and _SPEAKER.match(messages):
            messages = _from_transcript(messages)
        else:
            messages = [_answer(_without_prompt(messages, prompt or [], column))]
    elif isinstance(messages, dict):
        messages = [messages]
    if isinstance(messages, list):
        if prompt is None:
            if len(messages) == 1:
                before = row.get("messages") or row.get("conversations")
                if before is None:
                    raise ValueError(
                        f"{column} is an answer alone, and the row has no prompt; name its column "
                        "prompt, question or instruction"
                    )
                messages = [*_listed(before), *messages]
        elif isinstance(row.get("prompt"), list):
            if messages[: len(prompt)] != prompt:
                messages = [*prompt, *messages]
        elif len(messages) < 2:
            messages = [*prompt, *messages]
        else:
            asked = [message["content"] for message in map(_renamed, _listed(messages))]
            if prompt[0]["content"] not in asked:
                raise ValueError(f"prompt: {prompt[0]['content']!r:.40} is not in {column}")
    with _field(column):
        conversation = _conversation(messages, row)
        *earlier, last = answers_of(conversation.messages)
        if last in conversation.unlearned:
            raise ValueError(f"message {last + 1}: the answer is marked not to be learned")
    return conversation._replace(unlearned=frozenset(earlier))


def _prompt_of(row: dict[str, Any]) -> list[Message] | None:
    """The messages of the prompt of a pair, which has a column of its own; None without one."""
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return prompt
    if prompt is None:
        prompt = row.get("question")
    if prompt is None and row.get("instruction") is not None:
        return [_asked(row)]
    return None if prompt is None else [_user(prompt)]


def _columns(row: Any) -> set[str]:
    """The columns of a row that hold something."""
    return {key for key, value in row.items() if value is not None} if type(row) is dict else set()


def _no_row(row: Any, *shapes: tuple[str, ...]) -> ValueError:
    expected = " or ".join(" + ".join(columns) for columns in shapes)
    return ValueError(f"expected a row with {expected}; got {row!r:.80}")


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _answer(content: Any) -> Message:
    return {"role": "assistant", "content": content}


def _exchange(question: Any, answer: Any) -> list[Message]:
    return [_user(question), _answer(answer)]


def _asked(row: dict[str, Any]) -> Message:
    """The question of an instruction, and of its input (Alpaca) or context (Dolly)."""
    parts = [_text("instruction", row["instruction"])]
    for column in ("input", "context"):
        given = row.get(column)
        if given is not None and (not isinstance(given, str) or given.strip()):
            parts.append(_text(column, given))
    return _user("\n\n".join(map(str.strip, parts)))


def _from_prompt(row: dict[str, Any]) -> list[Message]:
    """A prompt and its completion, texts or messages. Answers in a prompt are not learned."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list):
        prompt = [
            {**_renamed(message), "train": False} if _is_answer(message) else message
            for message in _listed(prompt)
        ]
    else:
        prompt = [_user(prompt)]
    if isinstance(completion, str):
        completion = _without_prompt(completion, prompt, "completion")
    if not isinstance(completion, list):
        completion = [_answer(completion)]
    return [*prompt, *completion]


def _is_answer(message: Message) -> bool:
    renamed = _renamed(message)
    return renamed["role"] == "assistant" and not any(mark in renamed for mark in _MARKS)


def _from_transcript(text: str) -> list[Message]:
    """Anthropic's HH: turns that start with `Human:` or `Assistant:` after an empty line."""
    _, *turns = _SPEAKER.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[speaker], "content": content.strip()}
        for speaker, content in zip(turns[::2], turns[1::2], strict=True)
    ]


def _without_prompt(text: str, prompt: list[Message], column: str) -> str:
    """An answer's text. Of a transcript that begins with the prompt, it is the last turn.

    Raises ValueError for another transcript, whose questions would be learned as an answer.
    """
    turns = _from_transcript(text.lstrip()) if _SPEAKER.match(text.lstrip()) else []
    if len(turns) < 2:
        return text
    *asked, answer = turns
    known = [
        {"role": message["role"], "content": str(message["content"]).strip()}
        for message in map(_renamed, _listed(prompt))
        if message["role"] != "system"
    ]
    if asked != known or answer["role"] != "assistant":
        raise ValueError(
            f"{column}: a transcript of Human and Assistant, which does not begin with the prompt "
            "and end with an answer; leave out the prompt, or all turns but the answer"
        )
    return answer["content"]


def _replied(asked: Message, row: dict[str, Any], column: str) -> list[Message]:
    """A question and the answer in a column."""
    answer = row[column]
    if isinstance(answer, str):
        answer = _without_prompt(answer, [asked], column)
    return [asked, _answer(answer)]


def _from_choices(row: dict[str, Any]) -> list[Message]:
    choices, answer = row["choices"], row["answer"]
    if type(choices) is not list or type(answer) is not int:
        raise ValueError(
            "expected choices, a list of texts, and answer, the index of one, got "
            f"{choices!r:.40} and {answer!r:.40}"
        )
    if len(choices) > len(_LETTERS):
        raise ValueError(
            f"choices: {len(choices)} are more than the {len(_LETTERS)} letters that name them; "
            "leave the row out, or write the question and its answer as text"
        )
    if answer not in range(len(choices)):
        raise ValueError(
            f"answer: expected the index of one of {len(choices)} choices, which counts from 0, "
            f"got {answer}"
        )
    texts = (_text("choices", choice).strip() for choice in choices)
    lines = "\n".join(f"{_LETTERS[number]}. {text}" for number, text in enumerate(texts))
    question = _text("question", row["question"]).strip()
    asked = f"{question}\n\n{lines}\n\nAnswer with the letter only."
    return _exchange(asked, _LETTERS[answer])


def _from_question(row: dict[str, Any]) -> list[Message]:
    answer = row["answer"]
    if isinstance(answer, str) and "\n####" in answer:  # a solution of GSM8K, which ends in #### 72
        row = row | {"answer": _CALCULATION.sub("", answer)}
    return _replied(_user(row["question"]), row, "answer")


# The accepted rows: the columns of each shape, and its messages. The first that fits is taken.
_SHAPES: dict[tuple[str, ...], Callable[[dict[str, Any]], Any]] = {
    ("messages",): lambda row: row["messages"],
    ("conversations",): lambda row: row["conversations"],
    ("prompt", "completion"): _from_prompt,
    ("instruction", "output"): lambda row: _replied(_asked(row), row, "output"),
    ("instruction", "response"): lambda row: _replied(_asked(row), row, "response"),
    ("question", "choices", "answer"): _from_choices,
    ("question", "answer"): _from_question,
    ("question", "response"): lambda row: _replied(_user(row["question"]), row, "response"),
}


def _text(name: str, content: Any) -> str:
    if not isinstance(content, str) or not content.strip():
        raise ValueError(
            f"{name}: expected text, got {content!r:.40}; leave the row out, or fill it"
        )
    _check(content)
    return content


def _is_empty(value: Any) -> bool:
    """Whether a field has no content. Numbers and truth values always are content."""
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], {})


def _listed(messages: Any) -> list[Message]:
    if type(messages) is not list or not all(type(message) is dict for message in messages):
        raise _no_messages(messages)
    return messages


def _no_messages(messages: Any) -> ValueError:
    return ValueError(
        "expected a list of messages, objects with role and content, or from and value, got "
        f"{messages!r:.60}"
    )


def _renamed(message: Message) -> Message:
    """A message with ShareGPT's names of fields and roles in those of chat templates."""
    rest, role, content = dict(message), "role", "content"
    if message.get("from") is not None and "value" in message:
        role, content = "from", "value"
    if rest.get(role) is None or not (content in rest or rest.get("tool_calls")):
        raise _no_messages([message])
    named = rest.pop(role)
    renamed = {"role": _ROLES.get(named, named) if isinstance(named, str) else named}
    renamed["content"] = rest.pop(content, None)
    if named in _CALLS:
        renamed = {"role": "assistant", "content": None, "tool_calls": renamed["content"]}
    if clash := renamed.keys() & {key for key in rest if not _is_empty(rest[key])}:
        raise ValueError(f"{min(clash)}: is given twice, also as {role} or {content}")
    return rest | renamed


def _conversation(messages: Any, row: dict[str, Any]) -> Conversation:
    """The checked conversation of messages, and of the columns beside them."""
    for column in _UNSUPPORTED:
        if not _is_empty(row.get(column)):
            raise ValueError(f"{column}: is not supported in a conversation; leave the row out")
    for mark in _MARKS:
        if row.get(mark) not in (None, 1):
            raise ValueError(
                f"{mark}: {row[mark]!r:.40} beside the messages would be ignored; mark the answers "
                "themselves, or leave the row or the column out"
            )
    messages = [*_history(row), *_listed(messages)]
    if system := _system(row):
        renamed = [_renamed(message) for message in messages[:1]]
        if renamed and renamed[0]["role"] == "system":
            if renamed[0]["content"] != system:
                raise ValueError("system: the conversation has another system message")
        else:
            messages.insert(0, {"role": "system", "content": system})
    checked, unlearned, previous = [], set[int](), None
    for number, message in enumerate(messages, 1):
        with _field(f"message {number}"):
            learned, message = _message(message, previous)
        if message["role"] == "assistant" and not learned:
            unlearned.add(number - 1)
        checked.append(message)
        previous = message["role"]
    if previous != "assistant":
        raise ValueError("the last message has to be an answer of the assistant")
    with _field("tools"):
        tools = functions_of(row.get("tools"))
    return Conversation(checked, tools, frozenset(unlearned))


def _system(row: dict[str, Any]) -> str | None:
    texts = {_text(name, row[name]) for name in _SYSTEM if not _is_empty(row.get(name))}
    if len(texts) > 1:
        raise ValueError(f"{' and '.join(_SYSTEM)} differ")
    return next(iter(texts), None)


def _history(row: dict[str, Any]) -> list[Message]:
    """The exchanges before the row's own: LLaMA-Factory's pairs of a question and an answer."""
    history = row.get("history")
    if _is_empty(history):
        return []
    if type(history) is not list or not all(
        type(pair) is list and len(pair) == 2 for pair in history
    ):
        raise ValueError(f"history: expected a list of [question, answer], got {history!r:.40}")
    return [message for pair in history for message in _exchange(*pair)]


def _message(message: Message, previous: str | None) -> tuple[bool, Message]:
    """Whether a message is learned, and its fields that have content."""
    _check(message)
    renamed = _renamed(message)
    role, expected = renamed["role"], _NEXT_ROLES[previous]
    if role not in expected:
        raise ValueError(f"role: expected {' or '.join(expected)}, got {role!r:.40}")
    learned = True
    for mark in _MARKS:
        if (value := renamed.pop(mark, None)) is None:
            continue
        if value not in (0, 1) or (value and role != "assistant"):
            raise ValueError(
                f"{mark}: expected 0 or 1, and 1 for an answer only, got {value!r:.40}"
            )
        learned = learned and bool(value)
    calls = renamed.pop("tool_calls", None)
    content = renamed.pop("content")
    fields = {key: value for key, value in renamed.items() if not _is_empty(value)}
    with _field("tool_calls"):
        if calls := functions_of(calls):
            fields["tool_calls"] = calls
    if _is_empty(content) and role == "assistant" and "tool_calls" in fields:
        fields["content"] = content if isinstance(content, str) else None
    elif _is_empty(content) and role == "tool":  # a tool may find nothing
        fields["content"] = ""
    else:
        fields["content"] = _text("content", _joined(content))
    return learned, fields


def _joined(content: Any) -> Any:
    """The text of a content's parts."""
    if type(content) is not list:
        return content
    texts = []
    for part in content:
        given = {k: v for k, v in part.items() if v is not None} if type(part) is dict else part
        if type(given) is not dict or given.keys() != {"type", "text"} or given["type"] != "text":
            raise ValueError(
                "content: expected a text, or a list of parts of type text (images are not "
                f"supported), got {part!r:.60}"
            )
        texts.append(_text("text", given["text"]))
    return "".join(texts)


def functions_of(value: Any) -> list[Any] | None:
    """Tools, or calls of tools, in OpenAI's form; None if there are none. They may be JSON text.

    Raises ValueError if they are none.
    """
    if _is_empty(value):
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
    value = _without_null(value)
    if type(value) is dict and "function" not in value and "name" in value:
        value = {"type": "function", "function": value}
    function = value.get("function") if type(value) is dict else None
    if type(function) is not dict or not isinstance(function.get("name"), str):
        raise ValueError(f"expected a function with a name, got {value!r:.60}")
    if isinstance(arguments := function.get("arguments"), str):
        with _field("arguments"):
            function = function | {"arguments": _json(arguments.strip() or "{}")}
    return value | {"function": function}


@contextlib.contextmanager
def _field(name: str) -> Iterator[None]:
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
