"""Load the documents of a source: files, a URL, a Hub data set, or a built-in one.

Built in are Python's documentation and generated additions and subtractions.
"""

import contextlib
import logging
import os
import sys
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
from huggingface_hub import HfApi

from nanogpt_hf.config.formats import FORMATS
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.built_in import (
    ARITHMETIC,
    BUILT_IN,
    arithmetic_rows,
    arithmetic_text,
    python_docs,
)
from nanogpt_hf.data.documents import BadRows, Documents
from nanogpt_hf.data.formats import format_of
from nanogpt_hf.data.local_files import describe_left_out, find_files, is_url, local_files
from nanogpt_hf.data.manifest import SPLITS, file_digest
from nanogpt_hf.data.message_lists import unpacked
from nanogpt_hf.data.rows import ROW_ENDINGS, read_tables
from nanogpt_hf.data.unchanged import FilesBefore
from nanogpt_hf.errors import DataError, UserError, one_line
from nanogpt_hf.formatting import shows_bars

logger = logging.getLogger(__name__)

# What a row raises that cannot be used; another error is one of the file or the machine.
_ROW_ERRORS = (
    *(ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError),
    UserError,
)

_LONGEST_ENDING = 16  # characters that are kept of an ending of a URL

# A row as a document; raises ValueError or UserError if it is none that can be used.
ReadRow = Callable[[Any, DataSection], Any]


def download(url: str, folder: Path, sha256: str | None) -> Path:
    """Copy the file at a URL that fsspec reads into `folder`, and check its sha256 if given.

    Raises DataError if it cannot be downloaded, or is another file.
    """
    options: dict[str, Any] = {}
    # fsspec knows schemes in small letters.
    scheme, _, rest = url.partition("://")
    address = f"{scheme.lower()}://{rest}"
    path = ""
    if address.startswith("http"):
        from aiohttp import ClientTimeout

        # By default a download ends after five minutes, however much of it is left. A server that
        # sends nothing for a minute ends it now.
        options["client_kwargs"] = {"timeout": ClientTimeout(sock_connect=60, sock_read=60)}
    try:
        # What is read is decided by the endings alone.
        name = Path(urllib.parse.urlsplit(address).path).name
        # What follows a point may be a whole sentence, and too long for the name of a file. No
        # ending that is read has so many characters.
        endings = [ending[:_LONGEST_ENDING] for ending in Path(name).suffixes[-3:]]
        target = folder / ("".join(("file", *endings)) if name else "file.txt")
        system, path = fsspec.core.url_to_fs(address, **options)
        system.get_file(path, str(target))
        if not target.is_file():
            raise IsADirectoryError("a folder, and not a file")
    except Exception as error:  # the network, a file system, a package that it needs
        reason = one_line(error) or type(error).__name__
        if isinstance(error, ValueError):
            # Its text may show a part of a password.
            reason = "not a URL"
        elif isinstance(error, FileNotFoundError):
            # Of these its text is the address. Of others it may have a remedy, such as a login.
            is_address = scheme.lower() in ("http", "https", "file")
            reason = "no such file there" if is_address else f"no such file: {reason}"
            if scheme.lower() == "file" and os.path.exists(path):
                reason = "a pipe or a device; write its text to a file"
        elif (status := getattr(error, "status", None)) is not None:
            # The text of an error of aiohttp is its fields. A loop of redirections has no message,
            # and the status 0.
            reason = getattr(error, "message", "") or type(error).__name__
            reason += f" ({status})" if status else ""
        raise DataError(f"data.source: {url}: cannot be downloaded: {reason}") from None
    digest = file_digest([target])
    if sha256 and digest != sha256.lower():
        raise DataError(f"data.sha256: {url} has sha256 {digest}, not {sha256}; nothing was kept")
    return target


def load_documents(data: DataSection, scratch: Path, read_row: ReadRow | None = None) -> Documents:
    """Load the documents of `data.source`. `scratch` is a folder for temporary files.

    With `read_row` the source has rows, whatever the recipe's format is, and it makes a document
    of each.

    Raises DataError if the source does not exist; a split that is not text, or cannot be read as
    `data.format`, raises it while it is read.
    """
    source = data.one_source
    if read_row is None:
        form = format_of(data)
        assert form.document is not None
        read_row = form.document
        noun = FORMATS[data.format].noun
        reads_plain_text = form.reads_plain_text
        endings = form.endings
    else:
        noun = "row"
        reads_plain_text = False
        endings = ROW_ENDINGS
    files = find_files(source, endings)
    if left_out := describe_left_out(source, files, endings):
        logger.info(left_out, extra={"to_stderr": True})
    # Rows of messages come in several layouts, by the program that wrote them.
    if not reads_plain_text:
        read_row = _of_unpacked(read_row)
    if not (files or source in BUILT_IN or is_url(source)):
        return _from_hub(data, read_row, noun, data.text_column if reads_plain_text else None)
    for knob in ("validation_split", "streaming"):
        if getattr(data, knob):
            raise DataError(
                f"data.{knob}: only for a Hub data set, which {source} is not; leave it "
                "out (data.validation_fraction is held out)"
            )
    if source in BUILT_IN:
        return _built_in(data, read_row, noun, reads_plain_text)
    return _of_files(
        data, files, scratch, read_row, noun, data.text_column if reads_plain_text else None
    )


def _built_in(data: DataSection, read_row: ReadRow, noun: str, is_text: bool) -> Documents:
    source = data.one_source
    if source == ARITHMETIC:
        rows = arithmetic_text() if is_text else arithmetic_rows()
        revision = f"{ARITHMETIC} 1"
    else:
        # The documentation is one document.
        rows = [python_docs()]
        revision = f"Python {sys.version.split()[0]}"
    documents = list(_documents([(source, rows)], data, read_row, BadRows()))
    return Documents(lambda: documents, None, revision, noun, len(documents))


def _of_files(
    data: DataSection,
    files: list[Path],
    scratch: Path,
    read_row: ReadRow,
    noun: str,
    column: str | None,
) -> Documents:
    """Return the rows of local files, or, without `files`, of a URL."""
    source = data.one_source
    # What messages call each file: a download is called by its URL.
    names = {path: str(path) for path in files}
    if not files:
        names = {download(source, scratch, data.sha256): source}
    before = FilesBefore(source, [*names])
    bad = {split: BadRows(data.max_bad_rows) for split in SPLITS}

    def read() -> Iterator[Any]:
        # An error's traceback would keep the file of a refused row open.
        with contextlib.closing(_tables(names, column)) as tables:
            yield from _documents(tables, data, read_row, bad["train"], empty=False)

    return Documents(
        read,
        None,
        before.revision,
        noun,
        bad_rows=bad,
        file_state=before.state if files else None,
        unchanged=before.unchanged,
    )


def _of_unpacked(read_row: ReadRow) -> ReadRow:
    return lambda row, data: read_row(unpacked(row), data)


def check_source(data: DataSection, folder: Path) -> None:
    """Raises DataError if a local source is missing, or contains `folder`, which would be read as
    text.
    """
    # Raises for a path without files.
    local_files(data)
    source = Path(os.path.expanduser(data.one_source))
    if os.path.isdir(source) and folder.is_relative_to(source.resolve()):
        raise DataError(
            f"{folder}: is inside data.source {data.one_source}, and would be read as text; "
            "choose another"
        )


def _tables(
    names: dict[Path, str], column: str | None
) -> Generator[tuple[str, Iterable[Any]], None, None]:
    """Yield the name and the rows of each file, and of each member of an archive."""
    for path, name in names.items():
        try:
            for member, rows in read_tables(path, column):
                yield f"{name}: {member}" if member else name, rows
        except MemoryError:
            raise
        except Exception as error:  # the file system, a damaged archive
            raise DataError(f"{name}: {one_line(error) or type(error).__name__}") from None


def _documents(
    tables: Iterable[tuple[str, Iterable[Any]]],
    data: DataSection,
    read_row: ReadRow,
    bad: BadRows,
    *,
    empty: bool = True,
) -> Iterator[Any]:
    """Yield the document of each row; without `empty`, of each that has text.

    Raises DataError that names the row that cannot be read, unless it may be left out.
    """
    bad.begin()
    count = 0
    for where, rows in tables:
        number = 1
        try:
            for number, row in enumerate(rows, 1):
                try:
                    if isinstance(row, Exception):
                        raise row
                    document = read_row(row, data)
                except _ROW_ERRORS as error:
                    bad.add(count, f"{where}: row {number}", one_line(error))
                    continue
                # An empty row of a Hub data set is a document without tokens: which ones are held
                # out depends on the number of all rows.
                bad.empty += not document
                if document or empty:
                    yield document
                    count += 1
        except (DataError, MemoryError):
            raise
        except Exception as error:  # the network, a file format, ...
            reason = one_line(error) or type(error).__name__
            raise DataError(f"{where}: row {number}: {reason}") from None


def _from_hub(data: DataSection, read_row: ReadRow, noun: str, column: str | None) -> Documents:
    """Return the rows of a Hub data set; of a `column` that it has, that alone."""
    # datasets is slow to import.
    import datasets

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
    for split, rows in splits.items():
        # The columns of a streamed CSV file are known when its rows arrive.
        if column is not None and column in (rows.features or ()):
            splits[split] = rows.select_columns(column)

    bad = {split: BadRows(data.max_bad_rows) for split in SPLITS}

    def read(split: str, bad: BadRows) -> Callable[[], Iterator[Any]]:
        where = f"data.source: {data.one_source}: split {split}"
        # empty texts count as documents
        return lambda: _documents([(where, _rows(splits[split]))], data, read_row, bad)

    of_validation = data.validation_split
    return Documents(
        read(data.split, bad["train"]),
        read(of_validation, bad["validation"]) if of_validation else None,
        _commit(data) or data.revision or "unknown",
        noun,
        # The rows that are left out are known when all are read.
        None if data.streaming or data.max_bad_rows else splits[data.split].num_rows,
        bad,
    )


def _commit(data: DataSection) -> str | None:
    """Return the commit of a Hub data set, None if the Hub cannot be reached."""
    try:
        return HfApi().dataset_info(data.one_source, revision=data.revision).sha
    except Exception:  # the network: the rows are in the cache
        return None


def _rows(split: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Hub data set, read in batches, which is faster."""
    # A batch has a list for each column: {"text": [...], ...}
    for batch in split.iter(1000):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))
