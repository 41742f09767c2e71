"""Files of a source: find them, download those at URLs, and read their text or rows."""

import csv
import glob
import hashlib
import io
import json
import os
import re
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec
import pyarrow
from fsspec.compression import compr, register_compression

from nanogpt_hf.errors import DataError, one_line

ARITHMETIC = "arithmetic"
BUILT_IN = ("python-docs", ARITHMETIC)  # sources that are neither files nor downloads
ROW_ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
TEXT_ENDINGS = (".txt", ".md", *ROW_ENDINGS)
_COMPRESSED = (".gz", ".xz", ".zst", ".zip")
_BINARY = "holds NUL bytes: binary data, not text"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")

if "zstd" not in compr:  # fsspec has it with another package only
    register_compression(
        "zstd", lambda file, **_: pyarrow.input_stream(file, compression="zstd"), "zst"
    )


def file_ending(path: Path) -> str:
    """`a.jsonl.xz` -> .jsonl"""
    compressed = path.suffix.lower() in _COMPRESSED
    return Path(path.stem if compressed else path.name).suffix.lower()


def is_url(source: str) -> bool:
    return bool(_URL.match(source))


def without_login(text: str) -> str:
    """A text for messages: URLs in it without their user and password."""
    return _LOGIN.sub("", text)


def find_files(source: str, endings: tuple[str, ...] = TEXT_ENDINGS) -> list[Path]:
    """The files of a local source, sorted; [] for a URL, a built-in source or a name that may be a
    Hub data set.

    Of a folder, those of the given endings that are not hidden. Raises DataError for a path without
    files.
    """
    if source in BUILT_IN or is_url(source):
        return []
    path = Path(os.path.expanduser(source))  # unlike Path.expanduser, accepts an unknown user's ~
    if os.path.isfile(path):  # unlike Path.is_file, false for a name that is too long
        return [path]
    if os.path.isdir(path):
        files = sorted(
            file
            for file in path.rglob("*")
            if file_ending(file) in endings
            and file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not files:
            raise DataError(f"data.source: {source}: the folder holds no {', '.join(endings)} file")
        return files
    if glob.has_magic(source):
        files = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        if not files:
            raise DataError(f"data.source: {source}: no file matches")
        return files
    if os.path.exists(path):
        raise DataError(
            f"data.source: {source}: is not a regular file but a pipe or a device; save the text "
            "to a file"
        )
    if (
        source.startswith((".", "/", "~"))
        or file_ending(path) in TEXT_ENDINGS
        or source.count("/") > 1
    ):
        raise DataError(f"data.source: {source}: no such file or folder")
    return []


def file_state(files: list[Path]) -> str:
    """A fingerprint of names, sizes and times: equal only if the files are unchanged."""
    states = [(path.as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()


def file_digest(files: list[Path]) -> str:
    """The sha256 of the files' contents, one after another, with a zero byte between them."""
    digest = hashlib.sha256()
    for number, path in enumerate(files):
        digest.update(b"\0" * (number > 0))
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return f"sha256:{digest.hexdigest()}"


def download(url: str, folder: Path, sha256: str | None) -> Path:
    """Copy the file at a URL that fsspec reads into `folder`, and check its sha256 if given.

    Raises DataError if it cannot be downloaded, or is another file; a password in the URL is never
    printed.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        if not parts.hostname or parts.port == 0:  # reading a wrong port raises, too
            raise ValueError
    except ValueError:  # the URL is not printed, since it might show a part of a password
        raise DataError(
            "data.source: cannot be downloaded: not a URL; in a user name or password write / as "
            "%2F, : as %3A, @ as %40, ? as %3F and # as %23"
        ) from None
    target, shown, options = folder / (Path(parts.path).name or "file.txt"), without_login(url), {}
    if parts.scheme in ("http", "https"):
        from aiohttp import ClientTimeout

        # by default a download ends after five minutes
        options["client_kwargs"] = {"timeout": ClientTimeout(sock_connect=60, sock_read=60)}
    try:
        system, path = fsspec.core.url_to_fs(url, **options)
        system.get_file(path, str(target))
    except Exception as error:  # the network, a file system, a package that it needs
        reason = without_login(one_line(error)) or type(error).__name__
        raise DataError(f"data.source: {shown}: cannot be downloaded: {reason}") from None
    digest = file_digest([target]).removeprefix("sha256:")
    if sha256 and digest != sha256.lower():
        raise DataError(f"data.sha256: {shown} has sha256 {digest}, not {sha256}; nothing was kept")
    return target


def _open(path: Path) -> IO[bytes]:
    return fsspec.filesystem("file").open(str(path), "rb", compression="infer")


def check_text(text: str) -> None:
    """Raises ValueError for binary data, and for text that UTF-8 cannot encode."""
    if "\0" in text:
        raise ValueError(_BINARY)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{half!r} is half a character (a lone surrogate), not text") from None


def text_of(row: Any, column: str) -> str:
    """The text of a row: its column, or the row if it is text. Raises ValueError without one."""
    if isinstance(row, dict) and column not in row:
        raise ValueError(
            f"no column {column!r} (it has: {', '.join(map(str, row))}); "
            "set data.text_column to the column that holds the text"
        )
    text = row[column] if isinstance(row, dict) else row
    if not isinstance(text, str):
        what = f"column {column!r}" if isinstance(row, dict) else "the row"
        raise ValueError(f"{what} holds {text!r:.40}, not text")
    check_text(text)
    return text


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise DataError(
            f"{path}: not UTF-8 text (byte 0x{bad:02x}); is it binary, or another encoding?"
        ) from None
    except MemoryError:
        raise DataError(f"{path}: too large for the memory of this machine") from None
    except (DataError, AssertionError):
        raise
    except Exception as error:  # damaged, of another format
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from None


def read_rows(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    """(position for messages, row) for each row of a file.

    With `column` a file of another ending is plain text, and one row, and of Parquet only this
    column is read, if it exists. Raises DataError if the file cannot be read.
    """
    ending = file_ending(path)
    if column is None and ending not in ROW_ENDINGS:
        raise DataError(
            f"{path}: expected rows ({', '.join(ROW_ENDINGS)}), got a file of plain text"
        )
    with _one_line_errors(path):
        if ending == ".parquet":
            yield from _parquet(path, column)
            return
        # utf-8-sig drops a byte order mark; line ends become \n, as Python's open() does.
        with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
            yield from _READERS.get(ending, _plain_text)(text)


def _plain_text(file: IO[str]) -> Iterator[tuple[str, Any]]:
    yield "", file.read()


def _json_lines(file: IO[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: not valid JSON: {error}") from None
            yield f"line {number}: ", row


def _json(file: IO[str]) -> Iterator[tuple[str, Any]]:
    tree = json.load(file)
    for number, row in enumerate(tree if isinstance(tree, list) else [tree], 1):
        yield f"row {number}: ", row


def _csv(file: IO[str]) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # the largest C long of all platforms
    rows = csv.DictReader(file, strict=True)  # else an open quote would take the rest of the file
    names = [name for name in rows.fieldnames or () if name]
    if len(set(names)) < len(names):
        raise ValueError(f"two columns have one name: {', '.join(names)}; rename them")
    for row in rows:
        if None in row:
            raise ValueError(
                f"line {rows.line_num}: more fields than the header; a text with commas must be "
                "in quotes"
            )
        yield f"line {rows.line_num}: ", row


_READERS = {".jsonl": _json_lines, ".json": _json, ".csv": _csv}


def _parquet(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    with _open(path) as file:
        # it is read from its end, so a compressed file is unpacked in memory
        source = file if path.suffix.lower() == ".parquet" else io.BytesIO(file.read())
        table = pyarrow.parquet.ParquetFile(source)
        columns = [column] if column in table.schema_arrow.names else None
        number = 0
        for batch in table.iter_batches(columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}: ", row
