"""Divide an answer into thought, text and calls of tools while it is generated."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from nanogpt_hf.data.answer_format import AnswerFormat
from nanogpt_hf.data.call_format import Call


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
