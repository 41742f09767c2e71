"""The declaration of a knob: default, meaning, bounds, and what reads it."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any, NamedTuple

from nanogpt_hf.config.names import (
    ARCHIVE,
    COMPRESSIONS,
    HUB_ID,
    ROW_ENDINGS,
    TEXT_ENDINGS,
)
from nanogpt_hf.config.settings import Setting


class Reader(NamedTuple):
    """The choice of another knob without which nothing reads a knob.

    `words` end the sentence "it is read only ..."; `remedy` says how to make that choice.
    """

    key: str
    accepts: Callable[[Any], bool]
    words: str
    remedy: str = ""
    # Values of the knob that ask for nothing, and may stand in a recipe without the reader.
    idle: tuple[Any, ...] = ()


def read_by_all(readers: Mapping[str, Iterable[Reader]], values: Mapping[str, Any]) -> set[str]:
    """Return the knobs that are read with these values of all knobs: their readers accept them."""
    read = set()
    for key, asked in readers.items():
        if all(reader.accepts(values[reader.key]) for reader in asked):
            read.add(key)
    return read


def is_chosen(value: Any) -> bool:
    """Whether the value of a knob that switches something on does so. 0 is a value, such as of
    `finetune.freeze_layers`, which then freezes the embeddings only.
    """
    return value is not None and value is not False and value not in ("", [], {})


def only_with(key: str, *values: str, remedy: str = "") -> Reader:
    """A knob is read only if another one has one of these values, or, without values, is chosen."""
    if not values:
        return Reader(key, is_chosen, f"with {key}", remedy or "set that")
    *first, last = values
    listed = f"{', '.join(first)} or {last}" if first else last
    return Reader(key, values.__contains__, f"with {key} {listed}", remedy or "set that")


def only_above(key: str, low: int) -> Reader:
    """A knob is read only if another one is above this number."""
    return Reader(key, lambda value: value > low, f"with {key} above {low}", "set that")


def only_without(key: str, *values: str, remedy: str = "", idle: tuple[Any, ...] = ()) -> Reader:
    """A knob is read only if another one has none of these values, or, without values, is not
    chosen.
    """
    if not values:
        return Reader(key, lambda value: not is_chosen(value), f"without {key}", remedy, idle)
    words = f"without {key} {' or '.join(values)}"
    return Reader(key, lambda value: value not in values, words, remedy, idle)


_BUILT_IN = ("python-docs", "arithmetic")


def _ending(*endings: str) -> re.Pattern[str]:
    """A pattern of the names of files with one of these endings, compressed or not."""
    packed = "|".join(map(re.escape, (*COMPRESSIONS, ARCHIVE)))
    return re.compile(rf"(?i).*({'|'.join(map(re.escape, endings))})({packed})?")


_PLAIN_TEXT = _ending(*(ending for ending in TEXT_ENDINGS if ending not in ROW_ENDINGS))
_FILE = _ending(*TEXT_ENDINGS)


def _is_url(source: str) -> bool:
    return "://" in source


def _may_be_on_the_hub(source: str) -> bool:
    """Whether a source may be a data set of the Hub: it has the name of one, and is not here."""
    if source in _BUILT_IN or _FILE.fullmatch(source):
        return False
    return bool(HUB_ID.fullmatch(source)) and not os.path.exists(os.path.expanduser(source))


def _may_have_columns(source: str) -> bool:
    """Whether a source may have rows with columns: it is no file of plain text."""
    return source not in _BUILT_IN and not _PLAIN_TEXT.fullmatch(source.partition("?")[0])


# Readers that are about the kind of the source. Of a mixture one source is enough.
FROM_A_URL = Reader("data.source", _is_url, "from a data.source that is a URL")
FROM_THE_HUB = Reader("data.source", _may_be_on_the_hub, "from a data.source on the Hub")
FROM_COLUMNS = Reader(
    "data.source", _may_have_columns, "from a data.source whose rows have columns"
)


def knob(
    default: Any,
    meaning: str,
    low: float | None = None,
    high: float | None = None,
    read: tuple[Reader, ...] | Reader = (),
) -> Any:
    """A dataclass field with its one line of meaning, its inclusive bounds and its readers.

    A knob is read if every one of `read`, and the READER of its section, has its choice.
    """
    readers = (read,) if isinstance(read, Reader) else read
    metadata = {"meaning": meaning, "low": low, "high": high, "readers": readers}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def loss_term(
    default: Any,
    meaning: str,
    low: float | None = None,
    high: float | None = None,
    *,
    layouts: tuple[Setting, ...] = (),
) -> Any:
    """A knob that adds a term to the loss on text (methods/terms.py), and the layouts that honour
    the term: members of LAYOUTS in config/methods.py, by default none.
    """
    metadata = {"meaning": meaning, "low": low, "high": high, "layouts": layouts}
    return field(default=default, metadata=metadata)
