"""Text generation: the sampler, which reads a batch of texts and draws a token for each, step by
step.

`generate_steps` is the sampler. `generate_tokens` hands its tokens on as they arrive (`sample`,
`chat`, `serve`, the samples of an evaluation). `generate_completions` collects them (reinforcement
learning, the answers to a task's questions). `TextStream` decodes tokens to text.
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
from nanogpt_hf.data.tokenizer import end_of_text_id_of
from nanogpt_hf.errors import DataError, DivergedError
from nanogpt_hf.model.config_fields import has_cache

LOGITS_NOT_FINITE = (
    "the model's logits are not finite: its training diverged, or its weights are damaged; choose "
    "another model or checkpoint"
)


def end_ids_of(model: transformers.PreTrainedModel) -> set[int]:
    """Tokens that end a text of the model: chat models list theirs in generation_config.json,
    others in config.
    """
    found = set[int]()
    for config in (model.config, model.generation_config):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            found.update(value if isinstance(value, list) else [value])
    return found


def answer_end_ids(model: transformers.PreTrainedModel, chat: ChatFormat) -> set[int]:
    """Tokens that end an answer in a chat."""
    found = end_ids_of(model)
    end_of_text = end_of_text_id_of(chat.hf)
    if end_of_text is not None:
        found.add(end_of_text)
    # A template without a certain end of an answer: the model's own ends are enough.
    with contextlib.suppress(DataError):
        found.add(chat.end_of_turn_id())
    return found


# From logits (rows, V) in float32 to a token for each row, (rows,). Raises DivergedError if logits
# are not finite.
Draw = Callable[[torch.Tensor], torch.Tensor]


class FilteredDraw:
    """Draws on the CPU by `torch.multinomial`, from the likeliest tokens only if asked.

    Row i draws from its own generator, seeded with `seeds[i]`. `temperature` 0 is greedy.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        temperature: float,
        top_k: int | None = None,
        top_p: float | None = None,
    ):
        # Dividing logits by less overflows, and by then the likeliest token has all probability.
        self._greedy = temperature < 1e-5
        # A generator for each row: what one row draws does not move the others.
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._warpers = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            self._warpers.append(TopKLogitsWarper(top_k))
        if top_p is not None and top_p < 1:
            self._warpers.append(TopPLogitsWarper(top_p))

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        text: Any = None  # these warpers do not read it
        logits = self._warpers(text, logits).cpu()
        # Tokens that were filtered out are -inf, so only the largest logit of a row has to be
        # finite. A NaN would be the largest.
        if not logits.amax(-1).isfinite().all():
            raise DivergedError(LOGITS_NOT_FINITE)
        if self._greedy:
            return logits.argmax(-1)
        # (rows, V): a row of probabilities with its generator.
        rows = zip(logits.softmax(-1), self._generators, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=source) for row, source in rows])


class QuantileDraw:
    """Draws on the model's device: the token at which a row's cumulative distribution passes a
    uniform number.

    Token t of row i uses the t-th uniform number of `seeds[i]`. These numbers come from raw bits,
    so that rollouts stay the same with every version of torch and NumPy. `temperature` 0 is greedy.
    """

    def __init__(
        self, seeds: Sequence[int], temperature: float, max_new_tokens: int, device: torch.device
    ):
        self._temperature = temperature
        # MPS has no float64.
        self._exact = torch.float32 if device.type == "mps" else torch.float64
        numbers = np.stack([_uniform(seed, max_new_tokens) for seed in seeds])
        self._uniform = torch.from_numpy(numbers).to(device, self._exact)  # (rows, max_new_tokens)
        self._drawn = 0

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if not logits.isfinite().all():
            raise DivergedError(f"{LOGITS_NOT_FINITE}, or lower optim.learning_rate")
        if not self._temperature:
            return logits.argmax(-1)
        cumulative = (logits / self._temperature).softmax(-1).cumsum(-1, dtype=self._exact)
        # Inverse transform sampling: a uniform number falls into the interval of token v with
        # probability p(v). The last sum is 1 up to rounding. Scaled by it, a number below 1 falls
        # into the distribution; the clamp is for a product that is rounded up to that sum.
        numbers = self._uniform[:, self._drawn, None] * cumulative[:, -1:]  # (rows, 1)
        self._drawn += 1
        tokens = torch.searchsorted(cumulative, numbers, right=True)[:, 0]
        return tokens.clamp(max=logits.shape[1] - 1)


def _uniform(seed: int, count: int) -> np.ndarray:
    """Numbers in [0, 1) from raw bits, which no version of NumPy changes."""
    return (np.random.Philox(key=seed).random_raw(count) >> np.uint64(11)) * 2.0**-53


class _Texts:
    """Texts of a batch as the model reads them: prompts with the tokens drawn so far.

    Texts of several lengths are padded on the left, so that all go on at the same column:

        . . . 3 4 5      padding 3
        . 7 8 9 1 2      padding 1

    With a key-value cache the model reads each column once.
    """

    def __init__(self, model: transformers.PreTrainedModel, prompts: Sequence[Sequence[int]]):
        self._model: Any = model
        self._limit = model.config.max_position_embeddings
        prompts = [list(prompt[-self._limit :]) for prompt in prompts]
        width = max(map(len, prompts))
        padding = [width - len(prompt) for prompt in prompts]
        self._is_padded = any(padding)
        self._padding = torch.tensor(padding, device=model.device)  # (rows,)
        filled = [[0] * n + prompt for n, prompt in zip(padding, prompts, strict=True)]
        self._ids = torch.tensor(filled, device=model.device)  # (rows, T)
        self._use_cache = has_cache(model.config, padded=self._is_padded)
        self._cache = None
        self._cached = 0  # columns that the cache holds

    def append(self, tokens: torch.Tensor) -> None:
        """Add a token (rows,) to each text."""
        self._ids = torch.cat([self._ids, tokens[:, None].to(self._ids.device)], dim=1)

    def next_logits(self) -> torch.Tensor:
        """Logits (rows, V) of the next token of each text, in float32."""
        if self._ids.shape[1] > self._limit:
            self._keep_newer_half()
        logits = None
        if self._use_cache or not self._is_padded:
            logits = self._read_columns()
        # A model without a cache has states or convolutions, which would see padding on the left.
        if self._is_padded and not self._use_cache:
            logits = self._read_whole_texts()
        assert logits is not None
        return logits.float()

    def _keep_newer_half(self) -> None:
        """Make room in the context; its newer half gets new positions, so it is read again."""
        # A cached key or value belongs to the position at which it was read, so all of the cache is
        # of no use at the new positions.
        cut = self._ids.shape[1] - max(1, self._limit // 2)
        self._ids = self._ids[:, cut:]
        self._padding = (self._padding - cut).clamp(min=0)
        self._cache = None
        self._cached = 0

    def _read_columns(self) -> torch.Tensor:
        """Read the columns that are not in the cache; all of them without one."""
        options = {}
        if self._use_cache:
            # Stated, since some models of transformers count the tokens in their cache wrongly if
            # their first layer has no attention (bamba).
            places = torch.arange(self._ids.shape[1], device=self._ids.device)
            positions = places - self._padding[:, None]  # (rows, T), negative for padding
            options["position_ids"] = positions.clamp(min=0)[:, self._cached :]
            if self._is_padded:
                options["attention_mask"] = (positions >= 0).long()
        out = self._model(
            self._ids[:, self._cached :],
            past_key_values=self._cache,
            use_cache=self._use_cache,
            logits_to_keep=1,
            **options,
        )
        self._cache = getattr(out, "past_key_values", None)
        self._use_cache = self._cache is not None
        self._cached = self._ids.shape[1] if self._use_cache else 0
        return out.logits[:, -1]

    def _read_whole_texts(self) -> torch.Tensor:
        """Read all texts from their first token, padded on the right, where no token of a text
        sees the padding.
        """
        # Shift each text to the left by its padding: column t takes the token of t + padding.
        rows, length = self._ids.shape
        places = torch.arange(length, device=self._ids.device) + self._padding[:, None]  # (rows, T)
        texts = self._ids.gather(1, places.clamp(max=length - 1))
        texts = texts.masked_fill(places >= length, 0)
        last = length - 1 - self._padding  # (rows,) the column of each text's last token
        # Logits of all columns in which a text ends. Each text then takes its own column.
        columns, number = last.unique(return_inverse=True)
        logits = self._model(texts, use_cache=False, logits_to_keep=columns).logits
        if logits.shape[1] != len(columns):  # a model without logits_to_keep computes all
            number = last
        return logits[torch.arange(rows, device=number.device), number]


class Step(NamedTuple):
    """One token for each row of a batch."""

    tokens: torch.Tensor  # (rows,) int64, of no meaning for a text that has ended before
    ended: torch.Tensor  # (rows,) bool: this token or an earlier one ends the text


@torch.no_grad()
def generate_steps(
    model: transformers.PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    draw: Draw,
    end_ids: Collection[int],
    all_ended: Callable[[bool], bool] = bool,
) -> Iterator[Step]:
    """Continue all prompts at once: read, draw a token for each, append it, `max_new_tokens` times.

    `all_ended` is called before each forward pass with whether all texts have ended, and ends
    the generation if it returns true. The processes of a sharded model need each other's forward
    passes, so they must decide it together. If the context is full, its newer half is kept and read
    again. A prompt without tokens raises ValueError.
    """
    if not all(map(len, prompts)):
        raise ValueError("the prompt has no tokens")
    texts = _Texts(model, prompts)
    ends = torch.tensor(sorted(end_ids), dtype=torch.int64, device=model.device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
    for _ in range(max_new_tokens):
        # The host waits here for the device, once for each token.
        if all_ended(bool(ended.all())):
            return
        tokens = draw(texts.next_logits()).to(model.device)
        ended = ended | torch.isin(tokens, ends)
        yield Step(tokens, ended)
        texts.append(tokens)


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
    which the processes of a sharded model need. Sample i is drawn by `seed` + i, so it does not
    depend on `num_samples`. Raises DivergedError if logits are not finite, and ValueError for an
    empty prompt.
    """
    seeds = range(seed, seed + num_samples)
    steps = generate_steps(
        model,
        [prompt_ids] * num_samples,
        max_new_tokens=max_new_tokens,
        draw=FilteredDraw(seeds, temperature, top_k, top_p),
        end_ids=end_ids_of(model) if end_ids is None else end_ids,
        all_ended=(lambda ended: False) if to_the_end else bool,
    )
    for step in steps:
        # The token that ends a continuation is no part of its text.
        ended = step.ended.tolist()
        if all(ended) and not to_the_end:
            return
        tokens = step.tokens.tolist()
        yield [None if over else token for over, token in zip(ended, tokens, strict=True)]


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
    on the other rows. A completion ends with one of `end_ids`. `all_ended` is as in
    `generate_steps`. Raises DivergedError if logits are not finite.
    """
    rows = len(prompts)
    ids = torch.zeros(rows, max_new_tokens, dtype=torch.int64, device=model.device)
    lengths = torch.zeros(rows, dtype=torch.int64, device=model.device)
    ended = torch.zeros(rows, dtype=torch.bool, device=model.device)
    steps = generate_steps(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        draw=QuantileDraw(seeds, temperature, max_new_tokens, model.device),
        end_ids=end_ids,
        all_ended=all_ended,
    )
    for number, step in enumerate(steps):
        # A text that ended at an earlier step gets no more tokens; the one that ends it counts.
        ids[:, number] = step.tokens.masked_fill(ended, 0)
        lengths += ~ended
        ended = step.ended
    return Completions(ids.cpu(), lengths.cpu(), ended.cpu())


def continue_text(
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
    prompt_ids: list[int],
    **options: Any,
) -> str:
    """Text of one continuation; `options` are arguments of `generate_tokens`."""
    stream = TextStream(tokenizer, prompt_ids)
    text = ""
    for (token,) in generate_tokens(model, prompt_ids, **options):
        if token is not None:
            text += stream.add(token)
    return text + stream.end()


class TextStream:
    """Decodes tokens to text as soon as characters are complete: a character may be spread over
    several tokens.

    transformers' TextStreamer would hold text back until the next space, which text of
    characters may not have.
    """

    _CONTEXT = 8  # tokens of the prompt; more than enough for a whole character

    def __init__(
        self, tokenizer: transformers.PreTrainedTokenizerBase, prompt_ids: Sequence[int] = ()
    ):
        self.tokenizer = tokenizer
        # Tokens since the last complete character but one. Tokens whose text was returned, or is in
        # the prompt, are the context for the others: some tokenizers decode a token differently at
        # the start of a text.
        self._ids = list(prompt_ids[-self._CONTEXT :])
        self._returned = len(self._ids)

    def add(self, token: int) -> str:
        """Text that `token` completes, '' while a character is incomplete."""
        self._ids.append(token)
        return self._new_text(complete=False)

    def end(self) -> str:
        """Rest of the text, incomplete characters included."""
        return self._new_text(complete=True)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _new_text(self, complete: bool) -> str:
        # The text is decoded with its context and without the new tokens; the difference is new. A
        # half character decodes to the replacement character at the end.
        text = self._decode(self._ids)
        if not complete and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new = text[len(self._decode(self._ids[: self._returned])) :]
        if new:  # special tokens have no text: they cannot be the context
            self._ids = self._ids[self._returned :]
            self._returned = len(self._ids)
        return new
