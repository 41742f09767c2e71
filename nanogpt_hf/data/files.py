"""Files of a source: find them, and download those at URLs."""

import glob
import hashlib
import json
import os
import re
import urllib.parse
from pathlib import Path
from typing import Any

import fsspec

from nanogpt_hf.errors import DataError, one_line

ARITHMETIC = "arithmetic"
BUILT_IN = ("python-docs", ARITHMETIC)  # sources that are neither files nor downloads
ROW_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
TEXT_ENDINGS = (".txt", ".md", *ROW_ENDINGS)
COMPRESSIONS = (".gz", ".bz2", ".xz", ".lzma", ".zst")
ARCHIVE = ".zip"
# Forms that hold text and are not read.
_OTHER_ARCHIVES = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".7z", ".rar")
_OTHER_COMPRESSIONS = (".lz4", ".snappy", ".sz", ".br", ".lz", ".lzo", ".z")
NOT_READ = (*_OTHER_ARCHIVES, *_OTHER_COMPRESSIONS)
KNOWN = (
    f"known are {', '.join(TEXT_ENDINGS)}, each also compressed ({', '.join(COMPRESSIONS)}) or in "
    f"a {ARCHIVE}"
)


def file_ending(path: Path) -> str:
    """`a.jsonl.xz` -> .jsonl"""
    compressed = path.suffix.lower() in (*COMPRESSIONS, ARCHIVE)
    return Path(path.stem if compressed else path.name).suffix.lower()


def _is_read(path: Path, endings: tuple[str, ...]) -> bool:
    """Whether a folder's file is read. Raises DataError for text in a form that is not known."""
    ending, last = file_ending(path), path.suffix.lower()
    if ending in endings:
        return True
    if TEXT_ENDINGS[0] not in endings and ROW_ENDINGS[0] not in endings:
        return False
    is_compressed = last in _OTHER_COMPRESSIONS and Path(path.stem).suffix.lower() in endings
    if ending in _OTHER_ARCHIVES or is_compressed:
        raise DataError(
            f"data.source: {path}: {ending} is not read; {KNOWN}: extract it, or move it elsewhere"
        )
    return last == ARCHIVE


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
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
            and _is_read(file, endings)
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
