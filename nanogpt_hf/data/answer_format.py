"""What a model has written in a turn: its thought, its text and its calls of tools.

The marks are found by rendering an example with the model's chat template, so they are those that
the model was trained with.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
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


def begun_at_end(text: str, mark: str) -> int:
    """The number of characters at the end of a text that may be the beginning of a mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


class ThoughtSplitter:
    """Separates the thought of an answer from what follows it while it is generated, each as soon
    as it is certain. White space around the thought belongs to neither.
    """

    def __init__(self, form: AnswerFormat):
        self._form = form
        self._held = ""  # what was not returned yet
        self._is_begun = False  # whether the answer has begun, with its thought or without one
        self.in_thought = False
        # Whether white space at the beginning of what is held is left out.
        self._strips = False

    def add(self, text: str) -> tuple[str, str]:
        """The thought and the text that are certain after `text` was added."""
        return self._divide(text, ended=False)

    def end(self) -> tuple[str, str]:
        """The rest of the thought and of the text, after the last token."""
        return self._divide("", ended=True)

    def _divide(self, text: str, *, ended: bool) -> tuple[str, str]:
        self._held += text
        if not self._is_begun and not self._begin(ended):
            return "", ""
        thought = self._take_thought(ended) if self.in_thought else ""
        if self.in_thought:
            return thought, ""
        rest = self._held.lstrip() if self._strips else self._held
        self._strips = self._strips and not rest
        self._held = ""
        return thought, rest

    def _begin(self, ended: bool) -> bool:
        """Find out whether the answer begins with a thought; return whether that is known."""
        opening = self._form.opening
        begun = self._held.lstrip()
        self.in_thought = self._strips = begun.startswith(opening)
        if self.in_thought:
            self._held = begun[len(opening) :]
        self._is_begun = self.in_thought or ended or not opening.startswith(begun)
        return self._is_begun

    def _take_thought(self, ended: bool) -> str:
        """Take the certain part of the thought out of what is held, with the mark of its end."""
        closing = self._form.closing
        held = self._held.lstrip() if self._strips else self._held
        thought, mark, rest = held.partition(closing)
        if mark:
            self.in_thought = False
            self._strips = True
            self._held = rest
            return thought.rstrip()
        certain = held if ended else held[: len(held) - begun_at_end(held, closing)]
        thought = certain.rstrip()
        self._held = held[len(thought) :]
        self._strips = self._strips and not thought
        return thought


class CallSplitter:
    """Separates the calls of tools from the text of an answer while it is generated: text as soon
    as it is certain, the calls at its end.
    """

    def __init__(self, form: AnswerFormat, tools: Sequence[Any]):
        self._form = form
        self._tools = tools
        self._text = ""
        self._shown = 0  # characters of the text that were returned

    def add(self, text: str) -> str:
        """Text that can be shown after `text` was added."""
        self._text += text
        start = self._form.calls_start(self._text)
        if start is None:
            return self._show(self._certain())
        return self._show(len(self._text[:start].rstrip()))

    def end(self) -> tuple[str, list[Call]]:
        """The rest of the text, and the calls. A call that cannot be read is text."""
        start = self._form.calls_start(self._text)
        if start is not None and self._form.calls:
            found = self._form.calls.read(self._text[start:], self._tools)
            if found.calls and not found.problem:
                space = self._text[self._shown : start]
                return space + found.content if found.content else "", found.calls
        return self.cut(), []

    def cut(self) -> str:
        """The rest of the text of an answer that was cut off: it has no calls."""
        return self._show(len(self._text))

    def _certain(self) -> int:
        """The characters that cannot be the beginning of a call, or white space before one."""
        begin = self._form.calls.begin if self._form.calls else ""
        stop = len(self._text) - begun_at_end(self._text, begin)
        return len(self._text[:stop].rstrip())

    def _show(self, stop: int) -> str:
        text = self._text[self._shown : stop]
        self._shown = max(stop, self._shown)
        return text


class AnswerSplitter:
    """Divides an answer into thought, text and calls while it is generated. Without a form, or
    without marks in it, all is text.
    """

    def __init__(self, form: AnswerFormat | None, tools: Sequence[Any] | None):
        self._thoughts = ThoughtSplitter(form) if form and form.thinks else None
        self._calls = None
        if form and form.calls:
            self._calls = CallSplitter(form.without_thoughts(), tools or [])

    def add(self, text: str) -> tuple[str, str]:
        """The thought and the text that are certain after `text` was added."""
        thought = ""
        if self._thoughts:
            thought, text = self._thoughts.add(text)
        return thought, self._calls.add(text) if self._calls else text

    @property
    def in_thought(self) -> bool:
        """Whether the thought has begun and not ended."""
        return self._thoughts is not None and self._thoughts.in_thought

    def end(self, *, is_cut: bool) -> tuple[str, str, list[Call]]:
        """The rest of the thought and of the text, and the calls, after the last token. An answer
        that was cut off calls nothing.
        """
        thought, text = self._thoughts.end() if self._thoughts else ("", "")
        if not self._calls:
            return thought, text, []
        text = self._calls.add(text)
        rest, calls = (self._calls.cut(), []) if is_cut else self._calls.end()
        return thought, text + rest, calls


class ThoughtTokens:
    """Counts the tokens of an answer that are between the marks of its thought. One that has a part
    of a mark and a part of the thought counts.
    """

    def __init__(self, form: AnswerFormat | None):
        self._form = form or AnswerFormat()
        self._text = ""
        self._ends: list[int] = []  # characters of the text after each token

    def add(self, text: str) -> None:
        """Add a token, with the text that it completes."""
        self._text += text
        self._ends.append(len(self._text))

    def count(self) -> int:
        span = self._form.thought_span(self._text)
        if span is None:
            return 0
        start, stop = span
        stop = len(self._text) if stop is None else stop
        return sum(
            # A token without text is a part of a character, or a special token that is hidden.
            max(begin, start) < min(end, stop) or start <= begin == end <= stop
            for begin, end in pairwise([0, *self._ends])
        )
