"""Rows of a file or data set -> conversations, preference pairs, labeled answers."""

import re
from collections.abc import Callable
from typing import Any

from nanogpt_hf.data.messages import (
    MARKS,
    Conversation,
    Message,
    answers_of,
    checked_conversation,
    exchange,
    listed,
    standard_message,
)
from nanogpt_hf.data.values import checked_text, named_field

Pair = tuple[Conversation, Conversation]  # the chosen answer and the rejected one
Labeled = tuple[Conversation, bool]  # whether its last answer is good

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
            conversation = checked_conversation(messages_of(row), row)
            answers = answers_of(conversation.messages)
            if conversation.unlearned.issuperset(answers):
                raise ValueError("no answer of the conversation is marked to be learned")
            return conversation
    raise _no_row(row, *_SHAPES)


def pair_of(row: Any) -> Pair:
    """A row as two conversations that differ in their last message, an answer: the chosen and the
    rejected one. Raises ValueError for another row.

    `chosen` and `rejected` are texts or messages. A `prompt` of messages comes before those that
    do not begin with it, a text as the user's message before a single one.
    """
    if not {"chosen", "rejected"} <= _columns(row):
        raise _no_row(row, ("prompt", "chosen", "rejected"))
    chosen = _answered(row, "chosen")
    rejected = _answered(row, "rejected")
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise ValueError("chosen and rejected differ before their last message")
    if chosen.messages == rejected.messages:
        raise ValueError("chosen and rejected are equal, which prefers nothing; leave the row out")
    return chosen, rejected


def labeled_of(row: Any) -> Labeled:
    """A row of prompt, completion and label as a conversation whose answer is good, or not.

    Prompt and completion are texts or messages, as in a pair. Raises ValueError for another row.
    """
    if not {"completion", "label"} <= _columns(row):
        raise _no_row(row, ("prompt", "completion", "label"))
    if not isinstance(row["label"], bool):
        raise ValueError(f"label: expected true or false, got {row['label']!r:.40}")
    return _answered(row, "completion"), row["label"]


def _answered(row: dict[str, Any], column: str) -> Conversation:
    """Return a row's prompt with the answer in a column, which alone is learned."""
    prompt = _prompt_of(row)
    messages = row[column]
    # 1. The column as a list of messages: it may be the text of an answer, a transcript of the
    # whole conversation, or one message.
    if isinstance(messages, str):
        if prompt is None and _SPEAKER.match(messages):
            messages = _from_transcript(messages)
        else:
            messages = [_answer(_without_prompt(messages, prompt or [], column))]
    elif isinstance(messages, dict):
        messages = [messages]
    # 2. The messages before the answer: they may be in the column already, in `prompt`, or in the
    # row's own messages.
    if isinstance(messages, list):
        if prompt is None:
            if len(messages) == 1:
                before = row.get("messages") or row.get("conversations")
                if before is None:
                    raise ValueError(
                        f"{column} is an answer alone, and the row has no prompt; name its column "
                        "prompt, question or instruction"
                    )
                messages = [*listed(before), *messages]
        elif isinstance(row.get("prompt"), list):
            if messages[: len(prompt)] != prompt:
                messages = [*prompt, *messages]
        elif len(messages) < 2:
            messages = [*prompt, *messages]
        else:
            asked = [message["content"] for message in map(standard_message, listed(messages))]
            if prompt[0]["content"] not in asked:
                raise ValueError(f"prompt: {prompt[0]['content']!r:.40} is not in {column}")
    # 3. Check all, and learn the last answer alone.
    with named_field(column):
        conversation = checked_conversation(messages, row)
        *earlier, last = answers_of(conversation.messages)
        if last in conversation.unlearned:
            raise ValueError(f"message {last + 1}: the answer is marked not to be learned")
    return conversation._replace(unlearned=frozenset(earlier))


def _prompt_of(row: dict[str, Any]) -> list[Message] | None:
    """Return the messages of the column with a pair's prompt; None without one."""
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return prompt
    if prompt is None:
        prompt = row.get("question")
    if prompt is None and row.get("instruction") is not None:
        return [_asked(row)]
    return None if prompt is None else [_user(prompt)]


def _columns(row: Any) -> set[str]:
    """Return the columns of a row that hold something."""
    return {key for key, value in row.items() if value is not None} if type(row) is dict else set()


def _no_row(row: Any, *shapes: tuple[str, ...]) -> ValueError:
    expected = " or ".join(" + ".join(columns) for columns in shapes)
    return ValueError(f"expected a row with {expected}; got {row!r:.80}")


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}


def _answer(content: Any) -> Message:
    return {"role": "assistant", "content": content}


def _asked(row: dict[str, Any]) -> Message:
    """Return the question of an instruction, and of its input (Alpaca) or context (Dolly)."""
    parts = [checked_text("instruction", row["instruction"])]
    for column in ("input", "context"):
        given = row.get(column)
        if given is not None and (not isinstance(given, str) or given.strip()):
            parts.append(checked_text(column, given))
    return _user("\n\n".join(map(str.strip, parts)))


def _from_prompt(row: dict[str, Any]) -> list[Message]:
    """A prompt and its completion, texts or messages. Answers in a prompt are not learned."""
    prompt = row["prompt"]
    completion = row["completion"]
    if isinstance(prompt, list):
        prompt = [
            {**standard_message(message), "train": False} if _is_answer(message) else message
            for message in listed(prompt)
        ]
    else:
        prompt = [_user(prompt)]
    # Some data sets repeat the prompt in the completion.
    if isinstance(completion, str):
        completion = _without_prompt(completion, prompt, "completion")
    if not isinstance(completion, list):
        completion = [_answer(completion)]
    return [*prompt, *completion]


def _is_answer(message: Message) -> bool:
    renamed = standard_message(message)
    return renamed["role"] == "assistant" and not any(mark in renamed for mark in MARKS)


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
    # Some data sets have the whole conversation in the column of the answer.
    turns = _from_transcript(text.lstrip()) if _SPEAKER.match(text.lstrip()) else []
    if len(turns) < 2:
        return text
    *asked, answer = turns
    # A transcript has no system message.
    known = [
        {"role": message["role"], "content": str(message["content"]).strip()}
        for message in map(standard_message, listed(prompt))
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
    choices = row["choices"]
    answer = row["answer"]
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
    # The question, the choices as A, B, ... on lines of their own, and what to answer with.
    texts = (checked_text("choices", choice).strip() for choice in choices)
    lines = "\n".join(f"{_LETTERS[number]}. {text}" for number, text in enumerate(texts))
    question = checked_text("question", row["question"]).strip()
    asked = f"{question}\n\n{lines}\n\nAnswer with the letter only."
    return exchange(asked, _LETTERS[answer])


def _from_question(row: dict[str, Any]) -> list[Message]:
    answer = row["answer"]
    # A solution of GSM8K ends in a line such as "#### 72". Its notes are for a calculator, which a
    # model trained on them would write, too.
    if isinstance(answer, str) and "\n####" in answer:
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
