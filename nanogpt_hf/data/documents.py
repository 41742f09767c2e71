"""Documents of a source: reading them again, the rows that cannot be used, and the documents that
are held out for validation.
"""

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.data.manifest import SPLITS
from nanogpt_hf.errors import DataError
from nanogpt_hf.formatting import plural

_NAMED = 3  # rows that a message names
_REMEDY = "; data.max_bad_rows N leaves out up to N such rows"
# Documents of up to this number of characters are kept in memory for the next reading. More are
# read again, so that the memory of a preparation does not grow with the source.
_KEPT_CHARACTERS = 100_000_000

logger = logging.getLogger(__name__)


class BadRows:
    """Rows of a split that cannot be used: counted, and the first few named.

    A limit below 1 is a share of the rows.
    """

    def __init__(self, limit: float = 0.0):
        self._limit = limit
        self.begin()

    def begin(self) -> None:
        """Forget the rows of an earlier reading."""
        # For each row that makes no document, the number of documents before it.
        self._before: list[int] = []
        self._failed: list[int] = []  # the numbers of documents that cannot be encoded
        self._named: list[str] = []  # the first few rows, with their reasons
        # Rows whose text is empty or null. They are skipped, whatever the limit is.
        self.empty = 0

    def add(self, documents: int, place: str, reason: str) -> None:
        """Count a row that comes after a number of documents. Raises DataError if it is one too
        many.
        """
        if not self._limit:
            raise DataError(f"{place}: {reason}{_REMEDY}")
        self._before.append(documents)
        self._name(f"{place}: {reason}")

    def add_document(self, number: int, reason: str) -> None:
        """Count a row whose document cannot be encoded, as `add` does."""
        # Documents are numbered without the rows that make none; a user counts all rows.
        row = f"row {number + 1 + self._skipped(number)} of all: {reason}"
        if not self._limit:
            raise DataError(row + _REMEDY)
        self._failed.append(number)
        self._name(row)

    def _name(self, row: str) -> None:
        if len(self._named) < _NAMED:
            self._named.append(row)
        # A share is checked at the end, when the number of rows is known.
        if 1 <= self._limit < len(self._before) + len(self._failed):
            self._refuse(f"more than {self._limit:g}")

    def _skipped(self, documents: int) -> int:
        return sum(before <= documents for before in self._before)

    def left_out(self, documents: int) -> int:
        """Count the bad rows among the first `documents` documents, and log them. Raises DataError
        if their share is above the limit.

        A reading may be ahead of the documents that are used, by as many as it has threads.
        """
        if self.empty and documents:
            logger.info(
                f"{plural(self.empty, 'row')} whose text is empty or null: skipped",
                extra={"to_stderr": True},
            )
        # Documents that were read ahead, and not used, do not count.
        skipped = self._skipped(documents)
        if count := skipped + sum(number < documents for number in self._failed):
            rows = f"{count:,} of {documents + skipped:,}"
            if self._limit < 1 and count > self._limit * (documents + skipped):
                self._refuse(rows)
            named = "; ".join(self._named[:count])
            logger.warning(f"data.max_bad_rows: {rows} rows cannot be used, left out: {named}")
        return count

    def _refuse(self, rows: str) -> None:
        raise DataError(
            f"data.max_bad_rows: {self._limit:g}: {rows} rows cannot be used: "
            f"{'; '.join(self._named)}; change them, or raise it"
        )


@dataclass(frozen=True)
class Documents:
    """Documents of a source, in order; each call of a split reads them again.

    `validation` is None if it has to be held out of `train`.
    """

    train: Callable[[], Iterable[Any]]
    validation: Callable[[], Iterable[Any]] | None
    revision: str
    noun: str = "document"  # what messages call one of them
    count: int | None = None  # length of `train`, if it is known without reading
    # the rows of each split's newest reading that cannot be used
    bad_rows: dict[str, BadRows] = field(
        default_factory=lambda: {split: BadRows() for split in SPLITS}
    )
    # The state of local files before they are read.
    file_state: str | None = None
    # Makes a context for reading, which raises DataError at its end if local files have changed.
    unchanged: Callable[[], AbstractContextManager[None]] = nullcontext

    def read(self, split: str = "train") -> list[Any]:
        """All documents of a split. Raises DataError if local files change meanwhile."""
        with self.unchanged():
            documents = list(getattr(self, split)())
            self.bad_rows[split].left_out(len(documents))
        return documents


class Reading:
    """Reads the documents of a split any number of times, and opens the source as few times as
    possible.

    The first documents that `first` has read are part of the next reading. If `texts` is given,
    documents whose texts fit into memory are kept, and later readings open nothing.
    """

    def __init__(
        self, read: Callable[[], Iterable[Any]], texts: Callable[[Any], Iterable[str]] | None
    ):
        self._read = read
        self._texts = texts
        # A reading that `first` has begun, and the documents of a whole one.
        self._begun: Iterator[Any] | None = None
        self._kept: list[Any] | None = None

    def first(self, number: int) -> list[Any]:
        """Up to `number` documents from the beginning."""
        reading = iter(self())
        first = list(itertools.islice(reading, number))
        self._begun = itertools.chain(first, reading)
        return first

    def __call__(self) -> Iterable[Any]:
        if self._begun is not None:
            begun = self._begun
            self._begun = None
            return begun
        return self._open() if self._kept is None else self._kept

    def _open(self) -> Iterator[Any]:
        kept = []
        size = 0
        for document in self._read():
            if self._texts is not None and size <= _KEPT_CHARACTERS:
                kept.append(document)
                size += sum(map(len, self._texts(document)))
            yield document
        if self._texts is not None and size <= _KEPT_CHARACTERS:
            self._kept = kept


def held_out(count: int, data: DataSection, noun: str) -> np.ndarray:
    """Choose which of `count` documents are held out for validation, by `data.validation_seed`.

    Raises DataError if there are too few.
    """
    if count < 2:
        limited = "raise data.max_tokens, or " if data.max_tokens is not None else ""
        raise DataError(
            f"data.source: {data.one_source}: {plural(count, noun)} is too few to "
            f"hold some out for validation; {limited}give two at least"
        )
    number = max(1, round(count * data.validation_fraction))
    # An argsort of raw bits is a permutation that no version of NumPy changes.
    bits = np.random.Philox(key=derive_seed(data.validation_seed, "validation")).random_raw(count)
    held = np.zeros(count, dtype=bool)
    held[np.argsort(bits, kind="stable")[:number]] = True
    return held


def split_documents(documents: Documents, data: DataSection) -> tuple[list[Any], list[Any]]:
    """All documents to train on and to validate on."""
    # Questions and pairs are few enough to be read whole.
    train = documents.read()
    if documents.validation is not None:
        return train, documents.read("validation")
    held = held_out(len(train), data, documents.noun)
    splits = [], []
    for document, is_held in zip(train, held, strict=True):
        splits[int(is_held)].append(document)
    return splits
