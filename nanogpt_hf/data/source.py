"""Load the documents of a source: files, a URL, a Hub data set, or a built-in one.

Built in are Python's documentation and generated additions and subtractions.
"""

import os
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import HfApi

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.data.conversations import Conversation
from nanogpt_hf.data.files import (
    ARITHMETIC,
    BUILT_IN,
    download,
    file_digest,
    is_url,
)
from nanogpt_hf.data.formats import FORMATS, Document, local_files
from nanogpt_hf.data.rows import read_tables
from nanogpt_hf.errors import DataError, one_line
from nanogpt_hf.formatting import shows_bars

_LARGEST = 99  # operand
_DOCUMENTS, _LINES = 2_000, 50  # documents and lines of the text
_CONVERSATIONS = 10_000
_HELD_OUT_SHARE = 10  # one question in ten

ReadRow = Callable[[Any, DataSection], Any]  # a row as a document; raises ValueError if it is none


@dataclass(frozen=True)
class Documents:
    """The documents of a source, in order; each call of a split reads them again.

    `validation` is None if it has to be held out of `train`.
    """

    train: Callable[[], Iterable[Document]]
    validation: Callable[[], Iterable[Document]] | None
    revision: str
    count: int | None = None  # length of `train`, if it is known without reading


def load_documents(data: DataSection, scratch: Path, read_row: ReadRow | None = None) -> Documents:
    """The documents of `data.source`. `scratch` is a folder for temporary files; `read_row` makes
    a document of a row, instead of the format's own.

    Raises DataError if the source does not exist; a split that is not text, or cannot be read as
    `data.format`, raises it while it is read.
    """
    source, files = data.one_source, local_files(data)
    read_row = read_row or FORMATS[data.format].document
    assert read_row is not None
    if not (files or source in BUILT_IN or is_url(source)):
        return _from_hub(data, read_row)
    for knob in ("validation_split", "streaming"):
        if getattr(data, knob):
            raise DataError(
                f"data.{knob}: only for a Hub data set, which {source} is not; leave it "
                "out (data.validation_fraction is held out)"
            )
    if source in BUILT_IN:
        documents, revision = [_python_docs()], f"Python {sys.version.split()[0]}"
        if source == ARITHMETIC:
            questions = arithmetic_conversations() if data.format == "chat" else arithmetic_text()
            documents, revision = list(questions), f"{ARITHMETIC} 1"
        return Documents(lambda: documents, None, revision, len(documents))
    names = {path: str(path) for path in files}
    if not files:
        names = {download(source, scratch, data.sha256): source}
    digest = f"sha256:{file_digest([*names])}"
    return Documents(lambda: _from_files(names, data, read_row), None, digest)


def check_source(data: DataSection, folder: Path) -> None:
    """Raises DataError if a local source is missing, or contains `folder`, which would be read as
    text.
    """
    local_files(data)
    source = Path(os.path.expanduser(data.one_source))
    if os.path.isdir(source) and folder.is_relative_to(source.resolve()):
        raise DataError(
            f"{folder}: is inside data.source {data.one_source}, and would be read as text; "
            "choose another"
        )


def _from_files(names: dict[Path, str], data: DataSection, read_row: ReadRow) -> Iterator[Document]:
    """The documents of files with their names, without empty ones."""
    column = data.text_column if FORMATS[data.format].reads_plain_text else None
    for path, name in names.items():
        try:
            for member, rows in read_tables(path, column):
                where = f"{name}: {member}" if member else name
                yield from filter(None, _documents(rows, where, data, read_row))
        except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
            raise DataError(f"{name}: {one_line(error)}") from None


def _documents(
    rows: Iterable[Any], where: str, data: DataSection, read_row: ReadRow
) -> Iterator[Document]:
    """The document of each row. Raises DataError that names the row that cannot be read."""
    number = 1
    try:
        for row in rows:
            if isinstance(row, Exception):
                raise row
            yield read_row(row, data)
            number += 1
    except Exception as error:  # the network, a file format, ...
        reason = one_line(error) or type(error).__name__
        raise DataError(f"{where}: row {number}: {reason}") from None


def _from_hub(data: DataSection, read_row: ReadRow) -> Documents:
    import datasets  # slow to import

    if not shows_bars():
        datasets.disable_progress_bars()
    splits: dict[str, Any] = {}
    try:
        for split in filter(None, (data.split, data.validation_split)):
            splits[split] = datasets.load_dataset(
                data.one_source,
                data.config,
                split=split,
                revision=data.revision,
                streaming=data.streaming,
                trust_remote_code=False,
            )
    except Exception as error:  # the network, the Hub, a file format, ...
        reason = one_line(error) or type(error).__name__
        raise DataError(
            f"data.source: {data.one_source}: no file or folder here, and the Hub did not give "
            f"it: {reason}"
        ) from None
    for split, rows in splits.items():  # a streamed CSV's columns are known when its rows arrive
        if FORMATS[data.format].reads_plain_text and data.text_column in (rows.features or ()):
            splits[split] = rows.select_columns(data.text_column)

    def read(split: str) -> Callable[[], Iterator[Document]]:
        where = f"data.source: {data.one_source}: split {split}"
        # empty texts count as documents
        return lambda: _documents(_rows(splits[split]), where, data, read_row)

    return Documents(
        read(data.split),
        read(data.validation_split) if data.validation_split else None,
        _commit(data) or data.revision or "unknown",
        None if data.streaming else splits[data.split].num_rows,
    )


def _commit(data: DataSection) -> str | None:
    """The commit of a Hub data set, None if the Hub cannot be reached."""
    try:
        return HfApi().dataset_info(data.one_source, revision=data.revision).sha
    except Exception:  # the network: the rows are in the cache
        return None


def _rows(split: Any) -> Iterator[dict[str, Any]]:
    """The rows of a Hub data set, read in batches, which is faster."""
    for batch in split.iter(1000):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def _python_docs() -> str:
    from pydoc_data.topics import topics

    return "\n\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def is_held_out(question: str) -> bool:
    """Whether a generated question is held out: by its text, so that it is in one split only."""
    return zlib.crc32(question.encode()) % _HELD_OUT_SHARE == 0


def arithmetic_question(seed: int, index: int, *, held_out: bool) -> tuple[str, str]:
    """Question `index` and its answer, such as ("12+7", "19"); a pure function of its arguments."""
    draws = np.random.Philox(key=derive_seed(seed, "questions", int(held_out), index))
    while True:
        first, second, sign = (int(bits) for bits in draws.random_raw(3))
        first, second = first % (_LARGEST + 1), second % (_LARGEST + 1)
        question, answer = (
            (f"{first}+{second}", first + second)
            if sign % 2
            else (f"{first}-{second}", first - second)
        )
        if is_held_out(question) == held_out:
            return question, str(answer)


def arithmetic_text() -> Iterator[str]:
    """Documents of lines such as `12+7=19`, of questions that are not held out."""
    for document in range(_DOCUMENTS):
        questions = range(document * _LINES, (document + 1) * _LINES)
        lines = ("=".join(arithmetic_question(0, number, held_out=False)) for number in questions)
        yield "".join(f"{line}\n" for line in lines)


def arithmetic_conversations() -> Iterator[Conversation]:
    """Conversations of a question and its answer, of questions that are not held out."""
    for number in range(_CONVERSATIONS):
        question, answer = arithmetic_question(1, number, held_out=False)
        yield [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
