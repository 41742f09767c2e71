"""Rows of a file or data set -> conversations, preference pairs, labeled answers."""

import re
from collections.abc import Callable
from typing import Any

Conversation = list[dict[str, str]]  # [{"role": system, user or assistant, "content": text}, ...]
Pair = tuple[Conversation, Conversation]  # the chosen answer and the rejected one
Labeled = tuple[Conversation, bool]  # whether its last answer is good

_Turns = list[tuple[Any, Any]]  # role and content of each message, not checked yet

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's notes for a calculator: 48/2 = <<48/2=24>>24
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def conversation_of(row: Any) -> Conversation:
    """A row as messages. Raises ValueError if it is not a conversation.

    A conversation may start with a system message; then user and assistant alternate, and the
    assistant is last.
    """
    has = _columns(row)
    for columns, turns_of in _SHAPES.items():
        if has.issuperset(columns):
            return _checked(turns_of(row))
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
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected differ before their last message")
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


def _answered(row: dict[str, Any], column: str) -> Conversation:
    """The conversation of `prompt` and the answer in a column."""
    prompt, messages = row.get("prompt"), row[column]
    if isinstance(messages, str):
        messages = [{"role": "assistant", "content": messages}]
    if isinstance(messages, list):
        if isinstance(prompt, list) and messages[: len(prompt)] != prompt:
            messages = [*prompt, *messages]
        elif isinstance(prompt, str) and len(messages) == 1:
            messages = [{"role": "user", "content": prompt}, *messages]
    try:
        return _checked(_from_messages(messages))
    except ValueError as error:
        raise ValueError(f"{column}: {error}") from None


def _columns(row: Any) -> set[str]:
    """The columns of a row that hold something."""
    return {key for key, value in row.items() if value is not None} if type(row) is dict else set()


def _no_row(row: Any, *shapes: tuple[str, ...]) -> ValueError:
    expected = " or ".join(" + ".join(columns) for columns in shapes)
    return ValueError(f"expected a row with {expected}; got {row!r:.80}")


def _from_messages(messages: Any) -> _Turns:
    try:
        return [
            (_SHAREGPT_ROLES.get(message["from"], message["from"]), message["value"])
            if "from" in message and "value" in message  # ShareGPT
            else (message["role"], message["content"])
            for message in messages
        ]
    except (TypeError, LookupError):
        raise ValueError(
            "expected a list of messages, objects with role and content, or from and value, got "
            f"{messages!r:.60}"
        ) from None


def _from_instruction(row: dict[str, Any]) -> _Turns:
    parts = [_text("instruction", row["instruction"])]
    if row.get("input"):
        parts.append(_text("input", row["input"]))
    return [("user", "\n\n".join(map(str.strip, parts))), ("assistant", row["output"])]


def _from_choices(row: dict[str, Any]) -> _Turns:
    choices, answer = row["choices"], row["answer"]
    if type(choices) is not list or type(answer) is not int or answer not in range(len(choices)):
        raise ValueError(
            "expected choices, a list of texts, and answer, the index of one, got "
            f"{choices!r:.40} and {answer!r:.40}"
        )
    texts = (_text("choices", choice).strip() for choice in choices)
    lines = "\n".join(f"{letter}. {text}" for letter, text in zip(_LETTERS, texts, strict=False))
    question = _text("question", row["question"]).strip()
    asked = f"{question}\n\n{lines}\n\nAnswer with the letter only."
    return [("user", asked), ("assistant", _LETTERS[answer])]


def _from_question(row: dict[str, Any]) -> _Turns:
    answer = row["answer"]
    if isinstance(answer, str) and "\n####" in answer:  # a solution of GSM8K, which ends in #### 72
        answer = _CALCULATION.sub("", answer)
    return [("user", row["question"]), ("assistant", answer)]


# The accepted rows: the columns of each shape, and its messages. The first that fits is taken.
_SHAPES: dict[tuple[str, ...], Callable[[dict[str, Any]], _Turns]] = {
    ("messages",): lambda row: _from_messages(row["messages"]),
    ("conversations",): lambda row: _from_messages(row["conversations"]),
    ("prompt", "completion"): lambda row: [
        ("user", row["prompt"]),
        ("assistant", row["completion"]),
    ],
    ("instruction", "output"): _from_instruction,
    ("question", "choices", "answer"): _from_choices,
    ("question", "answer"): _from_question,
}


def _text(name: str, content: Any) -> str:
    if not isinstance(content, str) or not content.strip():
        raise ValueError(
            f"{name}: expected text, got {content!r:.40}; leave the row out, or fill it"
        )
    content.encode()  # JSON can escape half a character, which UTF-8 cannot encode
    return content


def _checked(turns: _Turns) -> Conversation:
    expected = "user"
    for number, (role, content) in enumerate(turns, 1):
        if role != expected and (role, number) != ("system", 1):
            raise ValueError(f"message {number}: role: expected {expected}, got {role!r:.40}")
        if role != "system":
            expected = "assistant" if role == "user" else "user"
        _text(f"message {number}", content)
    if not turns or turns[-1][0] != "assistant":
        raise ValueError("the last message has to be an answer of the assistant")
    return [{"role": role, "content": content} for role, content in turns]
