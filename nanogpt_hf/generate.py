"""Text generation: sample tokens with a key-value cache, and decode them to text as they arrive;
completions of many prompts at once.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanogpt_hf.data.chat_template import ChatFormat
from nanogpt_hf.data.conversations import Conversation, Message, texts_of
from nanogpt_hf.data.tokenizer import end_of_text_id_of, unknown_characters_named
from nanogpt_hf.errors import DataError, DivergedError
from nanogpt_hf.model.decoders import caches

_CONTEXT = 8  # tokens of the prompt; more than enough for a whole character
LOGITS_NOT_FINITE = (
    "the model's logits are not finite: its training diverged, or its weights are damaged; choose "
    "another model or checkpoint"
)


def end_ids_of(model: transformers.PreTrainedModel) -> set[int]:
    """The tokens that end a text of the model: chat models list theirs in
    generation_config.json, others in config.
    """
    ends = (model.config.eos_token_id, getattr(model.generation_config, "eos_token_id", None))
    return {
        end
        for value in ends
        for end in (value if isinstance(value, list) else [value])
        if end is not None
    }


def answer_end_ids(model: transformers.PreTrainedModel, chat: ChatFormat) -> set[int]:
    """The tokens that end an answer in a chat."""
    end_of_text = end_of_text_id_of(chat.hf)
    ids = end_ids_of(model) | (set() if end_of_text is None else {end_of_text})
    # no certain end of an answer in the template: the model's own is enough
    with contextlib.suppress(DataError):
        ids.add(chat.end_of_turn_id())
    return ids


@torch.no_grad()
def generate_tokens(
    model: transformers.PreTrainedModel,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    end_ids: Collection[int] | None = None,
    to_the_end: bool = False,
) -> Iterator[list[int | None]]:
    """Yield, step by step, the next token of each of `num_samples` continuations; None for one that
    has ended.

    A continuation ends before one of `end_ids`, by default the model's, and generation stops
    when all have ended. With `to_the_end` it runs the model `max_new_tokens` times in any case,
    which the processes of a sharded model need. `temperature` 0 is greedy. Sample i draws from
    its own generator, seeded with `seed` + i, so it does not depend on `num_samples`. When the
    context is full, its newer half is kept and read again. An empty prompt raises ValueError,
    and logits that are not finite raise DivergedError.
    """
    if not prompt_ids:
        raise ValueError("the prompt has no tokens")
    greedy = temperature < 1e-5  # dividing by less overflows
    warpers = LogitsProcessorList()
    if not greedy:
        warpers.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    generators = [torch.Generator().manual_seed(seed + i) for i in range(num_samples)]
    end_ids = end_ids_of(model) if end_ids is None else end_ids
    limit = model.config.max_position_embeddings
    context = torch.tensor([prompt_ids[-limit:]] * num_samples, device=model.device)
    unread, cache, ended = context, None, [False] * num_samples
    use_cache = caches(model)
    for _ in range(max_new_tokens):
        if context.shape[1] > limit:
            context = context[:, -max(1, limit // 2) :]
            unread, cache = context, None
        out = model(unread, past_key_values=cache, use_cache=use_cache, logits_to_keep=1)
        cache = getattr(out, "past_key_values", None)
        logits = warpers(context, out.logits[:, -1].float()).cpu()
        # filtered tokens are -inf; a NaN would be the maximum
        if not logits.amax(-1).isfinite().all():
            raise DivergedError(LOGITS_NOT_FINITE)
        if not greedy:
            probabilities = logits.softmax(-1)
            drawn = [
                torch.multinomial(row, 1, generator=g)
                for row, g in zip(probabilities, generators, strict=True)
            ]
            tokens = torch.cat(drawn)
        else:
            tokens = logits.argmax(-1)
        ended = [was or token in end_ids for was, token in zip(ended, tokens.tolist(), strict=True)]
        if all(ended) and not to_the_end:
            return
        yield [None if over else token for over, token in zip(ended, tokens.tolist(), strict=True)]
        unread = tokens[:, None].to(model.device)
        context = torch.cat([context, unread], dim=1)
        if cache is None:
            unread = context


def continue_text(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    prompt_ids: list[int],
    **options: Any,
) -> str:
    """The text of one continuation; `options` are those of `generate_tokens`."""
    text = TextStream(tokenizer, prompt_ids)
    steps = generate_tokens(model, prompt_ids, **options)
    return "".join(text.add(token) for (token,) in steps if token is not None) + text.end()


def encode_messages(
    chat: ChatFormat, messages: list[Message], tools: list[Any] | None = None
) -> list[int]:
    """The prompt ids for the answer to the last of `messages`.

    Raises DataError if the chat template fails, or for a character that the tokenizer does not
    have.
    """
    return chat.prompt_ids(messages, tools)


class TooManyTokensError(ValueError):
    """What has to stay of a conversation is more than its tokens may be."""


def encode_chat(
    chat: ChatFormat, messages: list[Message], max_tokens: int, tools: list[Any] | None = None
) -> tuple[list[int], list[Message]]:
    """The prompt ids of `encode_messages`, and the messages that are in them.

    If they are more than `max_tokens`, as few of the oldest questions with their answers are
    dropped as possible; a system message and the last question are kept. Raises
    TooManyTokensError if those alone are more.
    """
    system = messages[:1] if messages[0]["role"] == "system" else []
    others = messages[len(system) :]
    # A conversation may begin with its first message, or with any question.
    starts = [i for i, message in enumerate(others) if not i or message["role"] == "user"]
    tried = dict[int, tuple[list[int], list[Message]]]()

    def fits(number: int) -> bool:
        kept = system + others[starts[number] :]
        tried[number] = encode_messages(chat, kept, tools), kept
        return len(tried[number][0]) <= max_tokens

    # Encoding everything again for each question takes a minute for a large request. So the search
    # begins where the messages alone would fit, and goes on in steps that double until one
    # beginning fits and an earlier one does not.
    number = _first_that_may_fit(chat, system, others, starts, max_tokens)
    low, high, step = -1, len(starts), 1
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
    """The number of the first of `starts` from which the text of the messages has at most
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
        lengths = [
            len(ids) for ids in chat.hf(texts, add_special_tokens=False, verbose=False)["input_ids"]
        ]
    room, first = max_tokens - sum(lengths[: len(system)]), len(others)
    for length in reversed(lengths[len(system) :]):
        room -= length
        if room < 0:
            break
        first -= 1
    return next((i for i, start in enumerate(starts) if start >= first), len(starts) - 1)


class TextStream:
    """Decodes tokens to text as soon as characters are complete: a character may be spread over
    several tokens.

    transformers' TextStreamer would hold text back until the next space, which text of
    characters may not have.
    """

    def __init__(
        self, tokenizer: transformers.PreTrainedTokenizerBase, prompt_ids: Sequence[int] = ()
    ):
        self.tokenizer = tokenizer
        # Tokens since the last complete character but one. Those whose text was returned, or is in
        # the prompt, are the context for the others: some tokenizers decode a token differently at
        # the start of a text.
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._returned = len(self._ids)

    def add(self, token: int) -> str:
        """The text that `token` completes, '' while a character is incomplete."""
        self._ids.append(token)
        return self._new_text(complete=False)

    def end(self) -> str:
        """The rest of the text, incomplete characters included."""
        return self._new_text(complete=True)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _new_text(self, complete: bool) -> str:
        text = self._decode(self._ids)
        if not complete and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = text[len(self._decode(self._ids[: self._returned])) :]
        if new:  # special tokens have no text: they cannot be the context
            self._ids = self._ids[self._returned :]
            self._returned = len(self._ids)
        return new


class StopText:
    """Ends a text before the stop string that is complete first.

    Holds back what may be the beginning of one.
    """

    def __init__(self, stops: list[str]):
        self._stops, self._held = stops, ""

    def add(self, text: str) -> tuple[str, bool]:
        """The text that may be shown after `text` was added, and whether a stop string has ended
        it.
        """
        self._held += text
        found = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if found:
            return self._held[: min(found)[1]], True
        beginnings = (stop[:n] for stop in self._stops for n in range(1, len(stop)))
        kept = max((len(part) for part in beginnings if self._held.endswith(part)), default=0)
        shown = self._held[: len(self._held) - kept]
        self._held = self._held[len(shown) :]
        return shown, False

    def end(self) -> str:
        """The text that was held back, after the last token."""
        return self._held


class Completions(NamedTuple):
    """Completions of the rows of a batch, on the CPU."""

    ids: torch.Tensor  # (rows, max_new_tokens) int64, 0 after the end
    lengths: torch.Tensor  # (rows,) tokens of each, including the one that ends it
    ended: torch.Tensor  # (rows,) whether it ended by itself, before max_new_tokens


@torch.no_grad()
def generate_completions(
    model: transformers.PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    end_ids: Collection[int],
    all_ended: Callable[[bool], bool] = bool,
) -> Completions:
    """Sample one completion for each prompt, all rows together; `temperature` 0 is greedy.

    Row i depends on its prompt, `seeds[i]` and, by rounding, on the shape of the batch, but not
    on the other rows: token t is where the t-th uniform number of the row's seed falls in the
    cumulative distribution. A completion ends with one of `end_ids`. `all_ended` is called
    before each forward pass with whether all rows have ended, and ends the generation if it
    returns true; processes that share a sharded model must decide it together. Raises
    DivergedError if logits are not finite.
    """
    device, rows = model.device, len(prompts)
    width = max(map(len, prompts))
    unread = torch.zeros(rows, width, dtype=torch.int64)
    mask = torch.zeros(rows, width + max_new_tokens, dtype=torch.int64)
    texts = torch.zeros_like(mask)
    # padded on the left, so that all continue at the same column; whole texts on the right, since
    # states and convolutions would see what is on their left
    for row, prompt in enumerate(prompts):
        unread[row, width - len(prompt) :] = texts[row, : len(prompt)] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    unread, mask, texts = unread.to(device), mask.to(device), texts.to(device)
    every, last = torch.arange(rows), torch.tensor([len(prompt) - 1 for prompt in prompts])
    positions = (mask[:, :width].cumsum(1) - 1).clamp(min=0)
    exact = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    uniform = torch.from_numpy(np.stack([_uniform(seed, max_new_tokens) for seed in seeds])).to(
        device, exact
    )
    ends = torch.tensor(sorted(end_ids), device=device)
    ids = torch.zeros(rows, max_new_tokens, dtype=torch.int64, device=device)
    lengths = torch.zeros(rows, dtype=torch.int64, device=device)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    cache, use_cache = None, caches(model, padded=len(set(map(len, prompts))) > 1)
    logits: Any = None
    for number in range(max_new_tokens):
        if all_ended(bool(ended.all())):
            break
        if use_cache:
            out = model(
                unread,
                attention_mask=mask[:, : width + number],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = out.logits[:, -1]
            cache = getattr(out, "past_key_values", None)
            use_cache = cache is not None
        if not use_cache:
            columns, places = last.unique(return_inverse=True)
            read = texts[:, : width + number]
            logits = model(read, use_cache=False, logits_to_keep=columns.to(device)).logits
            logits = logits[every, places if logits.shape[1] == len(columns) else last]
        logits = logits.float()
        finite &= logits.isfinite().all()
        if temperature:
            cumulative = (logits / temperature).softmax(-1).cumsum(-1, dtype=exact)
            places = torch.searchsorted(
                cumulative, uniform[:, number, None] * cumulative[:, -1:], right=True
            )
            tokens = places[:, 0].clamp(max=logits.shape[1] - 1)
        else:
            tokens = logits.argmax(-1)
        ids[:, number] = tokens.masked_fill(ended, 0)
        lengths += ~ended
        ended = ended | torch.isin(tokens, ends)
        if use_cache:
            unread, positions = tokens[:, None], positions[:, -1:] + 1
        else:
            last = last + 1
            texts[every, last] = tokens
    if not finite:
        raise DivergedError(f"{LOGITS_NOT_FINITE}, or lower optim.learning_rate")
    return Completions(ids.cpu(), lengths.cpu(), ended.cpu())


def _uniform(seed: int, count: int) -> np.ndarray:
    """Numbers in [0, 1) from raw bits, which no version of NumPy changes."""
    return (np.random.Philox(key=seed).random_raw(count) >> np.uint64(11)) * 2.0**-53
