"""Complete many prompts: a text that ends makes room for the next prompt."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
import transformers

from nanogpt_hf.errors import DivergedError
from nanogpt_hf.generate.draws import (
    LOGITS_NOT_FINITE,
    NO_TOKEN,
    draw_by_quantile,
    uniform_numbers,
)
from nanogpt_hf.generate.texts import Texts


class Completions(NamedTuple):
    """Completions of prompts, on the CPU; K is the largest limit."""

    ids: torch.Tensor  # (rows, K) int64, 0 after the end
    lengths: torch.Tensor  # (rows,) tokens of each, including the one that ends it
    ended: torch.Tensor  # (rows,) whether it ended by itself, before its limit


@torch.no_grad()
def generate_completions(
    model: transformers.PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int],
    limits: Sequence[int],
    temperature: float,
    end_ids: Collection[int],
    batch_size: int | None = None,
    all_ended: Callable[[bool], bool] = bool,
    progress: Callable[[int], object] = lambda rows: None,
) -> Completions:
    """Sample one completion for each prompt (token ids); `temperature` 0 is greedy.

    Completion i depends on its prompt, `seeds[i]` and, by rounding, on the rows that are read
    together with it, but not on what they hold. It ends with one of `end_ids`, or after
    `limits[i]` tokens. At most `batch_size` rows are read at once, by default all: a row that has
    ended leaves the batch, and the next prompt takes its place. If a context is full, its newer
    half is kept and read again.

    `all_ended` is called before each forward pass with whether all completions have ended. If it
    returns false then, the model is called without use: the processes of a sharded model need each
    other's forward passes. `progress` is called with the number of rows that have ended since the
    last call.

    Raises DivergedError if logits are not finite, and ValueError for a prompt without tokens.
    """
    if not all(map(len, prompts)):
        raise ValueError("the prompt has no tokens")
    rows = [
        _Row(prompt, uniform_numbers(seed, limit), limit)
        for prompt, seed, limit in zip(prompts, seeds, limits, strict=True)
    ]
    batch = _Batch(Texts(model, lambda: all_ended(False)), rows, batch_size or max(1, len(rows)))
    while True:
        progress(batch.change())
        if not batch.rows:
            break
        batch.step(temperature, frozenset(end_ids))
    while not all_ended(True):
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    return _completions(rows, max(limits, default=0))


class _Row:
    """A prompt and its completion so far."""

    def __init__(self, prompt: Sequence[int], numbers: np.ndarray, limit: int):
        self.prompt = prompt
        self._numbers = numbers
        self._limit = limit
        self.ids: list[int] = []
        # Whether a token has ended the text.
        self.is_ended = False

    @property
    def is_over(self) -> bool:
        return self.is_ended or len(self.ids) >= self._limit

    @property
    def number(self) -> float:
        """The uniform number of the next token; any for a row that is over."""
        return 0.0 if self.is_over else float(self._numbers[len(self.ids)])

    def add(self, token: int, end_ids: Collection[int]) -> None:
        self.ids.append(token)
        self.is_ended = token in end_ids


class _Batch:
    """Rows that are read at once, and the rows that wait for a place."""

    def __init__(self, texts: Texts, rows: Sequence[_Row], size: int):
        self._texts = texts
        self._size = size
        # A forward pass reads the rows that join, so a large batch waits until several can.
        self._least = max(1, size // 8)
        self._waiting = [row for row in reversed(rows) if not row.is_over]
        self.rows: list[_Row] = []

    def change(self) -> int:
        """Let rows that are over leave, and rows that wait join; return how many have left."""
        kept = [number for number, row in enumerate(self.rows) if not row.is_over]
        # If the others had to be read again for it, all leave together.
        if kept and not self._texts.can_join:
            return 0
        left = len(self.rows) - len(kept)
        free = self._size - len(kept)
        joining = []
        if not kept or free >= self._least:
            joining = [self._waiting.pop() for _ in range(min(free, len(self._waiting)))]
        self.rows = [self.rows[number] for number in kept] + joining
        if self.rows and (left or joining):
            self._texts.replace(kept, [row.prompt for row in joining])
        return left

    def step(self, temperature: float, end_ids: Collection[int]) -> None:
        """Draw a token for each row. Raises DivergedError if logits are not finite."""
        numbers = [row.number for row in self.rows]
        drawn = draw_by_quantile(self._texts.next_logits(), numbers, temperature)
        # The host waits here for the device, once for each token of the batch.
        tokens = drawn.tolist()
        if NO_TOKEN in tokens:
            raise DivergedError(f"{LOGITS_NOT_FINITE}, or lower optim.learning_rate")
        for row, token in zip(self.rows, tokens, strict=True):
            if not row.is_over:
                row.add(token, end_ids)
        self._texts.append(drawn)


def _completions(rows: Sequence[_Row], width: int) -> Completions:
    """Completions of all rows, filled up to `width` tokens by zeros."""
    filled = [[*row.ids, *[0] * (width - len(row.ids))] for row in rows]
    return Completions(
        torch.tensor(filled, dtype=torch.int64).view(len(rows), width),
        torch.tensor([len(row.ids) for row in rows], dtype=torch.int64),
        torch.tensor([row.is_ended for row in rows], dtype=torch.bool),
    )
