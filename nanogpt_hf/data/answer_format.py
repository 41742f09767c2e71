"""What a model has written in a turn: its thought, its text and its calls of tools.

The marks are found by rendering an example with the model's chat template, so they are those that
the model was trained with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nanogpt_hf.data.call_format import EXAMPLES, Call, CallFormat, derive_format
from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.special_tokens import special_tokens

_THOUGHT = "Probethought."
_CONTENT = "Probecontent."
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": call["function"]["name"],
            "description": "Probe.",
            "parameters": {
                "type": "object",
                "properties": {
                    name: {"type": "string", "description": "Probe."}
                    for name in call["function"]["arguments"]
                },
                "required": list(call["function"]["arguments"]),
            },
        },
    }
    for call in EXAMPLES
]


class Answer(NamedTuple):
    """What a model has written in one turn."""

    content: str
    thought: str = ""
    calls: tuple[Call, ...] = ()
    problem: str = ""  # why its calls cannot be read


@dataclass(frozen=True)
class AnswerFormat:
    """The marks of thoughts and calls of one chat template.

    `opening` and `closing` enclose a thought at the start of an answer; `closing` is '' if the
    template writes none. `opening` is '' if the prompt for an answer ends with that mark.
    """

    opening: str = ""
    closing: str = ""
    calls: CallFormat | None = None
    kept: frozenset[int] = field(default_factory=frozenset)  # special tokens that are marks
    # Those of `kept` that are marks of thoughts.
    kept_of_thoughts: frozenset[int] = field(default_factory=frozenset)
    special: frozenset[int] = field(default_factory=frozenset)  # all special tokens

    @property
    def thinks(self) -> bool:
        return bool(self.closing)

    def without_calls(self) -> "AnswerFormat":
        """The format of answers that may call nothing: the marks of calls are no marks."""
        return replace(self, calls=None, kept=self.kept_of_thoughts)

    def without_thoughts(self) -> "AnswerFormat":
        """The format of what follows the thought."""
        return replace(self, opening="", closing="")

    def visible(self, ids: Sequence[int]) -> list[int]:
        """The tokens of an answer without the special ones that are no marks."""
        hidden = self.special - self.kept
        return [token for token in ids if token not in hidden]

    def read(self, text: str, tools: Sequence[Any] | None = None) -> Answer:
        """Divide the text of an answer. Without `tools` it has no calls."""
        thought, content = self._thought_of(text)
        if not self.calls or not tools:
            return Answer(content, thought)
        found = self.calls.read(content, tools)
        return Answer(found.content, thought, tuple(found.calls), found.problem)

    def calls_start(self, text: str) -> int | None:
        """Where the calls of an answer may begin, behind its thought. None if there are none, or
        the thought has not ended.
        """
        stop = self._thought_stop(text)
        if self.calls is None or stop is None:
            return None
        start = self.calls.start(text[stop:])
        return None if start is None else stop + start

    def thought_span(self, text: str) -> tuple[int, int | None] | None:
        """The places behind the first mark of the thought and before the second one, which is None
        if the thought does not end. None without a thought.
        """
        begun = text.lstrip()
        if not self.thinks or not begun.startswith(self.opening):
            return None
        start = len(text) - len(begun) + len(self.opening) if self.opening else 0
        stop = text.find(self.closing, start)
        return start, None if stop < 0 else stop

    def _thought_stop(self, text: str) -> int | None:
        """The place behind the thought and its marks: 0 without a thought, None if it does not
        end.
        """
        span = self.thought_span(text)
        if span is None:
            return 0
        return None if span[1] is None else span[1] + len(self.closing)

    def _thought_of(self, text: str) -> tuple[str, str]:
        """The thought of an answer, and its text."""
        stop = self._thought_stop(text)
        if stop == 0:
            return "", text
        thought = text[:stop].strip().removeprefix(self.opening).removesuffix(self.closing)
        # A thought that was cut off has no text after it.
        return thought.strip(), "" if stop is None else text[stop:].strip()


def answer_format(chat: ChatFormat | None) -> AnswerFormat:
    """Find the format of a chat template's answers; without a template there are no marks."""
    if chat is None:
        return AnswerFormat()
    opening, closing = _thought_marks(chat)
    found = AnswerFormat(opening, closing)

    def answer(calls: list[Call]) -> str | None:
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        text = chat.answer_text(message, _TOOLS)
        # A template may write an answer that calls without a thought.
        return found._thought_of(text)[1] if text and closing and closing in text else text

    calls = derive_format(answer)
    # A format that does not read what the template writes is none.
    if calls and not all(_reads(calls, answer(EXAMPLES[:n]), EXAMPLES[:n]) for n in (1, 2)):
        calls = None
    vocabulary = chat.hf.get_vocab()
    special = special_tokens(chat.hf)

    def special_in(*marks: str) -> frozenset[int]:
        return frozenset(vocabulary[token] for token in special if token in "\n".join(marks))

    of_thoughts = special_in(opening, closing)
    of_calls = special_in(answer(EXAMPLES[:1]) or "", calls.between or "") if calls else frozenset()
    return AnswerFormat(
        opening,
        closing,
        calls,
        kept=of_thoughts | of_calls,
        kept_of_thoughts=of_thoughts,
        special=frozenset(vocabulary[token] for token in special),
    )


def _reads(calls: CallFormat, text: str | None, wanted: list[Call]) -> bool:
    """Whether a format reads the calls that a template wrote; a template may refuse two."""
    if text is None:
        return len(wanted) > 1
    return calls.read(text, _TOOLS).calls == wanted


def _thought_marks(chat: ChatFormat) -> tuple[str, str]:
    """The marks before and after a thought; the first is '' if the prompt ends with it."""
    message = {"role": "assistant", "content": _CONTENT, "reasoning_content": _THOUGHT}
    text = chat.answer_text(message)
    if text is not None and _THOUGHT in text and _CONTENT in text:
        before, _, rest = text.partition(_THOUGHT)
        between = rest.partition(_CONTENT)[0].strip()
        if between:
            # A prompt that ends with the closing mark asks for an answer without a thought.
            return ("", "") if chat.prompts_with(between) else (before.strip(), between)
    # Templates that leave out thoughts look for the mark of their end.
    if chat.mentions("</think>") and not chat.prompts_with("</think>"):
        return "" if chat.prompts_with("<think>") else "<think>", "</think>"
    return "", ""
