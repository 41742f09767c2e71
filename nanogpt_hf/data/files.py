"""Read documents from a file: text, JSON lines, JSON, CSV or Parquet, compressed or not.

datasets' own readers are faster, but do not name the bad line of a file: see docs/log.md.
"""

import csv
import gzip
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from nanogpt_hf.errors import DataError

_COMPRESSED = (".gz", ".xz", ".zst")
ROW_FORMATS = (".jsonl", ".json", ".csv", ".parquet")
KNOWN_FORMATS = (".txt", ".md", *ROW_FORMATS)
_BINARY = "holds NUL bytes: binary data, not text"


def file_format(path: Path) -> str:
    """`a.jsonl.xz` -> .jsonl"""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in _COMPRESSED else path.suffix.lower()


def _open(path: Path) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return cast(IO[bytes], gzip.open(path))
        case ".xz":
            return lzma.open(path)
        case ".zst":
            import pyarrow

            return pyarrow.input_stream(str(path), compression="zstd")
        case _:
            return path.open("rb")


def _read_text(path: Path) -> io.TextIOWrapper:
    # utf-8-sig drops a byte order mark; line ends become \n, as Python's open() does.
    return io.TextIOWrapper(_open(path), encoding="utf-8-sig")


def _rows(path: Path, column: str | None = None) -> Iterator[tuple[str, object]]:
    """(position, row) for each row of a file. Of Parquet only `column` is read, if it exists."""
    match file_format(path):
        case ".jsonl":
            with _read_text(path) as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        try:
                            row = json.loads(line)
                        except json.JSONDecodeError as error:
                            raise DataError(f"{path}: line {number}: not valid JSON: {error.msg}") from None
                        except (ValueError, RecursionError) as error:  # a number of 5,000 digits, too many brackets
                            reason = str(error).partition(";")[0]
                            raise DataError(f"{path}: line {number}: cannot be read: {reason}") from None
                        yield f"line {number}", row
        case ".json":
            try:
                with _read_text(path) as file:
                    tree = json.load(file)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}: line {error.lineno}: not valid JSON: {error.msg}") from None
            for number, row in enumerate(tree if isinstance(tree, list) else [tree], 1):
                yield f"row {number}", row
        case ".csv":
            with _read_text(path) as file:
                yield from _csv_rows(path, file)
        case ".parquet":
            import pyarrow.parquet

            with _open(path) as file:  # Parquet is read from its end, so a compressed file is unpacked in memory
                table = pyarrow.parquet.ParquetFile(file if path.suffix == ".parquet" else io.BytesIO(file.read()))
                columns = [column] if column in table.schema_arrow.names else None
                number = 0
                for batch in table.iter_batches(columns=columns):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"row {number}", row


def _csv_rows(path: Path, file: IO[str]) -> Iterator[tuple[str, dict[str, str | None]]]:
    """(position, row) for each row below the header. Raises DataError for a row longer than the header."""
    csv.field_size_limit(2**31 - 1)  # the largest C long of all platforms
    reader = csv.reader(file, strict=True)  # else an open quote would include the rest of the file
    header, line = None, 1  # of the next row: a quoted field may span several lines
    try:
        for values in reader:
            if not values:  # a blank line is no row
                pass
            elif header is None:
                header = values
                repeated = sorted({name for name in header if name and header.count(name) > 1})
                if repeated:
                    raise DataError(
                        f"{path}: line {line}: several columns are named {', '.join(repeated)}; rename them"
                    )
            elif len(values) > len(header):
                raise DataError(
                    f"{path}: line {line}: {len(values)} fields, but the header has {len(header)}; "
                    "a text with commas must be in quotes"
                )
            else:
                yield f"line {line}", dict(itertools.zip_longest(header, values))
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}: line {line}: not valid CSV: {error}") from None


def _text_of(row: object, text_column: str) -> str:
    """The text of a row: its text column, or the row if it is text. Raises ValueError if there is none."""
    if isinstance(row, dict) and text_column not in row:
        raise ValueError(
            f"no column {text_column!r} (it has: {', '.join(map(str, row))}); "
            "set data.text_column to the column that holds the text"
        )
    text = row[text_column] if isinstance(row, dict) else row
    if not isinstance(text, str):
        what = f"column {text_column!r}" if isinstance(row, dict) else "the row"
        raise ValueError(f"{what} holds {text!r:.40}, not text")
    check_text(text)
    return text


def check_text(text: str) -> None:
    """Raises ValueError for binary data, and for text that UTF-8 cannot encode."""
    if "\0" in text:
        raise ValueError(_BINARY)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text[error.start]!r} is half a character (a lone surrogate), not text") from None


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise DataError(f"{path}: not UTF-8 text (byte 0x{bad:02x}); is it binary, or another encoding?") from None
    except MemoryError:
        raise DataError(f"{path}: too large for the memory of this machine") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def read_file(path: Path, text_column: str) -> Iterator[str]:
    """The documents of a file: a text file is one, of other formats each row is one. Empty ones are skipped.

    Raises DataError with file and line if the text is missing or is not text.
    """
    with _one_line_errors(path):
        if file_format(path) not in ROW_FORMATS:
            with _read_text(path) as file:
                text = file.read()
            if "\0" in text:
                raise DataError(f"{path}: {_BINARY}")
            if text:
                yield text
            return
        for where, row in _rows(path, text_column):
            try:
                text = _text_of(row, text_column)
            except ValueError as error:
                raise DataError(f"{path}: {where}: {error}") from None
            if text:
                yield text


def read_rows(path: Path) -> Iterator[tuple[str, object]]:
    """(position, row) for each row of a file. Raises DataError with file and line if it cannot be read."""
    if file_format(path) not in ROW_FORMATS:
        raise DataError(f"{path}: expected rows ({', '.join(ROW_FORMATS)}), got a file of plain text")
    with _one_line_errors(path):
        yield from _rows(path)
