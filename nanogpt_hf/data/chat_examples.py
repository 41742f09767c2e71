"""Conversations to train on: token ids with a mask of the answers, by a chat template."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from nanogpt_hf.data.chat_fields import FieldCheck
from nanogpt_hf.data.chat_template import PROBE, ChatFormat
from nanogpt_hf.data.hf_tokenizer import unknown_characters_named
from nanogpt_hf.data.messages import Conversation, answers_of, texts_of
from nanogpt_hf.data.own_template import chat_template
from nanogpt_hf.errors import DataError

# How many beginnings of answers are remembered.
_BEGINNINGS = 1000


class ChatExample(NamedTuple):
    """A conversation to train on, or the part of it that ends with one of its answers."""

    input_ids: list[int]
    # 1 for the tokens of answers, including the one that ends them; else 0
    assistant_mask: list[int]
    bytes: int  # bytes of the answers' text
    conversation: int = 0  # its number


class AnswerFinder:
    """Finds the answers of conversations in their tokens.

    A template shows them by its `{% generation %}` marks. Without marks, they are what an answer
    adds to the tokens before it.
    """

    def __init__(self, chat: ChatFormat):
        self.chat = chat
        self._fields = FieldCheck()
        self._begun = set[tuple[tuple[str, str], ...]]()

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
        found = list(map(self.chat.harmless, conversations))
        # If marks show the answers, all conversations are tokenized at once, which is faster.
        by_marks = self._by_marks(found) if self.chat.is_marked else itertools.repeat(None)
        examples = []
        for number, (conversation, tokens) in enumerate(zip(found, by_marks, strict=False)):
            named = unknown_characters_named(self.chat.hf, texts_of(conversation))
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
        wanted = [PROBE[number]["content"] for number in answers_of(PROBE)]
        for example in self.examples([Conversation(PROBE)]):
            ids = example.input_ids
            answers += [ids[start:stop] for start, stop in _runs(example.assistant_mask)]
        for number, (answer, text) in enumerate(zip(answers, wanted, strict=True), 1):
            if text not in self.chat.decoded(answer) or not self.chat.control_ids.intersection(
                answer
            ):
                raise DataError(
                    f"its chat template does not mark the end of answer {number} of {len(wanted)}, "
                    "so a model would not learn to end one; mark it inside {% generation %}"
                )

    def end_of_turn_id(self) -> int:
        """Return the token that ends an answer. Raises DataError if it is not certain."""
        # One question and its answer: what counts of it has to be the answer alone, and its end.
        example = self.examples([Conversation(PROBE[:2])])[0]
        answer = [
            i for i, counts in zip(example.input_ids, example.assistant_mask, strict=True) if counts
        ]
        text = self.chat.decoded(answer)
        ends = [token for token in answer if token in self.chat.control_ids]
        if "Because." not in text or "Why?" in text or not ends:
            raise DataError(
                "the marks of its chat template do not enclose an answer and its "
                f"end, but {text!r:.60}"
            )
        return ends[-1]

    def _example_texts(self, conversation: Conversation, first: int) -> Iterator[tuple[int, str]]:
        """Yield the texts whose tokens are the examples of a conversation, each with the index
        of its last message, if that is not before `first`.
        """
        if self.chat.is_marked:
            yield len(conversation.messages) - 1, self.chat.render(conversation)
            return
        for number in _learned(conversation):
            if number >= first:
                yield number, self.chat.render(_until(conversation, number))

    def _by_marks(self, conversations: list[Conversation]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the ids and the mask of each conversation, by the template's marks."""
        # The tools are an argument of the call: conversations with other tools need another one.
        for tools, group in itertools.groupby(conversations, lambda found: found.tools):
            same_tools = list(group)
            texts = itertools.chain.from_iterable(map(texts_of, same_tools))
            with unknown_characters_named(self.chat.hf, texts):
                out = self.chat.apply(
                    [conversation.messages for conversation in same_tools],
                    tools=tools,
                    return_dict=True,
                    return_assistant_tokens_mask=True,
                    tokenizer_kwargs={"verbose": False},
                )
            yield from zip(out["input_ids"], out["assistant_masks"], strict=True)

    def _marked(self, conversation: Conversation, ids: list[int], mask: list[int]) -> ChatExample:
        """Return the example of a conversation from its ids and the mask of all its answers."""
        self.chat.check_special(ids, conversation)
        answers = answers_of(conversation.messages)
        runs = list(_runs(mask))  # one for each answer, if the template marks all of them
        if len(runs) != len(answers):
            raise DataError(
                f"the marks of the chat template enclose {len(runs)} parts, and there are "
                f"{len(answers)} answers; mark each answer, its calls of tools and its end as one "
                "part by {% generation %}"
            )
        for number, (start, stop) in zip(answers, runs, strict=True):
            if not self.chat.control_ids.intersection(ids[start:stop]):
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
                prompt = self.chat.render(before, add_generation_prompt=True)
            except DataError:  # the template is of training alone
                continue
            text = text or self.chat.render(conversation)
            if text.startswith(prompt):
                (asked,) = self.chat.tokens([prompt])
                if ids[: len(asked)] != asked:
                    raise DataError(
                        f"message {number + 1}: the chat template prompts for the answer with "
                        f"{prompt[-30:]!r}, which becomes one token with the start of the answer; "
                        "change how it starts, or the template"
                    )
            # A token may have any number of spaces, so each start with a space is another case.
            is_space = any(value[:1].isspace() for _, value in start)
            if not is_space and len(self._begun) < _BEGINNINGS:
                self._begun.add(start)

    def _examples_by_prefixes(self, conversation: Conversation) -> list[ChatExample]:
        learned = _learned(conversation)
        conversation = _until(conversation, learned[-1])
        pairs = [
            self.chat.tokens(
                [
                    self.chat.render(_until(conversation, number - 1), add_generation_prompt=True),
                    self.chat.render(_until(conversation, number)),
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
                prompt = self.chat.decoded(pair[0])[-30:]
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
            end = self.chat.answer_stop(after, start)
            if end - start < 2 or self.chat.decoded(whole[end:stop]).strip():
                raise DataError(
                    "the chat template ends an answer with no special token, so a model would not "
                    "learn to end one; choose a tokenizer whose template does"
                )
            mask[start:end] = [1] * (end - start)
        self.chat.check_special(whole, conversation)
        return ChatExample(whole, mask, _answer_bytes(conversation))


def finder_of(hf: PreTrainedTokenizerBase) -> AnswerFinder | None:
    """The finder of a tokenizer's chat template, None if it has none."""
    return AnswerFinder(ChatFormat(hf)) if hf.chat_template else None


def answer_finder(hf: PreTrainedTokenizerBase, name: str) -> AnswerFinder:
    """Return what finds the answers to train on. A tokenizer without a chat template gets ours.

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
        finder = AnswerFinder(ChatFormat(hf))
        finder.end_of_turn_id()
        finder.check_turns()
    except DataError as error:
        raise DataError(f"data.tokenizer: {name}: {error}") from None
    return finder


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


def _learned(conversation: Conversation) -> list[int]:
    """Return the indices of the answers that are trained on."""
    answers = answers_of(conversation.messages)
    return [number for number in answers if number not in conversation.unlearned]
