"""Rows of a key-value cache of transformers: take one out, and merge rows of several caches.

Shapes in comments: H heads of keys and values, T columns, D values of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

# Keys and values (1, H, T, D) of a text in each layer; a layer with a window has its last columns.
Row = list[tuple[torch.Tensor, torch.Tensor]]


def starts_mergeable(config: Any) -> bool:
    """Whether the rows of a model's caches are keys and values alone, by its config.

    Layers with states, convolutions, or an index of blocks have more.
    """
    return can_merge(DynamicCache(config=config))


def can_merge(cache: Any) -> bool:
    """Whether the rows of a cache are keys and values alone."""
    return type(cache) is DynamicCache and all(
        type(layer) in (DynamicLayer, DummyLayer)
        # A window of one column has none in the cache.
        or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window > 1)
        for layer in cache.layers
    )


def row_of(cache: Any, row: int, columns: int) -> Row:
    """Copy the last `columns` columns of a row. A layer with a window may have fewer."""
    return [
        (_last_columns(layer.keys[[row]], columns), _last_columns(layer.values[[row]], columns))
        for layer in _filled(cache)
    ]


def merge_rows(cache: Any, kept: Sequence[int], joining: Sequence[Row], columns: int) -> None:
    """Keep the rows `kept` of a cache, and put the rows `joining` behind them, with `columns`
    columns.

    All end at the last column. Columns that a row does not have are zeros, which a mask has to
    hide. A row without layers has no column at all.
    """
    rows = list(kept)
    for number, layer in enumerate(_filled(cache)):
        width = columns
        if (window := getattr(layer, "sliding_window", None)) is not None:
            width = min(columns, window - 1)
            layer.cumulative_length = columns
        nothing = (layer.keys[:1, :, :0], layer.values[:1, :, :0])
        pairs = [row[number] if row else nothing for row in joining]
        layer.keys = _joined([layer.keys[rows], *(keys for keys, _ in pairs)], width)
        layer.values = _joined([layer.values[rows], *(values for _, values in pairs)], width)


def _filled(cache: Any) -> list[Any]:
    """Layers that hold keys and values. Other layers read another layer's, or have none."""
    return [layer for layer in cache.layers if layer.keys is not None]


def _last_columns(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """(rows, H, T, D) -> (rows, H, at most `columns`, D)"""
    return tensor[:, :, -columns:]


def _joined(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Parts (rows, H, any, D) -> (all rows, H, width, D), aligned at the last column."""
    # A negative padding cuts columns.
    aligned = [torch.nn.functional.pad(part, (0, 0, width - part.shape[2], 0)) for part in parts]
    return torch.cat(aligned)
