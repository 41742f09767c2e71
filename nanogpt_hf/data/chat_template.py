"""Chat templates: conversations as token ids with an assistant mask, and prompts for an answer.

A tokenizer's own template is used as it is, and ours if it has none. Neither is trusted: a
template may be hostile or broken, and the text of a message must not become a token that ends a
turn or starts another.
"""

import json
import re
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from nanogpt_hf.data.conversations import Conversation
from nanogpt_hf.data.tokenizer import start_of_text_id_of
from nanogpt_hf.errors import DataError, one_line
from nanogpt_hf.time_limit import TimeUpError, time_limit

_SECONDS = 10.0  # templates render in milliseconds
_SHAPES = 1000  # sequences of roles whose special tokens are remembered
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
# The date that templates write: the one that Llama 3.1's has for programs without a clock.
_DAY = datetime(2024, 7, 26)
_PROBE: Conversation = [
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
        special = special_tokens(hf)
        text = (
            self._template
            + self._render(_PROBE[:2])
            + self._render(_PROBE[:1], add_generation_prompt=True)
        )
        added = {str(token) for token in hf.added_tokens_decoder.values()}
        control = special | {
            token for token in added if token in text and not re.fullmatch(r"[\w\s]*", token)
        }
        self._special, self._control = _any_of(special), _any_of(control)
        vocabulary = hf.get_vocab()
        self._special_ids, self._control_ids = (
            {vocabulary[token] for token in tokens} for tokens in (special, control)
        )
        if hf.unk_token_id not in (hf.bos_token_id, hf.eos_token_id):
            self._special_ids.discard(hf.unk_token_id)  # any text may have unknown characters
        self._expected = lru_cache(_SHAPES)(self._special_of)  # a server's clients choose the roles

    def prompt_ids(self, messages: Conversation) -> list[int]:
        """Ids of the prompt for the answer to the last of `messages`.

        Raises DataError if the template fails or takes 10 seconds, and for text that would become a
        special token.
        """
        text = self._render(self._harmless(messages), add_generation_prompt=True)
        (ids,) = self._tokens([text])
        self._check_special(ids, messages, add_generation_prompt=True)
        return ids

    def examples(self, conversations: list[Conversation]) -> list[ChatExample]:
        """The conversations as examples to train on, in order.

        Answers are found by the template's `{% generation %}` marks. Without marks, the prompt
        for each answer and the conversation up to this answer must be prefixes of the whole
        conversation as tokens. If the template rewrites earlier turns, there is an example for
        each answer, in which only that answer counts. Raises DataError if the tokens of an answer
        are not certain.
        """
        conversations = [self._harmless(conversation) for conversation in conversations]
        if self.is_marked:
            return self._examples_by_marks(conversations)
        examples = []
        for number, conversation in enumerate(conversations):
            try:
                examples += [
                    example._replace(conversation=number)
                    for example in self._examples_by_prefixes(conversation)
                ]
            except DataError as error:
                raise DataError(
                    f"the conversation that starts {conversation[0]['content']!r:.40}: {error}"
                ) from None
        return examples

    def end_of_turn_id(self) -> int:
        """The token that ends an answer. Raises DataError if it is not certain."""
        example = self.examples([_PROBE[:2]])[0]
        answer = [
            i for i, counts in zip(example.input_ids, example.assistant_mask, strict=True) if counts
        ]
        text = str(self.hf.decode(answer))
        ends = [token for token in answer if token in self._control_ids]
        if "Because." not in text or "Why?" in text or not ends:
            raise DataError(
                "the marks of its chat template do not enclose an answer and its "
                f"end, but {text!r:.60}"
            )
        return ends[-1]

    def _harmless(self, messages: Conversation) -> Conversation:
        """The messages without control tokens in their text."""

        def broken(message: dict[str, str]) -> str:
            tokens = self._special if message["role"] == "assistant" else self._control
            return tokens.sub(lambda token: f"{token[0][:1]} {token[0][1:]}", message["content"])

        return [message | {"content": broken(message)} for message in messages]

    def _render(self, messages: Conversation, add_generation_prompt: bool = False) -> str:
        """The text of `messages`.

        transformers renders templates in Jinja's sandbox, which protects the system, but does
        not stop endless loops.
        """
        try:
            with time_limit(_SECONDS):
                return str(self._apply(messages, add_generation_prompt, tokenize=False))
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
            raise DataError(
                f"the model's chat template fails ({type(error).__name__}: {one_line(error, 200)}"
                "); change the conversation, or choose another model"
            ) from None

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        return self.hf(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def _special_of(self, roles: tuple[str, ...], add_generation_prompt: bool) -> list[int]:
        """The special tokens of messages with these roles."""
        messages = [{"role": role, "content": "x"} for role in roles]
        (ids,) = self._tokens([self._render(messages, add_generation_prompt)])
        return [i for i in ids if i in self._special_ids]

    def _check_special(
        self, ids: list[int], messages: Conversation, add_generation_prompt: bool = False
    ) -> None:
        """Raises DataError unless `ids` have the special tokens of the same roles with other
        text.
        """
        roles = tuple(message["role"] for message in messages)
        if [i for i in ids if i in self._special_ids] != self._expected(
            roles, add_generation_prompt
        ):
            raise DataError(
                "its text changes the special tokens of the conversation; leave out what becomes "
                "one of them"
            )

    def _examples_by_marks(self, conversations: list[Conversation]) -> list[ChatExample]:
        out = self._apply(
            conversations,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        examples = []
        for number, conversation in enumerate(conversations):
            ids, mask = out["input_ids"][number], out["assistant_masks"][number]
            self._check_special(ids, conversation)
            examples.append(ChatExample(ids, mask, _answer_bytes(conversation), number))
        return examples

    def _examples_by_prefixes(self, conversation: Conversation) -> list[ChatExample]:
        turns = [
            number for number, message in enumerate(conversation) if message["role"] == "assistant"
        ]
        pairs = [
            self._tokens(
                [
                    self._render(conversation[:number], add_generation_prompt=True),
                    self._render(conversation[: number + 1]),
                ]
            )
            for number in turns
        ]
        if example := self._masked(conversation, pairs):
            return [example]
        examples = []
        for number, pair in zip(turns, pairs, strict=True):
            example = self._masked(conversation[: number + 1], [pair])
            if example is None:
                prompt = str(self.hf.decode(pair[0]))[-30:]
                raise DataError(
                    f"the chat template prompts for an answer with {prompt!r}, whose tokens "
                    "a conversation with that answer does not begin with; mark answers in the "
                    "template by {% generation %}"
                )
            examples.append(example)
        return examples

    def _masked(self, messages: Conversation, pairs: list[list[list[int]]]) -> ChatExample | None:
        """The example of `messages` from the tokens before and after each answer.

        Each answer is what the second part of a pair adds to the first, without white space after
        the token that ends it. None if a part is not a prefix of the last one.
        """
        whole = pairs[-1][1]
        mask = [0] * len(whole)
        for before, after in pairs:
            start, stop = len(before), len(after)
            if whole[:start] != before or whole[:stop] != after:
                return None
            end = stop
            while end > start and whole[end - 1] not in self._control_ids:
                end -= 1
            if end - start < 2 or str(self.hf.decode(whole[end:stop])).strip():
                raise DataError(
                    "the chat template ends an answer with no special token, so a model would not "
                    "learn to end one; choose a tokenizer whose template does"
                )
            mask[start:end] = [1] * (end - start)
        self._check_special(whole, messages)
        return ChatExample(
            whole, mask, _answer_bytes(messages[-1:] if len(pairs) == 1 else messages)
        )


def chat_of(hf: PreTrainedTokenizerBase) -> ChatFormat | None:
    """A tokenizer's chat template, None if it has none."""
    return ChatFormat(hf) if hf.chat_template else None


def chat_format(hf: PreTrainedTokenizerBase, name: str) -> ChatFormat:
    """How conversations become tokens to train on. A tokenizer without a chat template gets ours.

    Raises DataError if the tokens of an answer cannot be told with certainty.
    """
    if not hf.chat_template:
        if hf.eos_token_id is None:
            raise DataError(
                f"data.tokenizer: {name} has no end-of-text token to end an answer with; use gpt2"
            )
        hf.chat_template = chat_template(hf)
    try:
        chat = ChatFormat(hf)
        chat.end_of_turn_id()
    except DataError as error:
        raise DataError(f"data.tokenizer: {name}: {error}") from None
    return chat


def special_tokens(hf: PreTrainedTokenizerBase) -> set[str]:
    """The special tokens of a tokenizer."""
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
    """Those of `tokens` that a space can break, the longest first."""
    return sorted((token for token in tokens if len(token) > 1), key=lambda t: (-len(t), t))


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, _breakable(tokens))) or "(?!)")


def _answer_bytes(messages: Conversation) -> int:
    return sum(
        len(message["content"].strip().encode())
        for message in messages
        if message["role"] == "assistant"
    )
