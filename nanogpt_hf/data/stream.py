"""Read a Hub data set as it arrives: its files are not kept, and one chunk of its documents is on the disk at once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from datasets.arrow_writer import ArrowWriter

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.conversations import conversation_of
from nanogpt_hf.data.source import (
    CHAT_FEATURES,
    TEXT_FEATURES,
    Part,
    check_text_column,
    hub_error,
    is_on_hub,
    revision_of,
)
from nanogpt_hf.data.space import file_urls
from nanogpt_hf.errors import DataError, one_line
from nanogpt_hf.formatting import plural

_ROW = 50  # bytes that a document takes besides its text


@dataclass(frozen=True)
class Stream:
    """The splits of a Hub data set, `train` and, if the recipe names one, `validation`; nothing is read yet."""

    data: DataSection
    splits: dict[str, datasets.IterableDataset]
    revision: str
    text_bytes: int | None  # of the training split, if the Hub states it
    number_of_files: int  # of the training split

    def chunks(self, name: str, part: Part, size: int, scratch: Path) -> Iterator[datasets.Dataset]:
        """The documents of a part of a split, in data sets of about `size` bytes; one of them may be empty.

        Each is a file in the folder `scratch`, to be read before the next is asked for. A part of `train` is a run of
        its files. Part 0 has the whole of `validation`. Raises DataError if the connection ends or a row is not a
        document.
        """
        if part.number > self.number_of_files:
            raise DataError(
                f"data.source: {self.data.one_source}: a streamed part is one file at least, and the split has "
                f"{plural(self.number_of_files, 'file')}; divide it into as many parts at most: --shard I/N"
            )
        rows: Iterable[dict[str, Any]] = self.splits[name]
        if name == "train":
            rows = self.splits[name].shard(part.number, part.index)
        elif part.index:
            rows = []
        features = CHAT_FEATURES if self.data.format == "chat" else TEXT_FEATURES
        (column,) = features
        documents, read = [], 0
        for document in self._documents(rows, f"{name} split, part {part.index} of {part.number}"):
            documents.append(document)
            read += _size(document)
            if read >= size:
                yield _save(column, documents, features, scratch)
                documents, read = [], 0
        yield _save(column, documents, features, scratch)

    def _documents(self, rows: Iterable[dict[str, Any]], where: str) -> Iterator[Any]:
        data, chat = self.data, self.data.format == "chat"
        for number, row in enumerate(self._received(rows, where), 1):
            try:
                yield conversation_of(row) if chat else _text_of(row, data.text_column)
            except ValueError as error:
                raise DataError(f"data.source: {data.one_source}: {where}: row {number}: {error}") from None

    def _received(self, rows: Iterable[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
        try:
            yield from rows
        except Exception as error:
            # of the network, of the Hub, of a file format, ...; datasets has tried it many times
            reason = one_line(error) or type(error).__name__
            raise DataError(
                f"data.source: {self.data.one_source}: {where}: cannot be read to its end: {reason}; after a lost "
                "connection the same command continues with this part"
            ) from None


def open_stream(data: DataSection, revision: str | None = None) -> Stream:
    """Find the files of a Hub data set, with `revision` those of another one than the recipe's.

    Raises DataError if the source is not on the Hub, or has no such split.
    """
    if not is_on_hub(data.one_source):
        raise DataError(f"data.streaming: only a Hub data set is streamed, not {data.one_source}; leave it out")
    names = {"train": data.split, "validation": data.validation_split}
    try:
        builder = datasets.load_dataset_builder(data.one_source, data.config, revision=revision or data.revision)
        opened: Any = {name: builder.as_streaming_dataset(split) for name, split in names.items() if split}
        number_of_files = opened["train"].num_shards
    except Exception as error:  # of the network, of the Hub, of a loading script, of a file format, ...
        raise hub_error(data, error) from None
    splits = {name: rows for name, rows in opened.items() if isinstance(rows, datasets.IterableDataset)}
    if data.format != "chat":
        for name, rows in splits.items():
            if rows.features is not None:  # of CSV they are known when the rows arrive
                check_text_column(rows.features, data)
                splits[name] = rows.select_columns(data.text_column)
    facts = (builder.info.splits or {}).get(data.split)
    text_bytes = facts.num_bytes if facts else None
    return Stream(data, splits, revision_of(file_urls(builder), data), text_bytes, number_of_files)


def _text_of(row: dict[str, Any], column: str) -> str | None:
    if column not in row:
        raise ValueError(f"has no column {column!r}; it has: {', '.join(row)}; set data.text_column")
    if not isinstance(row[column], str | None):
        raise ValueError(f"column {column!r} holds {row[column]!r:.40}, not text; set data.text_column")
    return row[column]


def _size(document: Any) -> int:
    if isinstance(document, list):  # of messages
        return _ROW + sum(_ROW + len(message["content"]) for message in document)
    return _ROW + len(document or "")


def _save(column: str, documents: list[Any], features: datasets.Features, scratch: Path) -> datasets.Dataset:
    # A file, of which each process maps its rows: a data set in memory would be sent to every process as a whole.
    path = scratch / "documents.arrow"
    path.unlink(missing_ok=True)  # not overwritten, since the chunk before may be mapped still
    with ArrowWriter(path=str(path), features=features) as writer:
        writer.write_table(pyarrow.Table.from_pydict({column: documents}, schema=features.arrow_schema))
        writer.finalize()
    return datasets.Dataset.from_file(str(path), datasets.DatasetInfo(features=features))
