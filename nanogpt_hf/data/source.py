"""Where text comes from: files, folders, URLs, Hub data sets, or Python's own documentation -> documents."""

import csv
import glob
import gzip
import hashlib
import io
import json
import lzma
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import datasets

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.errors import DataError

PYTHON_DOCS = "python-docs"
_COMPRESSED = (".gz", ".xz", ".zst")
_ROWS = (".jsonl", ".json", ".csv", ".parquet")
_TEXT = (".txt", ".md")
_FEATURES = datasets.Features({"text": datasets.Value("large_string")})  # a lone document may pass 2 GiB


@dataclass(frozen=True)
class Documents:
    """Documents as a data set with one column, `text`. `validation` is None where it must be held out of `train`."""

    train: datasets.Dataset
    validation: datasets.Dataset | None
    revision: str


def is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _format(path: Path) -> str:
    """`a.jsonl.xz` -> .jsonl"""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in _COMPRESSED else path.suffix.lower()


def find_files(source: str) -> list[Path]:
    """The files that a local source names, sorted; [] where it names no local path but perhaps a Hub data set.

    Raises DataError where it is meant as a path and nothing is there.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and _format(p) in _TEXT + _ROWS)
        if not files:
            raise DataError(f"data.source: {source}: the folder holds no {', '.join(_TEXT + _ROWS)} file")
        return files
    if glob.has_magic(source):
        files = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        if not files:
            raise DataError(f"data.source: {source}: no file matches")
        return files
    if source.startswith((".", "/", "~")) or _format(path) in _TEXT + _ROWS or source.count("/") > 1:
        raise DataError(f"data.source: {source}: no such file or folder")
    return []


def file_state(files: list[Path]) -> str:
    """A fingerprint of names, sizes and times: equal means surely unchanged, at no cost."""
    states = [(path.as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()


def file_digest(files: list[Path]) -> str:
    """The sha256 of the files' contents, one after another."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def _open(path: Path) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return gzip.open(path)
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


def _rows(path: Path) -> Iterator[tuple[str, object]]:
    """(where, row) for each row of a file of rows."""
    match _format(path):
        case ".jsonl":
            for number, line in enumerate(_read_text(path), 1):
                if line.strip():
                    try:
                        yield f"line {number}", json.loads(line)
                    except json.JSONDecodeError as error:
                        raise DataError(f"{path}: line {number}: not valid JSON: {error.msg}") from None
        case ".json":
            try:
                tree = json.load(_read_text(path))
            except json.JSONDecodeError as error:
                raise DataError(f"{path}: line {error.lineno}: not valid JSON: {error.msg}") from None
            for number, row in enumerate(tree if isinstance(tree, list) else [tree], 1):
                yield f"row {number}", row
        case ".csv":
            csv.field_size_limit(sys.maxsize)
            reader = csv.DictReader(_read_text(path))
            for row in reader:
                yield f"line {reader.line_num}", row
        case ".parquet":
            import pyarrow.parquet

            number = 0
            for batch in pyarrow.parquet.ParquetFile(_open(path)).iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row


def read_file(path: Path, text_column: str) -> Iterator[str]:
    """The documents of one file: a text file is one, a row is one elsewhere. Empty documents are left out.

    Raises DataError, naming file and line, for what is not text or lacks the text column.
    """
    try:
        if _format(path) not in _ROWS:
            text = _read_text(path).read()
            if "\0" in text:
                raise DataError(f"{path}: holds NUL bytes: binary data, not text")
            if text:
                yield text
            return
        for where, row in _rows(path):
            text = row.get(text_column) if isinstance(row, dict) else row
            if not isinstance(text, str):
                columns = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                raise DataError(
                    f"{path}: {where}: no text in column {text_column!r} (it has: {columns}); "
                    "set data.text_column to the column that holds the text"
                )
            if text:
                yield text
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise DataError(f"{path}: not UTF-8 text (byte 0x{bad:02x}); is it binary, or another encoding?") from None
    except (OSError, EOFError, lzma.LZMAError, csv.Error, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None


def _read_files(files: list[str], text_column: str) -> Iterator[dict[str, str]]:
    for path in files:
        for text in read_file(Path(path), text_column):
            yield {"text": text}


def _python_docs() -> Iterator[dict[str, str]]:
    from pydoc_data.topics import topics

    yield {"text": "\n\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"}


def _collect(generator, cache_dir: Path, **arguments) -> datasets.Dataset:
    try:
        return datasets.Dataset.from_generator(
            generator, features=_FEATURES, cache_dir=str(cache_dir), gen_kwargs=arguments or None
        )
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise


def _download(url: str, sha256: str | None, folder: Path) -> Path:
    target = folder / (Path(url.partition("?")[0]).name or "download.txt")
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=60) as response, target.open("wb") as file:
            while block := response.read(1 << 20):
                digest.update(block)
                file.write(block)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise DataError(f"data.source: {url}: cannot be downloaded: {getattr(error, 'reason', error)}") from None
    if sha256 and digest.hexdigest() != sha256.lower():
        raise DataError(f"data.sha256: {url} has sha256 {digest.hexdigest()}, not {sha256}; nothing was kept")
    return target


def _from_hub(data: DataSection) -> Documents:
    def load(split: str) -> datasets.Dataset:
        try:
            loaded = datasets.load_dataset(data.source, data.config, split=split, revision=data.revision)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"data.source: {data.source}: no file or folder here, and the Hub did not give it: {reason}"
            ) from None
        if data.text_column not in loaded.column_names:
            raise DataError(
                f"data.text_column: {data.source} has no column {data.text_column!r}; "
                f"it has: {', '.join(loaded.column_names)}"
            )
        return loaded.select_columns(data.text_column).rename_column(data.text_column, "text")

    train = load(data.split)
    commit = re.search(r"@([0-9a-f]{40})/", " ".join(train.info.download_checksums or ()))
    revision = commit[1] if commit else data.revision or "unknown"
    return Documents(train, load(data.validation_split) if data.validation_split else None, revision)


def load_documents(data: DataSection, scratch: Path) -> Documents:
    """The documents of `data.source`. `scratch` is a folder for what has to lie on disk meanwhile.

    Raises DataError where there is no such source, it holds no text, or it cannot be read as text.
    """
    if data.source == PYTHON_DOCS:
        return Documents(_collect(_python_docs, scratch), None, f"Python {sys.version.split()[0]}")
    files = [_download(data.source, data.sha256, scratch)] if is_url(data.source) else find_files(data.source)
    if not files:
        return _from_hub(data)
    if not any(True for path in files for _ in read_file(path, data.text_column)):
        raise DataError(f"data.source: {data.source}: empty; there is no text to train on")
    documents = _collect(_read_files, scratch, files=[str(path) for path in files], text_column=data.text_column)
    return Documents(documents, None, file_digest(files))
