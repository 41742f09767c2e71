"""Chat templates: prompts for an answer as token ids, and results of tools behind one.

A tokenizer's own template is used as it is, and ours if it has none. Neither is trusted: a
template may be hostile or broken, and the text of a message must not become a token that ends a
turn or starts another.
"""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from itertools import count
from typing import Any

from transformers import PreTrainedTokenizerBase

from nanogpt_hf.data.call_format import common_start
from nanogpt_hf.data.chat_fields import FieldCheck
from nanogpt_hf.data.hf_tokenizer import unknown_characters_named
from nanogpt_hf.data.messages import THOUGHT, Conversation, Message, texts_of
from nanogpt_hf.data.special_tokens import broken, pattern_of, special_tokens, with_texts
from nanogpt_hf.errors import DataError, one_line
from nanogpt_hf.time_limit import TimeUpError, time_limit

_SECONDS = 10.0  # templates render in milliseconds
# The number of shapes of conversations whose special tokens are remembered, and the characters of
# the longest of them: the clients of a server choose the shapes.
_SHAPES = 1000
_LONGEST_SHAPE = 5000
# What a template may have: marks around the answers, and the date of today.
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
# The date that templates write: the one that Llama 3.1's has for programs without a clock.
_DAY = datetime(2024, 7, 26)
# A conversation to try a template with. The texts are words that no template writes itself.
PROBE: list[Message] = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": "How?"},
    {"role": "assistant", "content": "So."},
]


class ChatFormat:
    """A tokenizer's chat template, which turns messages into token ids.

    A control token that is spelled out in a message is broken by a space: `<|im_end|>` becomes
    `< |im_end|>`. These are all special tokens, and in messages of user and system also added
    tokens that the template writes. The special tokens of each rendering are compared with those
    of the same roles with other text. A template that writes the date always writes the same one.
    """

    def __init__(self, hf: PreTrainedTokenizerBase):
        self.hf = hf
        try:
            template = hf.get_chat_template()
        except ValueError as error:  # several templates, and none is the default
            raise DataError(
                f"the model's chat template cannot be chosen: {one_line(error)}"
            ) from None
        self._template = _TODAY.sub(lambda found: json.dumps(_DAY.strftime(found[2])), template)
        self.is_marked = bool(_MARK.search(self._template))
        # Control tokens are all special ones, and added tokens that the template writes around
        # messages. Words and spaces are added tokens of some models, and harmless.
        special = special_tokens(hf)
        text = (
            self._template
            + self.render(Conversation(PROBE[:2]))
            + self.render(Conversation(PROBE[:1]), add_generation_prompt=True)
        )
        added = {str(token) for token in hf.added_tokens_decoder.values()}
        control = special | {
            token for token in added if token in text and not re.fullmatch(r"[\w\s]*", token)
        }
        self._special = pattern_of(special)
        self._control = pattern_of(control)
        vocabulary = hf.get_vocab()
        self._special_ids = {vocabulary[token] for token in special}
        self.control_ids = {vocabulary[token] for token in control}
        # Any text may have characters without a token.
        if hf.unk_token_id not in (hf.bos_token_id, hf.eos_token_id):
            self._special_ids.discard(hf.unk_token_id)
        self._remembered = lru_cache(_SHAPES)(self._special_of)
        self._fields = FieldCheck()

    def prompt_ids(self, messages: list[Message], tools: list[Any] | None = None) -> list[int]:
        """Ids of the prompt for the answer to the last of `messages`.

        Raises DataError if the template fails or takes 10 seconds, for text that would become a
        special token, for a character without a token, and for a field that the template does not
        write.
        """
        # 1. Nothing of the conversation may be lost in the text.
        asked = Conversation(messages, tools)
        self._fields.check(asked, self._prompt_texts, len(messages))
        # 2. No text of it may end a turn or begin another one.
        asked = self.harmless(asked)
        with unknown_characters_named(self.hf, texts_of(asked)):
            (ids,) = self.tokens([self.render(asked, add_generation_prompt=True)])
        # 3. Whatever a template does with the text, the tokens themselves show whether 2 holds.
        self.check_special(ids, asked, add_generation_prompt=True)
        return ids

    def without_lost_thoughts(
        self, messages: list[Message], tools: list[Any] | None
    ) -> list[Message]:
        """Leave out the thoughts that the template does not write in the prompt for an answer:
        many write no thought of an answer before the last question.
        """
        if not any(THOUGHT in message for message in messages):
            return messages
        # Names that the conversation has not, whatever it is about.
        texts = "\n".join(texts_of(Conversation(messages, tools)))
        free = next(name for n in count() if (name := f"Thought{n}of") not in texts)
        thoughts = {n: f"{free}{n}." for n, m in enumerate(messages) if THOUGHT in m}
        named = [m | {THOUGHT: thoughts[n]} if n in thoughts else m for n, m in enumerate(messages)]
        text = self.render(Conversation(named, tools), add_generation_prompt=True)
        return [
            {key: value for key, value in message.items() if key != THOUGHT}
            if number in thoughts and thoughts[number] not in text
            else message
            for number, message in enumerate(messages)
        ]

    def answer_text(self, message: Message, tools: list[Any] | None = None) -> str | None:
        """Return what a model writes for an answer to a question: the text between the prompt and
        the special token that ends it. None if the template fails.
        """
        try:
            prompt = self.render(Conversation(PROBE[:1], tools), add_generation_prompt=True)
            text = self.render(Conversation([*PROBE[:1], message], tools))
        except DataError:
            return None
        if text.startswith(prompt):
            text = text[len(prompt) :]
        else:
            # The prompt ends with the mark of a thought, which an answer without one does not have.
            # Both are equal up to it, and perhaps in the first letters of two marks.
            common = common_start(prompt, text)
            ends = [0, *(mark.end() for mark in self._control.finditer(common))]
            text = text[max(ends[-1], len(common.rpartition("\n")[0])) :]
        text = text.rstrip()
        ends = [token for token in special_tokens(self.hf) if text.endswith(token)]
        return text.removesuffix(max(ends, key=len, default=""))

    def mentions(self, text: str) -> bool:
        """Whether the template has a text."""
        return text in self._template

    def prompts_with(self, mark: str) -> bool:
        """Whether the prompt for an answer ends with a mark."""
        prompt = self.render(Conversation(PROBE[:1]), add_generation_prompt=True)
        return prompt.rstrip().endswith(mark)

    def reply_ids(self, names: tuple[str, ...], results: tuple[str, ...]) -> list[int]:
        """Ids that follow the end of an answer that calls tools: the results, and the prompt for
        the next answer.

        They do not depend on the text before them, so a conversation goes on with the very tokens
        that the model has written. Raises DataError if the template fails or rewrites the answer.
        """
        calls = [
            {"id": call_id(n), "type": "function", "function": {"name": name, "arguments": {}}}
            for n, name in enumerate(names)
        ]
        told = [
            {"role": "tool", "name": name, "tool_call_id": call["id"], "content": result}
            for call, name, result in zip(calls, names, results, strict=True)
        ]
        problem: DataError | None = None
        # Some templates write the thought of an answer before a tool's result only if it has text,
        # or the content of an answer that calls.
        for stand_in in ({"content": "", "reasoning_content": "x"}, {"content": ""}):
            answer = {"role": "assistant", "tool_calls": calls, **stand_in}
            asked = [*PROBE[:1], answer]
            try:
                whole = self.harmless(Conversation([*asked, *told]))
                (before,) = self.tokens([self.render(self.harmless(Conversation(asked)))])
                with unknown_characters_named(self.hf, results):
                    (ids,) = self.tokens([self.render(whole, add_generation_prompt=True)])
                self.check_special(ids, whole, add_generation_prompt=True)
            except DataError as error:
                problem = problem or error
                continue
            (question,) = self.tokens([self.render(Conversation(asked[:1]))])
            stop = self.answer_stop(before, len(question))
            if stop > len(question) and ids[:stop] == before[:stop]:
                return ids[stop:]
        raise problem or DataError(
            "the model's chat template rewrites an answer when the result of a tool follows"
        )

    def answer_stop(self, ids: list[int], start: int) -> int:
        """Return the end of an answer that begins at `start`: the place behind its last control
        token, `start` if it has none.
        """
        stop = len(ids)
        while stop > start and ids[stop - 1] not in self.control_ids:
            stop -= 1
        return stop

    def harmless(self, conversation: Conversation) -> Conversation:
        """Return the conversation without control tokens in its text."""
        messages = [
            broken(message, self._special if message["role"] == "assistant" else self._control)
            for message in conversation.messages
        ]
        tools = broken(conversation.tools, self._control)
        return conversation._replace(messages=messages, tools=tools)

    def _prompt_texts(self, conversation: Conversation, _: int) -> Iterator[tuple[int, str]]:
        yield len(conversation.messages) - 1, self.render(conversation, add_generation_prompt=True)

    def render(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation.

        transformers renders templates in Jinja's sandbox, which protects the system, but does
        not stop endless loops.
        """
        try:
            with time_limit(_SECONDS):
                return str(
                    self.apply(
                        conversation.messages,
                        add_generation_prompt,
                        tools=conversation.tools,
                        tokenize=False,
                    )
                )
        except TimeUpError:
            raise DataError(
                f"the model's chat template takes more than {_SECONDS:g} seconds; choose "
                "another model"
            ) from None

    def apply(self, messages: Any, add_generation_prompt: bool = False, **options: Any) -> Any:
        """Call transformers' `apply_chat_template`. Raises DataError if the template fails."""
        try:
            return self.hf.apply_chat_template(
                messages,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                **options,
            )
        except Exception as error:  # whatever the template's own expressions raise
            if type(error) is Exception:  # the tokenizer's, for a character that it does not have
                raise
            raise DataError(
                f"the model's chat template fails ({type(error).__name__}: {one_line(error, 200)}"
                "); change the conversation, or choose another model"
            ) from None

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of rendered texts."""
        return self.hf(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def _expected(self, shape: str, add_generation_prompt: bool) -> list[int]:
        special_of = self._remembered if len(shape) < _LONGEST_SHAPE else self._special_of
        return special_of(shape, add_generation_prompt)

    def _special_of(self, shape: str, add_generation_prompt: bool) -> list[int]:
        """Return the special tokens of a conversation of this shape, as `_shape_of` writes it."""
        (ids,) = self.tokens([self.render(Conversation(*json.loads(shape)), add_generation_prompt)])
        return [i for i in ids if i in self._special_ids]

    def check_special(
        self, ids: list[int], conversation: Conversation, add_generation_prompt: bool = False
    ) -> None:
        """Raises DataError unless `ids` have the special tokens of the same roles and fields with
        other text.
        """
        if [i for i in ids if i in self._special_ids] != self._expected(
            _shape_of(conversation), add_generation_prompt
        ):
            raise DataError(
                "its text changes the special tokens of the conversation; leave out what becomes "
                "one of them"
            )

    def decoded(self, ids: list[int]) -> str:
        """Return the text of token ids, with special tokens."""
        return str(self.hf.decode(ids))


def call_id(number: int) -> str:
    """The id of a call in an answer. Some templates take ids of nine letters only."""
    return f"call{number:05}"


def chat_of(hf: PreTrainedTokenizerBase) -> ChatFormat | None:
    """A tokenizer's chat template, None if it has none."""
    return ChatFormat(hf) if hf.chat_template else None


def _shape_of(conversation: Conversation) -> str:
    """A conversation's messages and tools as JSON, with other text.

    The text of a message is "x". Templates read other fields, such as the types of parameters:
    those keep their letters and lose only what makes special tokens.
    """
    plain = lambda text: re.sub(r"[^\w\s.,:-]", "", text)  # noqa: E731
    messages = [
        with_texts(message | {"content": message["content"] and "x"}, plain)
        for message in conversation.messages
    ]
    return json.dumps([messages, with_texts(conversation.tools, plain)])
