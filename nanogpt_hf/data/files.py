"""Files of a source: find them, download those at URLs, and read their rows."""

import csv
import glob
import hashlib
import io
import json
import os
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
from fsspec.compression import compr, register_compression

from nanogpt_hf.errors import DataError, one_line

ARITHMETIC = "arithmetic"
BUILT_IN = ("python-docs", ARITHMETIC)  # sources that are neither files nor downloads
ROW_ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
TEXT_ENDINGS = (".txt", ".md", *ROW_ENDINGS)
_COMPRESSED = (".gz", ".xz", ".zst", ".zip")

if "zstd" not in compr:  # fsspec has it with another package only
    register_compression(
        "zstd", lambda file, **_: pyarrow.input_stream(file, compression="zstd"), "zst"
    )


def file_ending(path: Path) -> str:
    """`a.jsonl.xz` -> .jsonl"""
    compressed = path.suffix.lower() in _COMPRESSED
    return Path(path.stem if compressed else path.name).suffix.lower()


def is_url(source: str) -> bool:
    return bool(re.match(r"[a-z][a-z0-9+.-]*://", source))


def find_files(source: str, endings: tuple[str, ...] = TEXT_ENDINGS) -> list[Path]:
    """The files of a local source, sorted; [] for a URL, a built-in source or a name that may be a
    Hub data set.

    Of a folder, those of the given endings that are not hidden. Raises DataError for a path without
    files.
    """
    if source in BUILT_IN or is_url(source):
        return []
    path = Path(os.path.expanduser(source))  # unlike Path.expanduser, accepts an unknown user's ~
    if os.path.isdir(path):  # unlike Path.is_dir, false for a name that is too long
        found = [
            file
            for file in path.rglob("*")
            if file_ending(file) in endings
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
    else:  # a name that exists may have characters of a pattern
        found = [path] if os.path.exists(path) else glob.glob(str(path), recursive=True)
    if files := sorted(Path(file) for file in found if os.path.isfile(file)):
        return files
    is_path = source.startswith((".", "/", "~")) or source.count("/") > 1
    is_path |= os.path.exists(path) or glob.has_magic(source)
    if is_path or file_ending(path) in TEXT_ENDINGS:
        raise DataError(f"data.source: {source}: no file, or folder with {', '.join(endings)}")
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
    return digest.hexdigest()


def download(url: str, folder: Path, sha256: str | None) -> Path:
    """Copy the file at a URL that fsspec reads into `folder`, and check its sha256 if given.

    Raises DataError if it cannot be downloaded, or is another file.
    """
    options: dict[str, Any] = {}
    if url.startswith("http"):
        from aiohttp import ClientTimeout

        # by default a download ends after five minutes
        options["client_kwargs"] = {"timeout": ClientTimeout(sock_connect=60, sock_read=60)}
    try:
        target = folder / (Path(urllib.parse.urlsplit(url).path).name or "file.txt")
        system, path = fsspec.core.url_to_fs(url, **options)
        system.get_file(path, str(target))
    except Exception as error:  # the network, a file system, a package that it needs
        reason = one_line(error) or type(error).__name__
        if isinstance(error, ValueError):  # its text may show a part of a password
            reason = "not a URL"
        raise DataError(f"data.source: {url}: cannot be downloaded: {reason}") from None
    digest = file_digest([target])
    if sha256 and digest != sha256.lower():
        raise DataError(f"data.sha256: {url} has sha256 {digest}, not {sha256}; nothing was kept")
    return target


def text_of(row: Any, column: str) -> str | None:
    """The text of a row: its column, or the row if it is text. Raises ValueError without one."""
    is_row = isinstance(row, dict)
    text = row.get(column, ...) if is_row else row
    if not isinstance(text, str | None):
        columns = f" (it has: {', '.join(map(str, row))}); set data.text_column" * is_row
        raise ValueError(f"column {column!r} does not hold text{columns}")
    (text or "").encode()  # JSON can escape half a character, which UTF-8 cannot encode
    return text


def read_rows(path: Path, column: str | None) -> Iterator[Any]:
    """The rows of a file.

    With `column` a file of another ending is plain text, and one row, and of Parquet only this
    column is read, if it exists. Raises an error of the reader if the file is damaged.
    """
    ending = file_ending(path)
    if column is None and ending not in ROW_ENDINGS:
        raise ValueError(f"expected rows ({', '.join(ROW_ENDINGS)}), got a file of plain text")
    with fsspec.filesystem("file").open(str(path), "rb", compression="infer") as file:
        if ending == ".parquet":
            from pyarrow import parquet

            table = parquet.ParquetFile(file)
            columns = [column] if column in table.schema_arrow.names else None
            for batch in table.iter_batches(columns=columns):
                yield from batch.to_pylist()
            return
        # utf-8-sig drops a byte order mark; line ends become \n, as Python's open() does.
        with io.TextIOWrapper(file, encoding="utf-8-sig") as text:
            if ending == ".jsonl":
                yield from (json.loads(line) for line in text if line.strip())
            elif ending == ".json":
                tree = json.load(text)
                yield from tree if isinstance(tree, list) else [tree]
            elif ending == ".csv":
                yield from _csv(text)
            else:
                whole = text.read()
                if "\0" in whole:
                    raise ValueError("holds NUL bytes: binary data, not text")
                yield whole


def _csv(file: io.TextIOWrapper) -> Iterator[dict[str, str]]:
    csv.field_size_limit(2**31 - 1)  # the largest C long of all platforms
    for row in csv.DictReader(file, strict=True):  # else an open quote takes the rest of the file
        if None in row or None in row.values():
            raise ValueError(
                "more or fewer fields than the header; a text with commas must be in quotes"
            )
        yield row
