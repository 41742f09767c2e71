"""Check that a chat template writes every field of a conversation: a field must not be lost."""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from nanogpt_hf.data.messages import Conversation, fields_of
from nanogpt_hf.errors import DataError

_SHAPES = 1000  # shapes of conversations that are remembered
# Yields (index of the last message, text) of the texts that a conversation becomes.
_TextsOf = Callable[[Conversation, int], Iterator[tuple[int, str]]]
_NAME = re.compile(r"Part\d+of")  # a text that no template has


class _Part(NamedTuple):
    """A field of a message, or an item of one that is a list."""

    message: int  # the index of the message; -1 for the tools, which belong to none
    field: str
    item: int | None = None

    def __str__(self) -> str:
        where = f"message {self.message + 1}: " if self.message >= 0 else ""
        return f"{where}{self.field}" + ("" if self.item is None else f": item {self.item + 1}")


class FieldCheck:
    """Refuses a field with content that a chat template does not write.

    Conversations of the same roles and fields are checked once: templates choose by these what
    they write.
    """

    def __init__(self):
        self._checked = set[bytes]()

    def check(self, conversation: Conversation, rendered: _TextsOf, last: int) -> None:
        """Raises DataError for a field, up to the message `last`, that changes nothing in the
        texts that `rendered` gives.
        """
        # A conversation with the same roles and fields was written completely before.
        parts = list(_parts(conversation))
        shape = (
            rendered.__name__,
            [message["role"] for message in conversation.messages],
            parts,
            sorted(conversation.unlearned),
        )
        digest = hashlib.sha256(repr(shape).encode()).digest()
        if digest in self._checked:
            return
        # 1. Almost all templates write almost all fields: one rendering, with a name of its own in
        # each field, finds these.
        written = _found(conversation, parts, rendered)
        try:
            texts = dict(rendered(conversation, 0))
        except DataError:
            # A template that writes no calls of tools may fail for want of a text.
            if all(message["content"] is not None for message in conversation.messages):
                raise
            # With a text the check finds the calls that are lost, which is the better message.
            filled = [m | {"content": m["content"] or ""} for m in conversation.messages]
            self.check(conversation._replace(messages=filled), rendered, last)
            raise
        # 2. Another field, such as one that a template only compares, is written if the texts
        # change without it.
        for part in parts:
            if part in written or part.message > last:
                continue
            if not _changes(conversation, part, rendered, texts):
                raise DataError(
                    f"{part}: the model's chat template does not write it, so it would be lost; "
                    "leave it out, or choose another model"
                )
        # The clients of a server choose the fields, so the memory for them is bounded.
        if len(self._checked) < _SHAPES:
            self._checked.add(digest)


def _changes(
    conversation: Conversation, part: _Part, rendered: _TextsOf, texts: dict[int, str]
) -> bool:
    """Whether any of the texts that end at or after a part is another one without it."""
    others = rendered(_without(conversation, part), part.message)
    try:
        return any(text != texts[end] for end, text in others)
    except DataError:  # a template that fails asks for the field
        return True


def _found(conversation: Conversation, parts: list[_Part], rendered: _TextsOf) -> set[_Part]:
    """Return the parts that are found in the texts if each is a name of its own."""
    names = {part: f"Part{number}of" for number, part in enumerate(parts)}
    try:
        text = "".join(text for _, text in rendered(_with_names(conversation, names), 0))
    except DataError:
        return set()
    found = set(_NAME.findall(text))
    return {part for part, name in names.items() if name in found}


def _parts(conversation: Conversation) -> Iterator[_Part]:
    """Every field that has to change the texts; of a list, each item."""
    fields = list(fields_of(conversation.messages))
    for number, field in [*fields, (-1, "tools")] if conversation.tools else fields:
        value = _value(conversation, number, field)
        if isinstance(value, list):
            yield from (_Part(number, field, place) for place in range(len(value)))
        else:
            yield _Part(number, field)


def _value(conversation: Conversation, number: int, field: str) -> Any:
    return conversation.tools if number < 0 else conversation.messages[number][field]


def _replaced(conversation: Conversation, part: _Part, value: Any) -> Conversation:
    """Return the conversation with another value of a field; None leaves the field out."""
    number, field, _ = part
    if number < 0:
        return conversation._replace(tools=value)
    message = dict(conversation.messages[number])
    if value is None:
        del message[field]
    else:
        message[field] = value
    messages = conversation.messages
    return conversation._replace(messages=[*messages[:number], message, *messages[number + 1 :]])


def _without(conversation: Conversation, part: _Part) -> Conversation:
    """Return the conversation without a part; a message has other text instead."""
    value = _value(conversation, part.message, part.field)
    if part.field == "content":
        return _replaced(conversation, part, "Yes." if value.strip() != "Yes." else "No.")
    left = None
    if part.item is not None:
        left = [*value[: part.item], *value[part.item + 1 :]] or None
    return _replaced(conversation, part, left)


def _with_names(conversation: Conversation, names: dict[_Part, str]) -> Conversation:
    """Return the conversation with names in place of the texts of parts, or of the names of
    functions.
    """
    messages = [dict(message) for message in conversation.messages]
    others = {"tools": conversation.tools}
    for part, name in names.items():
        place: Any = messages[part.message] if part.message >= 0 else others
        key: Any = part.field
        if part.item is not None:
            # The list is the conversation's own until its first item is replaced.
            if not part.item:
                place[key] = list(place[key])
            place = place[key]
            key = part.item
        value = place[key]
        if isinstance(value, str):
            place[key] = name
        elif isinstance(value, dict) and isinstance(value.get("function"), dict):
            place[key] = value | {"function": value["function"] | {"name": name}}
    return conversation._replace(messages=messages, tools=others["tools"])
