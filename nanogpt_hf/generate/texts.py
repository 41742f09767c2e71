"""Texts of a batch as the model reads them, with a key-value cache; some leave, others join."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from nanogpt_hf.generate.cache import Row, can_merge, merge_rows, row_of, starts_mergeable
from nanogpt_hf.model.config_fields import has_cache
from nanogpt_hf.model.head_gpt import CACHE


class Texts:
    """Texts of several lengths are padded on the left, so that all go on at the same column:

        . . . 3 4 5      3 tokens
        . 7 8 9 1 2      5 tokens

    With a key-value cache the model reads each column once. `before_pass` is called before each
    forward pass.
    """

    def __init__(
        self, model: transformers.PreTrainedModel, before_pass: Callable[[], Any] = lambda: None
    ):
        self._model: Any = model
        self._before_pass = before_pass
        self._limit = model.config.max_position_embeddings
        self._lengths: list[int] = []  # tokens of each text
        self._ids = torch.zeros(0, 0, dtype=torch.int64, device=model.device)  # (rows, T)
        self._padding = self._ids[:, 0:0].sum(1)  # (rows,)
        self._cache: Any = None
        self._cached = 0  # columns that the cache holds
        self._is_mergeable = starts_mergeable(model.config)
        self._is_padded = False
        self._use_cache = False
        self._no_cache = False  # the model has returned none
        # The newest prefix that was read by itself, with its keys and values.
        self._prefix: tuple[tuple[int, ...], Row] = ((), [])

    @property
    def can_join(self) -> bool:
        """Whether texts can join others without all of them being read again."""
        return self._is_mergeable or not self._use_cache

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        """Begin with the texts `prompts`; what does not fit into the context is left out."""
        self._arrange([], prompts)
        self._drop_cache()

    def replace(self, kept: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Keep the rows `kept`, and let the texts `prompts` join behind them.

        All tokens of the kept rows but the newest have to be read. Without a cache that can be
        merged, all is read again.
        """
        if not self._is_mergeable:
            self._arrange(kept, prompts)
            self._drop_cache()
            return
        # The last token of each prompt is read together with the newest tokens of the other rows.
        prefixes = [tuple(prompt[-self._limit :][:-1]) for prompt in prompts]
        read = self._read_prefixes(prefixes)
        self._arrange(kept, prompts)
        if self._is_mergeable and self._cache is not None:
            self._cached = self._ids.shape[1] - 1
            merge_rows(self._cache, kept, [read[prefix] for prefix in prefixes], self._cached)
        else:
            self._drop_cache()

    def append(self, tokens: torch.Tensor) -> None:
        """Add a token (rows,) to each text."""
        self._ids = torch.cat([self._ids, tokens[:, None].to(self._ids.device)], dim=1)
        self._lengths = [length + 1 for length in self._lengths]

    def next_logits(self) -> torch.Tensor:
        """Logits (rows, V) of the next token of each text, in float32."""
        if max(self._lengths) > self._limit:
            self._keep_newer_halves()
        if self._use_cache:
            logits = self._read_columns()
            if self._use_cache:
                return logits.float()
        # A model without a cache has states or convolutions, which would see padding on the left.
        # Asked for a cache, it may even take a single token for the rest of a text (rwkv).
        logits = self._read_whole_texts() if self._is_padded else self._read_columns()
        return logits.float()

    def _arrange(self, kept: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Set the rows: the kept ones and prompts, as wide as the longest."""
        prompts = [list(prompt[-self._limit :]) for prompt in prompts]
        self._lengths = [self._lengths[row] for row in kept] + [*map(len, prompts)]
        width = max(self._lengths)
        # A negative padding cuts columns, in which all kept rows have padding.
        old = self._ids[list(kept)]
        rows = [torch.nn.functional.pad(old, (width - old.shape[1], 0))]
        if prompts:
            filled = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
            rows.append(torch.tensor(filled, device=self._ids.device))
        self._ids = torch.cat(rows)
        padding = [width - length for length in self._lengths]
        self._is_padded = any(padding)
        self._use_cache = has_cache(self._model.config, padded=self._is_padded)
        self._use_cache &= not self._no_cache
        self._padding = torch.tensor(padding, device=self._ids.device)

    def _read_prefixes(self, prefixes: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Row]:
        """Read each prefix once; return the keys and values of each, none for an empty one."""
        read = {(): [], self._prefix[0]: self._prefix[1]}
        unread = [prefix for prefix in dict.fromkeys(prefixes) if prefix not in read]
        if unread:
            batch = Texts(self._model, self._before_pass)
            batch.start(unread)
            batch.next_logits()
            self._is_mergeable = can_merge(batch._cache)
            if not self._is_mergeable:
                return read
            for row, prefix in enumerate(unread):
                read[prefix] = row_of(batch._cache, row, len(prefix))
            if self._cache is None:
                self._cache = batch._cache
        # Samples of one question join one after another: the next prompt may be the same.
        self._prefix = (prefixes[-1], read[prefixes[-1]]) if prefixes else self._prefix
        return read

    def _keep_newer_halves(self) -> None:
        """Cut texts that fill the context to their newer half, which gets new positions."""
        # A cached key or value belongs to the position at which it was read, so all of the cache is
        # of no use at the new positions.
        half = max(1, self._limit // 2)
        self._lengths = [half if n > self._limit else n for n in self._lengths]
        self._arrange(range(len(self._lengths)), [])
        self._drop_cache()

    def _drop_cache(self) -> None:
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
        self._before_pass()
        out = self._model(
            self._ids[:, self._cached :],
            **{CACHE: self._cache},
            use_cache=self._use_cache,
            logits_to_keep=1,
            **options,
        )
        cache = getattr(out, CACHE, None)
        # Another class than transformers' own (xlstm) has states, which padding would change.
        self._cache = cache if isinstance(cache, transformers.Cache) else None
        self._no_cache = self._cache is None
        self._use_cache = not self._no_cache
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
        self._before_pass()
        logits = self._model(texts, use_cache=False, logits_to_keep=columns).logits
        if logits.shape[1] != len(columns):  # a model without logits_to_keep computes all
            number = last
        return logits[torch.arange(rows, device=number.device), number]
