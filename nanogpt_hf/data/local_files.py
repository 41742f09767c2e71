"""Find the files of a source on this machine."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from nanogpt_hf.config.formats import FORMATS
from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.built_in import BUILT_IN
from nanogpt_hf.data.formats import format_of
from nanogpt_hf.data.rows import (
    ARCHIVE,
    CONVERT,
    KNOWN,
    OTHER_ARCHIVES,
    OTHER_COMPRESSIONS,
    ROW_ENDINGS,
    TEXT_ENDINGS,
    file_ending,
)
from nanogpt_hf.errors import DataError
from nanogpt_hf.formatting import plural

_NAMED = 5  # endings that a message names
_ARROW = ".arrow"  # what save_to_disk of `datasets` writes


def _is_read(path: Path, endings: tuple[str, ...]) -> bool:
    """Whether a folder's file is read. Raises DataError for text in a form that is not known."""
    ending = file_ending(path)
    last = path.suffix.lower()
    if ending in endings:
        return True
    # A format that reads no text, such as datatrove's, passes over all other files.
    if TEXT_ENDINGS[0] not in endings and ROW_ENDINGS[0] not in endings:
        return False
    # Passing over text would train on less than the user believes.
    is_compressed = last in OTHER_COMPRESSIONS and Path(path.stem).suffix.lower() in endings
    if ending in OTHER_ARCHIVES or is_compressed:
        raise DataError(
            f"data.source: {path}: {ending} is not read; {KNOWN}: extract it, or move it elsewhere"
        )
    if last == _ARROW:
        # Beside its JSON, which describes it and would be read as rows.
        raise DataError(
            f"data.source: {path}: Arrow files are not read; write the rows as Parquet: datasets."
            f"load_from_disk({str(path.parent)!r}).to_parquet('rows.parquet')"
        )
    return last == ARCHIVE


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield what is below a folder, and below the folders to which links lead, but no folders and
    nothing hidden. Raises DataError for a folder that cannot be read.
    """

    def refuse(error: OSError) -> NoReturn:
        raise DataError(f"data.source: {error.filename}: {error.strerror}") from None

    # A link may lead to a folder above it, or to one that is below `folder` anyway.
    seen = set()
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        again = real in seen
        seen.add(real)
        folders[:] = [] if again else sorted(name for name in folders if name[0] != ".")
        if not again:
            yield from (Path(place, name) for name in names if name[0] != ".")


def is_url(source: str) -> bool:
    return bool(re.match(r"[a-z][a-z0-9+.-]*://", source, re.IGNORECASE))


def find_files(source: str, endings: tuple[str, ...] = TEXT_ENDINGS) -> list[Path]:
    """Return the files of a local source, sorted; [] for a URL, a built-in source or a name that
    may be a Hub data set.

    A folder gives its files of the given endings that are not hidden. Raises DataError for a path
    without files.
    """
    if source in BUILT_IN or is_url(source):
        return []
    # Raises an error if Python cannot name such a file here.
    os.fsencode(source)
    # Unlike Path.expanduser, this accepts the ~ of an unknown user.
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        # Unlike Path.is_dir, this is false for a name that is too long.
        found = [file for file in _files_below(path) if _is_read(file, endings)]
    else:
        # A name that exists is taken as it is, even if it has characters of a pattern.
        found = [path] if os.path.exists(path) else glob.glob(str(path), recursive=True)
    files = []
    for file in sorted(map(Path, found)):
        if os.path.isfile(file):
            files.append(file)
        # Leaving it out would train on less than the user believes; a pattern may name folders.
        elif not os.path.isdir(file) and os.path.lexists(file):
            kind = "a pipe or a device; write its text to a file"
            if os.path.islink(file) and not os.path.exists(file):
                kind = "a broken link; repair or remove it"
            raise DataError(f"data.source: {file}: is {kind}")
    if files:
        return files
    # A Hub data set is called user/name or name. What looks like a path is a file that is missing.
    is_path = source.startswith((".", "/", "~")) or source.count("/") > 1
    is_path |= os.path.exists(path) or glob.has_magic(source)
    if is_path or file_ending(path) in TEXT_ENDINGS:
        other = describe_left_out(source, files, endings)
        if other is None:
            raise DataError(f"data.source: {source}: no file, or folder with {', '.join(endings)}")
        raise DataError(f"data.source: no {', '.join(endings)} below {other}")
    return []


def describe_left_out(
    source: str, files: Sequence[Path], endings: tuple[str, ...] = TEXT_ENDINGS
) -> str | None:
    """State how many files of a folder are none of the `files` that are read, and what to do; None
    if there are none.
    """
    folder = os.path.expanduser(source)
    left_out = set(_files_below(Path(folder))).difference(files) if os.path.isdir(folder) else ()
    if not left_out:
        return None
    found = Counter(path.suffix.lower() or "no ending" for path in left_out)
    counts = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{ending} ({count})" for ending, count in counts[:_NAMED])
    more = ", ..." if len(counts) > _NAMED else ""
    # Rows of conversations have no text to convert.
    remedy = f"; to read them, {CONVERT}" if TEXT_ENDINGS[0] in endings else ""
    return f"{source}: {plural(len(left_out), 'file')} left out, by ending: {named}{more}{remedy}"


def local_files(data: DataSection) -> list[Path]:
    """`find_files` of the recipe's source and format; token files without tokens are left out."""
    files = find_files(data.one_source, format_of(data).endings)
    if not FORMATS[data.format].has_tokens:
        return files
    try:
        return [path for path in files if path.stat().st_size]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None
