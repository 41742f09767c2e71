"""Rows of a file or data set -> conversations."""

import re
from collections.abc import Callable
from typing import Any

from nanogpt_hf.data.files import check_text

Conversation = list[dict[str, str]]  # [{"role": system, user or assistant, "content": text}, ...]
Pair = tuple[Conversation, Conversation]  # the chosen answer and the rejected one
Labeled = tuple[Conversation, bool]  # whether its last answer is good

# the name of each message in error messages, its role and its content
_Named = list[tuple[str, object, object]]

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's notes for a calculator: 48/2 = <<48/2=24>>24
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def conversation_of(row: object) -> Conversation:
    """A row as messages. Raises ValueError if it is not a conversation.

    A conversation may start with a system message; then user and assistant alternate, and the
    assistant is last.
    """
    if not isinstance(row, dict):
        raise ValueError(f"expected a row with {_shapes()}, got {row!r:.40}")
    has = {key for key, value in row.items() if value is not None}
    for keys, named_messages in _SHAPES.items():
        if has.issuperset(keys):
            return _checked(named_messages(row))
    raise ValueError(
        f"expected a row with {_shapes()}; it has: {', '.join(map(str, row)) or 'nothing'}"
    )


def pair_of(row: object, _: object = None) -> Pair:
    """A row as two conversations that differ in their last message, an answer: the chosen and the
    rejected one. Raises ValueError if it is none.

    `chosen` and `rejected` are texts or messages. A `prompt` of messages comes before those that
    do not begin with it, a text as the user's message before a single one.
    """
    if not isinstance(row, dict) or not {"chosen", "rejected"} <= row.keys():
        has = ", ".join(map(str, row)) if isinstance(row, dict) else repr(row)[:40]
        raise ValueError(f"expected a row with prompt, chosen and rejected; it has: {has}")
    prompt = row.get("prompt")
    pair = []
    for name in ("chosen", "rejected"):
        messages = row[name]
        if isinstance(messages, str):
            messages = [{"role": "assistant", "content": messages}]
        if isinstance(messages, list) and isinstance(prompt, list):
            if messages[: len(prompt)] != prompt:
                messages = [*prompt, *messages]
        elif isinstance(messages, list) and isinstance(prompt, str) and len(messages) == 1:
            messages = [{"role": "user", "content": prompt}, *messages]
        try:
            pair.append(_checked(_from_messages({"messages": messages})))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    chosen, rejected = pair
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected differ before their last message")
    return chosen, rejected


def labeled_of(row: object, _: object = None) -> Labeled:
    """A row of prompt, completion and label as a conversation whose answer is good, or not.

    Prompt and completion are texts or messages, as of a pair. Raises ValueError if it is none.
    """
    if not isinstance(row, dict) or not {"completion", "label"} <= row.keys():
        has = ", ".join(map(str, row)) if isinstance(row, dict) else repr(row)[:40]
        raise ValueError(f"expected a row with prompt, completion and label; it has: {has}")
    if not isinstance(row["label"], bool):
        raise ValueError(f"label: expected true or false, got {row['label']!r:.40}")
    completion = row["completion"]
    try:
        messages, _ = pair_of({**row, "chosen": completion, "rejected": completion})
    except ValueError as error:
        raise ValueError(str(error).replace("chosen", "completion", 1)) from None
    return messages, row["label"]


def multiple_choice_question(question: str, choices: list[str]) -> str:
    """A question with its choices by letter, and how to answer it."""
    lines = "\n".join(
        f"{letter}. {choice.strip()}" for letter, choice in zip(_LETTERS, choices, strict=False)
    )
    return f"{question.strip()}\n\n{lines}\n\nAnswer with the letter only."


def without_calculations(answer: str) -> str:
    """A solution of GSM8K, which ends in `#### 72`, without its notes for a calculator; any
    other text as it is.
    """
    return _CALCULATION.sub("", answer) if "\n####" in answer else answer


def _from_messages(row: dict[str, Any], column: str = "messages") -> _Named:
    messages = row[column]
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{column}: expected a list of objects with role and content, got {messages!r:.40}"
        )
    named = []
    for number, message in enumerate(messages, 1):
        keys = message.keys() if isinstance(message, dict) else ()
        if {"role", "content"} <= set(keys):
            named.append((f"message {number}", message["role"], message["content"]))
        elif {"from", "value"} <= set(keys):  # ShareGPT
            role = message["from"]
            role = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
            named.append((f"message {number}", role, message["value"]))
        else:
            raise ValueError(
                f"message {number}: expected an object with role and content, or from and value, "
                f"got {message!r:.60}"
            )
    return named


def _from_instruction(row: dict[str, Any]) -> _Named:
    _require_text("instruction", row["instruction"])
    more = row.get("input") or ""
    if not isinstance(more, str):
        raise ValueError(f"input holds {more!r:.40}, not text")
    question = f"{row['instruction'].strip()}\n\n{more.strip()}".strip()
    return [("instruction", "user", question), ("output", "assistant", row["output"])]


def _from_choices(row: dict[str, Any]) -> _Named:
    question, choices, answer = row["question"], row["choices"], row["answer"]
    _require_text("question", question)
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(_LETTERS):
        raise ValueError(
            f"choices: expected a list of 2 to {len(_LETTERS)} texts, got {choices!r:.40}"
        )
    for number, choice in enumerate(choices, 1):
        _require_text(f"choice {number}", choice)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(
            f"answer: expected the index of a choice, 0 to {len(choices) - 1}, got {answer!r:.40}"
        )
    asked = multiple_choice_question(question, choices)
    return [("question", "user", asked), ("answer", "assistant", _LETTERS[answer])]


def _from_question(row: dict[str, Any]) -> _Named:
    answer = row["answer"]
    answer = without_calculations(answer) if isinstance(answer, str) else answer
    return [("question", "user", row["question"]), ("answer", "assistant", answer)]


# The accepted rows: the columns of each shape, and its messages. The first that fits is taken.
_SHAPES: dict[tuple[str, ...], Callable[[dict[str, Any]], _Named]] = {
    ("messages",): _from_messages,
    ("conversations",): lambda row: _from_messages(row, "conversations"),
    ("prompt", "completion"): lambda row: [
        ("prompt", "user", row["prompt"]),
        ("completion", "assistant", row["completion"]),
    ],
    ("instruction", "output"): _from_instruction,
    ("question", "choices", "answer"): _from_choices,
    ("question", "answer"): _from_question,
}


def _shapes() -> str:
    return " or ".join(" + ".join(keys) for keys in _SHAPES)


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
        raise ValueError(
            f"the last message is the {named[-1][1]}'s: expected an answer of the assistant"
        )
    return [{"role": str(role), "content": str(content)} for _, role, content in named]
