"""Read the rows of files: text, JSON, tables and Parquet, compressed or in a .zip."""

import contextlib
import csv
import errno
import io
import json
import lzma
import re
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pyarrow

from nanogpt_hf.config.names import ARCHIVE, COMPRESSIONS, ROW_ENDINGS, TEXT_ENDINGS
from nanogpt_hf.data.compression import DECOMPRESS
from nanogpt_hf.data.json_rows import Rows, is_json, json_file, json_lines
from nanogpt_hf.data.utf8 import AS_UTF8, not_utf8, utf8, without_nul
from nanogpt_hf.errors import one_line

# Forms that hold text and are not read.
OTHER_ARCHIVES = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".7z", ".rar")
OTHER_COMPRESSIONS = (".lz4", ".snappy", ".sz", ".br", ".lz", ".lzo", ".z")
NOT_READ = (*OTHER_ARCHIVES, *OTHER_COMPRESSIONS)
# What messages say of a file that is refused.
KNOWN = (
    f"known are {', '.join(TEXT_ENDINGS)}, each also compressed ({', '.join(COMPRESSIONS)}) or in "
    f"a {ARCHIVE}"
)
# The remedy for documents that hold text in another form, such as PDF and HTML.
CONVERT = "write their text to .txt files, for example by pdftotext or pandoc"
# The methods that the zipfile of Python 3.11 reads.
_METHODS = {
    zipfile.ZIP_STORED: "stored",
    zipfile.ZIP_DEFLATED: "deflate",
    zipfile.ZIP_BZIP2: "bzip2",
    zipfile.ZIP_LZMA: "lzma",
}
_ENCRYPTED = 0x1  # the bit of a member's flags
# What libraries raise for a file that is not what its ending says.
_DAMAGED = (
    EOFError,
    OSError,
    RecursionError,
    json.JSONDecodeError,
    lzma.LZMAError,
    struct.error,
    pyarrow.ArrowException,
    UnicodeDecodeError,
    zipfile.BadZipFile,
    zlib.error,
)
# The error number of an OSError of a library, and of a position before the start of a file, which
# a damaged file names. Others are of the disk.
_NOT_OF_DISK = (None, errno.EINVAL)


def file_ending(path: Path) -> str:
    """`a.jsonl.xz` -> .jsonl"""
    compressed = path.suffix.lower() in (*COMPRESSIONS, ARCHIVE)
    return Path(path.stem if compressed else path.name).suffix.lower()


# Control characters that no text has; one has white space, backspaces and the escapes of terminals.
_BINARY = re.compile(r"[\0-\7\x0e-\x1a\x1c-\x1f]")


def text_of(row: Any, column: str) -> str | None:
    """Return the text of a row: its column, which may be null, or the row if it is text. Raises
    ValueError without one.
    """
    # A missing column is an error, a null in it an empty row: `...` tells them apart.
    is_row = isinstance(row, dict)
    text = row.get(column, ...) if is_row else row
    if isinstance(text, bytes):
        # The writer of a Parquet file has left out that the column is text.
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"column {column!r} holds bytes that are no UTF-8 text: {error}"
            ) from None
    if not (isinstance(text, str) or (text is None and is_row)):
        if not is_row:
            raise ValueError(f"expected text, or an object with column {column!r}, got {row!r:.40}")
        if column in row:
            raise ValueError(
                f"column {column!r} holds {text!r:.40}, which is no text; set data.text_column"
            )
        raise ValueError(
            f"column {column!r} does not hold text (it has: {', '.join(map(str, row))}); set "
            "data.text_column"
        )
    # JSON can escape half a character, which UTF-8 cannot encode.
    (text or "").encode()
    return text


def read_tables(path: Path, column: str | None) -> Iterator[tuple[str, Rows]]:
    """Yield the rows of a file, or of each member of an archive in its order, each with the
    member's name, "" without an archive. Rows have to be read before the next are asked for.

    With `column` a file of plain text is one row, and of Parquet only this column is read, if it
    exists. An exception among the rows is a row that cannot be read. Raises ValueError if a file is
    damaged or its form is not known, and OSError if the disk cannot be read.
    """
    with path.open("rb") as file, _naming_damage():
        if path.suffix.lower() != ARCHIVE:
            yield "", _with_remedies(_rows(file, path.name, column))
            return
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if is_skipped(member.filename):
                    continue
                # A name may hold anything, and ends in messages.
                name = "".join(
                    letter if letter.isprintable() else "?" for letter in member.filename
                )
                rows = _member_rows(archive, member, file_ending(path), column)
                yield name, _with_remedies(rows)


def is_skipped(member: str) -> bool:
    """Whether a member of an archive is a folder, hidden, or what macOS adds."""
    parts = PurePosixPath(name := member.replace("\\", "/")).parts
    hidden = any(part.startswith(".") and part != ".." for part in parts)
    return name.endswith("/") or hidden or "__MACOSX" in parts


def _member_rows(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, ending: str, column: str | None
) -> Rows:
    """Yield the rows of a member, whose ending may be in the archive's name, as in a.jsonl.zip."""
    # The content of a link is the path of its target, which would be read as text.
    # The kind is 0 if the archive was made on a system that has no kinds of files.
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        what = "symbolic link" if kind == stat.S_IFLNK else "special file"
        raise ValueError(f"a {what}, not text; make the archive without it, or of its target")
    if member.flag_bits & _ENCRYPTED:
        raise ValueError("encrypted; extract it first")
    if member.compress_type not in _METHODS:
        raise ValueError(
            f"compressed by method {member.compress_type}, which is not read; known are "
            f"{', '.join(_METHODS.values())}: compress it again"
        )
    name = PurePosixPath(member.filename.replace("\\", "/")).name
    with archive.open(member) as file:
        yield from _rows(file, name if PurePosixPath(name).suffix else f"{name}{ending}", column)


@contextlib.contextmanager
def _naming_damage() -> Iterator[None]:
    """Context in which an error of a library that a damaged file causes says what to do."""
    try:
        yield
    # Among the errors of pyarrow are those of other causes.
    except MemoryError:
        raise
    except NotImplementedError as error:
        raise ValueError(
            f"in a form that is not read here: {one_line(error)}; write it in another one, for "
            "example with another compression"
        ) from None
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno not in _NOT_OF_DISK:
            raise
        # Short enough that the remedy is not cut.
        reason = one_line(error, 150) or type(error).__name__
        raise ValueError(
            f"damaged, or not what its ending says: {reason}; correct it, or copy it again"
        ) from None


def _with_remedies(rows: Rows) -> Rows:
    with _naming_damage():
        yield from rows


def _rows(file: Any, name: str, column: str | None) -> Rows:
    while decompress := DECOMPRESS.get(Path(name).suffix.lower()):
        file = decompress(file)
        name = Path(name).stem
    ending = Path(name).suffix.lower()
    if ending == ARCHIVE:
        raise ValueError("an archive inside another file; extract it first")
    if ending in NOT_READ:
        raise ValueError(f"{ending} is not read; {KNOWN}: extract it first")
    if column is None and ending not in ROW_ENDINGS:
        raise ValueError(
            f"expected rows ({', '.join(ROW_ENDINGS)}), got a file of plain text; leave it out"
        )
    if ending == ".parquet":
        yield from _parquet(file, column)
        return
    # utf-8-sig drops a byte order mark; line ends become \n, as Python's open() does. Bytes that
    # are no UTF-8 are kept until it is known in which row they are.
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape") as text:
        if ending in (".jsonl", ".ndjson"):
            yield from json_lines(text)
        elif ending == ".json":
            yield from json_file(text, column)
        elif ending in (".csv", ".tsv"):
            yield from _table(text, "\t" if ending == ".tsv" else ",", column)
        else:
            yield _plain(text.read(), ending)


def _table(text: io.TextIOWrapper, delimiter: str, column: str | None) -> Rows:
    # The largest C long that all platforms have.
    csv.field_size_limit(2**31 - 1)
    # Without `strict` an open quote takes the rest of the file.
    reader = csv.DictReader(text, delimiter=delimiter, strict=True)
    names = reader.fieldnames or ()
    without_nul("".join(names))
    _check_names(names, column)
    try:
        yield from _table_rows(reader, delimiter)
    except csv.Error as error:
        raise ValueError(
            f"line {reader.reader.line_num}: {str(error).replace(chr(9), 'tab')}; a text that has "
            "quotes must be in quotes, with its own doubled"
        ) from None


def _check_names(names: Sequence[str], column: str | None) -> None:
    """Raises ValueError if two columns have the same name, of which one would be read."""
    for name in names if column is None else [column]:
        if name and names.count(name) > 1:
            raise ValueError(f"{names.count(name)} columns are named {name!r}; rename one")


def _table_rows(reader: "csv.DictReader[str]", delimiter: str) -> Rows:
    for row in reader:
        # csv keeps surplus fields under the name None, and fills missing ones with None.
        if None in row or None in row.values():
            what = "tabs" if delimiter == "\t" else "commas"
            yield ValueError(
                f"more or fewer fields than the header; a text with {what} must be in quotes"
            )
            continue
        try:
            yield {name: utf8(value) for name, value in row.items()}
        except ValueError as error:
            yield error


def _plain(text: str, ending: str) -> str | ValueError:
    """A file of text as one row. Raises ValueError if its ending is not known and it is none."""
    # A file of any other name is text only if it looks like text: a user may have named a file of
    # source code, or a picture.
    known = ending in TEXT_ENDINGS
    problem = None
    try:
        remedy = AS_UTF8 if known else ""
        without_nul(utf8(text, remedy), remedy)
    except ValueError as error:
        problem = error
    if not known:
        if problem or _BINARY.search(text) or text.startswith(("%PDF-", "{\\rtf")):
            reason = f": {problem}" if problem else ""
            raise ValueError(f"not plain text{reason}; convert it to .txt; {KNOWN}")
        if is_json(text):
            raise ValueError(
                "JSON under another name; name it .jsonl or .json to read its rows, .txt to "
                "train on it as it is"
            )
    return problem or text


def _parquet(file: IO[bytes], column: str | None) -> Rows:
    from pyarrow import parquet

    # The end of a table is read first.
    if not isinstance(getattr(file, "raw", None), io.FileIO):
        with tempfile.TemporaryFile() as whole:
            shutil.copyfileobj(file, whole)
            whole.seek(0)
            yield from _parquet_rows(parquet.ParquetFile(whole), column)
    else:
        yield from _parquet_rows(parquet.ParquetFile(file), column)


def _parquet_rows(table: Any, column: str | None) -> Rows:
    schema = table.schema_arrow
    # None reads all columns.
    columns = None
    _check_names(schema.names, column)
    if column in schema.names:
        columns = [column]
    elif column is None:
        # A time beyond Python's years would end the reading.
        columns = [part.name for part in schema if not pyarrow.types.is_temporal(part.type)]
    # In batches: a row group may be larger than the memory.
    for batch in table.iter_batches(columns=columns):
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            # Bytes in a column of text: find the rows that have them.
            for number in range(len(batch)):
                try:
                    yield batch.slice(number, 1).to_pylist()[0]
                except UnicodeDecodeError as error:
                    yield not_utf8(error)
