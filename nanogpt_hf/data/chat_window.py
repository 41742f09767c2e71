"""Fit a conversation into a context: drop its oldest questions and answers."""

from typing import Any

from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.hf_tokenizer import unknown_characters_named
from nanogpt_hf.data.messages import Conversation, Message, texts_of


class TooManyTokensError(ValueError):
    """Raised if the part of a conversation that has to stay has more tokens than it may have."""


def encode_chat(
    chat: ChatFormat, messages: list[Message], max_tokens: int, tools: list[Any] | None = None
) -> tuple[list[int], list[Message]]:
    """Prompt ids for the answer to the last of `messages`, and the messages that are in them.

    If they are more than `max_tokens`, as few of the oldest questions with their answers are
    dropped as possible; a system message and the last question are kept. Raises
    TooManyTokensError if those alone are more, and DataError as `ChatFormat.prompt_ids`.
    """
    system = messages[:1] if messages[0]["role"] == "system" else []
    others = messages[len(system) :]
    # A conversation may begin with its first message, or with any question.
    starts = [i for i, message in enumerate(others) if i == 0 or message["role"] == "user"]
    tried = dict[int, tuple[list[int], list[Message]]]()

    def fits(number: int) -> bool:
        kept = system + others[starts[number] :]
        tried[number] = (chat.prompt_ids(kept, tools), kept)
        return len(tried[number][0]) <= max_tokens

    # Encoding everything again for each question takes a minute for a large request. So the search
    # begins where the messages alone would fit, and goes on in steps that double until one
    # beginning fits and an earlier one does not. From there it is a binary search.
    number = _first_that_may_fit(chat, system, others, starts, max_tokens)
    low = -1  # the latest beginning that is known not to fit
    high = len(starts)  # the earliest that is known to fit
    step = 1
    while high - low > 1:
        if fits(number):
            high = number
        else:
            low = number
        if high == len(starts):
            number = min(low + step, high - 1)
        elif low < 0:
            number = max(high - step, 0)
        else:
            number = (low + high) // 2
        step *= 2
    if high == len(starts):
        raise TooManyTokensError(f"{len(tried[low][0])} tokens are more than {max_tokens}")
    return tried[high]


def _first_that_may_fit(
    chat: ChatFormat,
    system: list[Message],
    others: list[Message],
    starts: list[int],
    max_tokens: int,
) -> int:
    """Number of the first of `starts` from which the text of the messages has at most
    `max_tokens`, or of the last. The template's own tokens are not counted.
    """
    if len(starts) == 1:
        return 0
    # A message has at least one token.
    recent = others[max(len(others) - max_tokens, 0) :]
    texts = [
        "\n".join(texts_of(Conversation([message], None))).strip() for message in [*system, *recent]
    ]
    with unknown_characters_named(chat.hf, texts):
        encoded = chat.hf(texts, add_special_tokens=False, verbose=False)["input_ids"]
    lengths = [len(ids) for ids in encoded]
    # From the last message back to the first that has room.
    room = max_tokens - sum(lengths[: len(system)])
    first = len(others)
    for length in reversed(lengths[len(system) :]):
        room -= length
        if room < 0:
            break
        first -= 1
    for number, start in enumerate(starts):
        if start >= first:
            return number
    return len(starts) - 1
