"""Load the documents of a source: files, a URL, a Hub data set, or a built-in one.

Built in are Python's documentation and generated additions and subtractions.
"""

import os
import sys
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
    find_files,
    is_url,
    read_rows,
    without_login,
)
from nanogpt_hf.data.formats import FORMATS, Document, local_files
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
    if is_on_hub(data):
        return _from_hub(data, read_row)
    for knob in ("validation_split", "streaming"):
        if getattr(data, knob):
            raise DataError(
                f"data.{knob}: only for a Hub data set, which {data.one_source} is not; leave it "
                "out (data.validation_fraction is held out)"
            )
    if data.one_source in BUILT_IN:
        documents, revision = [_python_docs()], f"Python {sys.version.split()[0]}"
        if data.one_source == ARITHMETIC:
            questions = arithmetic_conversations() if data.format == "chat" else arithmetic_text()
            documents, revision = list(questions), f"{ARITHMETIC} 1"
        return Documents(lambda: documents, None, revision, len(documents))
    files, shown = local_files(data), None
    if not files:
        files = [download(data.one_source, scratch, data.sha256)]
        shown = without_login(data.one_source)
    return Documents(lambda: _from_files(files, shown, data, read_row), None, file_digest(files))


def is_on_hub(data: DataSection) -> bool:
    """Whether a source can only be the name of a Hub data set.

    Raises DataError for a path without files.
    """
    source = data.one_source
    return not (source in BUILT_IN or is_url(source) or find_files(source))


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


def _from_files(
    files: list[Path], shown: str | None, data: DataSection, read_row: ReadRow | None
) -> Iterator[Document]:
    """The documents of files, without empty ones; messages name `shown` in place of the file."""
    form, is_empty = FORMATS[data.format], True
    document_of = read_row or form.document
    assert document_of
    column = data.text_column if form.reads_plain_text else None
    for path in files:
        try:
            for where, row in read_rows(path, column):
                try:
                    document = document_of(row, data)
                except ValueError as error:
                    raise DataError(f"{path}: {where}{error}") from None
                if document:
                    yield document
                    is_empty = False
        except DataError as error:
            raise DataError(str(error).replace(str(path), shown or str(path))) from None
    if is_empty:
        source = without_login(data.one_source)
        raise DataError(f"data.source: {source}: empty; there is no text to train on")


def _from_hub(data: DataSection, read_row: ReadRow | None) -> Documents:
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
        return lambda: _from_rows(splits[split], split, data, read_row)

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


def _from_rows(
    rows: Any, split: str, data: DataSection, read_row: ReadRow | None = None
) -> Iterator[Document]:
    """The documents of a Hub data set, of text with the empty ones, which count as documents."""
    source, number, form = f"data.source: {data.one_source}: split {split}", 0, FORMATS[data.format]
    document_of = read_row or (_text_or_none if form.reads_plain_text else form.document)
    assert document_of
    batches = rows.iter(1000)
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # the network, a file format, ...; tried again many times
            reason = one_line(error) or type(error).__name__
            raise DataError(f"{source}: cannot be read to its end: {reason}") from None
        if batch is None:
            return
        for values in zip(*batch.values(), strict=True):
            number += 1
            try:
                yield document_of(dict(zip(batch, values, strict=True)), data)
            except ValueError as error:
                raise DataError(f"{source}: row {number}: {error}") from None


def _text_or_none(row: dict[str, Any], data: DataSection) -> str | None:
    text = row.get(data.text_column, False)
    if not isinstance(text, str | None):
        raise ValueError(
            f"column {data.text_column!r} does not hold text; it has: {', '.join(row)}; set "
            "data.text_column"
        )
    return text


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
