"""Chat templates: conversations as token ids with an assistant mask, and prompts for an answer.

A tokenizer's own template is used as it is, and ours if it has none. Neither is trusted: a
template may be hostile or broken, and the text of a message must not become a token that ends a
turn or starts another.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from nanogpt_hf.data.chat_fields import FieldCheck
from nanogpt_hf.data.hf_tokenizer import start_of_text_id_of, unknown_characters_named
from nanogpt_hf.data.messages import Conversation, Message, answers_of, texts_of
from nanogpt_hf.errors import DataError, one_line
from nanogpt_hf.time_limit import TimeUpError, time_limit

_SECONDS = 10.0  # templates render in milliseconds
# The special tokens of so many shapes of conversations are remembered, but of none that is longer
# than so many characters: the clients of a server choose the shapes.
_SHAPES = 1000
_LONGEST_SHAPE = 5000
# What a template may have: marks around the answers, and the date of today.
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
# The date that templates write: the one that Llama 3.1's has for programs without a clock.
_DAY = datetime(2024, 7, 26)
# A conversation to try a template with. The texts are words that no template writes itself.
_PROBE: list[Message] = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": "How?"},
    {"role": "assistant", "content": "So."},
]


class ChatExample(NamedTuple):
    """A conversation to train on, or the part of it that ends with one of its answers."""

    input_ids: list[int]
    # 1 for the tokens of answers, including the one that ends them; else 0
    assistant_mask: list[int]
    bytes: int  # bytes of the answers' text
    conversation: int = 0  # its number


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
            + self._render(Conversation(_PROBE[:2]))
            + self._render(Conversation(_PROBE[:1]), add_generation_prompt=True)
        )
        added = {str(token) for token in hf.added_tokens_decoder.values()}
        control = special | {
            token for token in added if token in text and not re.fullmatch(r"[\w\s]*", token)
        }
        self._special = _any_of(special)
        self._control = _any_of(control)
        vocabulary = hf.get_vocab()
        self._special_ids = {vocabulary[token] for token in special}
        self._control_ids = {vocabulary[token] for token in control}
        # Any text may have characters without a token.
        if hf.unk_token_id not in (hf.bos_token_id, hf.eos_token_id):
            self._special_ids.discard(hf.unk_token_id)
        self._remembered = lru_cache(_SHAPES)(self._special_of)
        self._fields = FieldCheck()
        self._begun = set[tuple[tuple[str, str], ...]]()

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
        asked = self._harmless(asked)
        with unknown_characters_named(self.hf, texts_of(asked)):
            (ids,) = self._tokens([self._render(asked, add_generation_prompt=True)])
        # 3. Whatever a template does with the text, the tokens themselves show whether 2 holds.
        self._check_special(ids, asked, add_generation_prompt=True)
        return ids

    def examples(self, conversations: list[Conversation]) -> list[ChatExample]:
        """Return the conversations as examples to train on, in order.

        Answers are found by the template's `{% generation %}` marks. Without marks, the prompt
        for each answer and the conversation up to this answer must be prefixes of the whole
        conversation as tokens. If the template rewrites earlier turns, there is an example for
        each answer, in which only that answer counts. Raises DataError if the tokens of an answer
        are not certain, or a field with content changes none of the tokens.
        """
        for conversation in conversations:
            with _named(conversation):
                # What follows the last learned answer does not matter.
                last = _learned(conversation)[-1]
                self._fields.check(conversation, self._example_texts, last)
        found = list(map(self._harmless, conversations))
        # If marks show the answers, all conversations are tokenized at once, which is faster.
        by_marks = self._by_marks(found) if self.is_marked else itertools.repeat(None)
        examples = []
        for number, (conversation, tokens) in enumerate(zip(found, by_marks, strict=False)):
            named = unknown_characters_named(self.hf, texts_of(conversation))
            with _named(conversations[number]), named:
                own = (
                    [self._marked(conversation, *tokens)]
                    if tokens
                    else self._examples_by_prefixes(conversation)
                )
            examples += [example._replace(conversation=number) for example in own]
        return examples

    def check_turns(self) -> None:
        """Raises DataError unless each answer of two has its text and a token that ends it."""
        answers = []
        wanted = [_PROBE[number]["content"] for number in answers_of(_PROBE)]
        for example in self.examples([Conversation(_PROBE)]):
            ids = example.input_ids
            answers += [ids[start:stop] for start, stop in _runs(example.assistant_mask)]
        for number, (answer, text) in enumerate(zip(answers, wanted, strict=True), 1):
            if text not in self._decoded(answer) or not self._control_ids.intersection(answer):
                raise DataError(
                    f"its chat template does not mark the end of answer {number} of {len(wanted)}, "
                    "so a model would not learn to end one; mark it inside {% generation %}"
                )

    def end_of_turn_id(self) -> int:
        """Return the token that ends an answer. Raises DataError if it is not certain."""
        # One question and its answer: what counts of it has to be the answer alone, and its end.
        example = self.examples([Conversation(_PROBE[:2])])[0]
        answer = [
            i for i, counts in zip(example.input_ids, example.assistant_mask, strict=True) if counts
        ]
        text = self._decoded(answer)
        ends = [token for token in answer if token in self._control_ids]
        if "Because." not in text or "Why?" in text or not ends:
            raise DataError(
                "the marks of its chat template do not enclose an answer and its "
                f"end, but {text!r:.60}"
            )
        return ends[-1]

    def _harmless(self, conversation: Conversation) -> Conversation:
        """Return the conversation without control tokens in its text."""

        def broken(value: Any, tokens: re.Pattern[str]) -> Any:
            return _with_texts(
                value,
                lambda text: tokens.sub(lambda token: f"{token[0][:1]} {token[0][1:]}", text),
            )

        messages = [
            broken(message, self._special if message["role"] == "assistant" else self._control)
            for message in conversation.messages
        ]
        tools = broken(conversation.tools, self._control)
        return conversation._replace(messages=messages, tools=tools)

    def _prompt_texts(self, conversation: Conversation, _: int) -> Iterator[tuple[int, str]]:
        yield len(conversation.messages) - 1, self._render(conversation, add_generation_prompt=True)

    def _example_texts(self, conversation: Conversation, first: int) -> Iterator[tuple[int, str]]:
        """Yield the texts whose tokens are the examples of a conversation, each with the index
        of its last message, if that is not before `first`.
        """
        if self.is_marked:
            yield len(conversation.messages) - 1, self._render(conversation)
            return
        for number in _learned(conversation):
            if number >= first:
                yield number, self._render(_until(conversation, number))

    def _render(self, conversation: Conversation, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation.

        transformers renders templates in Jinja's sandbox, which protects the system, but does
        not stop endless loops.
        """
        try:
            with time_limit(_SECONDS):
                return str(
                    self._apply(
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

    def _apply(self, messages: Any, add_generation_prompt: bool = False, **options: Any) -> Any:
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

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        return self.hf(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def _expected(self, shape: str, add_generation_prompt: bool) -> list[int]:
        special_of = self._remembered if len(shape) < _LONGEST_SHAPE else self._special_of
        return special_of(shape, add_generation_prompt)

    def _special_of(self, shape: str, add_generation_prompt: bool) -> list[int]:
        """Return the special tokens of a conversation of this shape, as `_shape_of` writes it."""
        (ids,) = self._tokens(
            [self._render(Conversation(*json.loads(shape)), add_generation_prompt)]
        )
        return [i for i in ids if i in self._special_ids]

    def _check_special(
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

    def _decoded(self, ids: list[int]) -> str:
        return str(self.hf.decode(ids))

    def _by_marks(self, conversations: list[Conversation]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the ids and the mask of each conversation, by the template's marks."""
        # The tools are an argument of the call: conversations with other tools need another one.
        for tools, group in itertools.groupby(conversations, lambda found: found.tools):
            same_tools = list(group)
            texts = itertools.chain.from_iterable(map(texts_of, same_tools))
            with unknown_characters_named(self.hf, texts):
                out = self._apply(
                    [conversation.messages for conversation in same_tools],
                    tools=tools,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                    tokenizer_kwargs={"verbose": False},
                )
            yield from zip(out["input_ids"], out["assistant_masks"], strict=True)

    def _marked(self, conversation: Conversation, ids: list[int], mask: list[int]) -> ChatExample:
        """Return the example of a conversation from its ids and the mask of all its answers."""
        self._check_special(ids, conversation)
        answers = answers_of(conversation.messages)
        runs = list(_runs(mask))  # one for each answer, if the template marks all of them
        if len(runs) != len(answers):
            raise DataError(
                f"the marks of the chat template enclose {len(runs)} parts, and there are "
                f"{len(answers)} answers; mark each answer, its calls of tools and its end as one "
                "part by {% generation %}"
            )
        for number, (start, stop) in zip(answers, runs, strict=True):
            if not self._control_ids.intersection(ids[start:stop]):
                raise DataError(
                    f"message {number + 1}: the marks of the chat template do not enclose the end "
                    "of the answer; mark it inside {% generation %}"
                )
            # The template marks all answers; those that are not learned lose their mark here.
            if number in conversation.unlearned:
                mask[start:stop] = [0] * (stop - start)
        self._check_starts(conversation, ids)
        return ChatExample(ids, mask, _answer_bytes(conversation))

    def _check_starts(self, conversation: Conversation, ids: list[int]) -> None:
        """Raises DataError if the end of a prompt and the start of its answer become one token,
        which no model is asked for.

        White space, of which a token may have any number, is always checked, and other first
        characters once. A template that rewrites the turns before an answer is not checked.
        """
        text = ""
        for number in _learned(conversation):
            fields = conversation.messages[number].items()
            start = tuple((name, value[:2]) for name, value in fields if isinstance(value, str))
            if start in self._begun:
                continue
            try:
                before = _until(conversation, number - 1)
                prompt = self._render(before, add_generation_prompt=True)
            except DataError:  # the template is of training alone
                continue
            text = text or self._render(conversation)
            if text.startswith(prompt):
                (asked,) = self._tokens([prompt])
                if ids[: len(asked)] != asked:
                    raise DataError(
                        f"message {number + 1}: the chat template prompts for the answer with "
                        f"{prompt[-30:]!r}, which becomes one token with the start of the answer; "
                        "change how it starts, or the template"
                    )
            # A token may have any number of spaces, so each start with a space is another case.
            is_space = any(value[:1].isspace() for _, value in start)
            if not is_space and len(self._begun) < _SHAPES:
                self._begun.add(start)

    def _examples_by_prefixes(self, conversation: Conversation) -> list[ChatExample]:
        learned = _learned(conversation)
        conversation = _until(conversation, learned[-1])
        pairs = [
            self._tokens(
                [
                    self._render(_until(conversation, number - 1), add_generation_prompt=True),
                    self._render(_until(conversation, number)),
                ]
            )
            for number in learned
        ]
        if example := self._masked(conversation, pairs):
            return [example]
        # Else an example for each answer, which ends with it, as the prompt of that answer is.
        examples = []
        for number, pair in zip(learned, pairs, strict=True):
            alone = _until(conversation, number)._replace(
                unlearned=frozenset(answers_of(conversation.messages)) - {number}
            )
            example = self._masked(alone, [pair])
            if example is None:
                prompt = self._decoded(pair[0])[-30:]
                raise DataError(
                    f"the chat template prompts for an answer with {prompt!r}, whose tokens "
                    "a conversation with that answer does not begin with; mark answers in the "
                    "template by {% generation %}"
                )
            examples.append(example)
        return examples

    def _masked(
        self, conversation: Conversation, pairs: list[list[list[int]]]
    ) -> ChatExample | None:
        """Return the example of a conversation from the tokens before and after each learned
        answer.

        Each answer is what the second part of a pair adds to the first, without white space after
        the token that ends it. None if a part is not a prefix of the last one.
        """
        whole = pairs[-1][1]
        mask = [0] * len(whole)
        for before, after in pairs:
            start = len(before)
            stop = len(after)
            # Other tokens at these places: the template rewrites earlier turns.
            if whole[:start] != before or whole[:stop] != after:
                return None
            # An answer ends with its last control token. Only white space may follow.
            end = stop
            while end > start and whole[end - 1] not in self._control_ids:
                end -= 1
            if end - start < 2 or self._decoded(whole[end:stop]).strip():
                raise DataError(
                    "the chat template ends an answer with no special token, so a model would not "
                    "learn to end one; choose a tokenizer whose template does"
                )
            mask[start:end] = [1] * (end - start)
        self._check_special(whole, conversation)
        return ChatExample(whole, mask, _answer_bytes(conversation))


def chat_of(hf: PreTrainedTokenizerBase) -> ChatFormat | None:
    """A tokenizer's chat template, None if it has none."""
    return ChatFormat(hf) if hf.chat_template else None


def chat_format(hf: PreTrainedTokenizerBase, name: str) -> ChatFormat:
    """Return the chat template to train with. A tokenizer without one gets ours.

    Raises DataError if the tokens of an answer cannot be told with certainty.
    """
    if not hf.chat_template:
        if hf.eos_token_id is None:
            raise DataError(
                f"data.tokenizer: {name} has no token that ends a text, so a model with it cannot "
                "chat; pretrain with data.tokenizer gpt2 or bpe"
            )
        hf.chat_template = chat_template(hf)
    try:
        chat = ChatFormat(hf)
        chat.end_of_turn_id()
        chat.check_turns()
    except DataError as error:
        raise DataError(f"data.tokenizer: {name}: {error}") from None
    return chat


def special_tokens(hf: PreTrainedTokenizerBase) -> set[str]:
    """Return the special tokens of a tokenizer."""
    return {str(token) for token in hf.added_tokens_decoder.values() if token.special} | set(
        hf.all_special_tokens
    )


def chat_template(hf: PreTrainedTokenizerBase) -> str:
    """Our chat template for this tokenizer: roles as headings, answers end with its end-of-text
    token.

    Special tokens in the text of a message are broken by a space here, too, for programs that
    only have the template. `generation` marks the answers for the assistant mask.
    """

    def literal(text: str) -> str:  # Jinja reads what JSON writes
        return json.dumps(text, ensure_ascii=False)

    breaks = "".join(
        f" | replace({literal(token)}, {literal(f'{token[:1]} {token[1:]}')})"
        for token in _breakable(special_tokens(hf))
    )
    start = "" if start_of_text_id_of(hf) is None else "{{- bos_token -}}"
    return (
        f"{start}{{%- for message in messages -%}}"
        f"{{%- set content = message['content'] | trim{breaks} -%}}"
        "{{- '### ' + message['role'] | capitalize + ':\\n' -}}"
        "{%- if message['role'] == 'assistant' -%}"
        "{%- generation -%}{{- content + eos_token -}}{%- endgeneration -%}"
        "{%- else -%}{{- content + '\\n\\n' -}}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '### Assistant:\\n' -}}{%- endif -%}"
    )


def _breakable(tokens: set[str]) -> list[str]:
    """Return the tokens that a space can break, the longest first."""
    return sorted((token for token in tokens if len(token) > 1), key=lambda t: (-len(t), t))


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, _breakable(tokens))) or "(?!)")


@contextlib.contextmanager
def _named(conversation: Conversation) -> Iterator[None]:
    """Context in which a DataError gets the start of a conversation."""
    try:
        yield
    except DataError as error:
        start = conversation.messages[0]["content"]
        raise DataError(f"the conversation that starts {start!r:.40}: {error}") from None


def _answer_bytes(conversation: Conversation) -> int:
    """Return the bytes of the learned answers; what is no text counts as JSON."""
    return sum(
        len((value if isinstance(value, str) else json.dumps(value)).strip().encode())
        for number in _learned(conversation)
        for field, value in conversation.messages[number].items()
        if field != "role" and value is not None
    )


def _runs(mask: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each run of ones."""
    start = 0
    for value, group in itertools.groupby(mask):
        stop = start + len(list(group))
        if value:
            yield start, stop
        start = stop


def _until(conversation: Conversation, number: int) -> Conversation:
    """A conversation up to a message."""
    return conversation._replace(messages=conversation.messages[: number + 1])


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with its texts changed, also the names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _with_texts(item, change) for key, item in value.items()}
    return [_with_texts(item, change) for item in value] if isinstance(value, list) else value


def _shape_of(conversation: Conversation) -> str:
    """A conversation's messages and tools as JSON, with other text.

    The text of a message is "x". Templates read other fields, such as the types of parameters:
    those keep their letters and lose only what makes special tokens.
    """
    plain = lambda text: re.sub(r"[^\w\s.,:-]", "", text)  # noqa: E731
    messages = [
        _with_texts(message | {"content": message["content"] and "x"}, plain)
        for message in conversation.messages
    ]
    return json.dumps([messages, _with_texts(conversation.tools, plain)])


def _learned(conversation: Conversation) -> list[int]:
    """Return the indices of the answers that are trained on."""
    answers = answers_of(conversation.messages)
    return [number for number in answers if number not in conversation.unlearned]
