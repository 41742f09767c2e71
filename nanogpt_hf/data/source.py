"""Load documents from files, folders, URLs, Hub data sets, Python's documentation, or generated arithmetic."""

import glob
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

from nanogpt_hf.config.schema import DataSection
from nanogpt_hf.data.arithmetic import ARITHMETIC, arithmetic_conversations, arithmetic_text
from nanogpt_hf.data.conversations import conversation_of, read_conversations
from nanogpt_hf.data.download import download, is_url, without_login
from nanogpt_hf.data.files import KNOWN_FORMATS, ROW_FORMATS, file_format, read_file
from nanogpt_hf.data.space import check_space
from nanogpt_hf.errors import DataError
from nanogpt_hf.formatting import plural

PYTHON_DOCS = "python-docs"
UNKNOWN_REVISION = "unknown"
BUILT_IN = (PYTHON_DOCS, ARITHMETIC)  # sources that are neither files nor downloads
TEXT_FEATURES = datasets.Features({"text": datasets.Value("large_string")})  # a single document may exceed 2 GiB
_MESSAGE = {"role": datasets.Value("string"), "content": datasets.Value("string")}
CHAT_FEATURES = datasets.Features({"messages": datasets.List(_MESSAGE)})


@dataclass(frozen=True)
class Part:
    """One of `number` parts of the documents of a source, in its order."""

    index: int
    number: int


@dataclass(frozen=True)
class Documents:
    """Documents as a data set with one column, `text`, or `messages` for conversations.

    `validation` is None if it has to be held out of `train`.
    """

    train: datasets.Dataset
    validation: datasets.Dataset | None
    revision: str


def local_files(data: DataSection) -> list[Path]:
    """`find_files` of the recipe's source and format."""
    return find_files(data.one_source, (".ds",) if data.format == "datatrove" else KNOWN_FORMATS)


def find_files(source: str, formats: tuple[str, ...] = KNOWN_FORMATS) -> list[Path]:
    """The files of a local source, sorted; [] for a URL, a built-in source or a name that may be a Hub data set.

    Of a folder, those of the given formats that are not hidden. Raises DataError for a path without files.
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
            if file_format(file) in formats
            and file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not files:
            raise DataError(f"data.source: {source}: the folder holds no {', '.join(formats)} file")
        return files
    if glob.has_magic(source):
        files = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        if not files:
            raise DataError(f"data.source: {source}: no file matches")
        return files
    if os.path.exists(path):
        raise DataError(f"data.source: {source}: is not a regular file but a pipe or a device; save the text to a file")
    if source.startswith((".", "/", "~")) or file_format(path) in KNOWN_FORMATS or source.count("/") > 1:
        raise DataError(f"data.source: {source}: no such file or folder")
    return []


def is_on_hub(source: str) -> bool:
    """Whether a source can only be the name of a Hub data set. Raises DataError for a path without files."""
    return not (find_files(source) or source in BUILT_IN or is_url(source))


def check_source(data: DataSection, folder: Path) -> None:
    """Raises DataError if a local source is missing, or contains `folder`, which would be read as text."""
    local_files(data)
    source = Path(os.path.expanduser(data.one_source))
    if os.path.isdir(source) and folder.is_relative_to(source.resolve()):
        raise DataError(f"{folder}: is inside data.source {data.one_source}, and would be read as text; choose another")


def file_state(files: list[Path]) -> str:
    """A fingerprint of names, sizes and times: equal only if the files are unchanged."""
    states = [(path.as_posix(), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()


def file_digest(files: list[Path]) -> str:
    """The sha256 of the files' contents, one after another, with a zero byte between them."""
    digest = hashlib.sha256()
    for number, path in enumerate(files):
        digest.update(b"\0" * (number > 0))
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def file_digests(groups: list[list[Path]]) -> tuple[str, list[str]]:
    """`file_digest` of all files, and of each group of them, reading each file once."""
    whole, digests, first = hashlib.sha256(), [], True
    for files in groups:
        digest = hashlib.sha256()
        for number, path in enumerate(files):
            digest.update(b"\0" * (number > 0))
            whole.update(b"\0" * (not first))
            first = False
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                    whole.update(block)
        digests.append(f"sha256:{digest.hexdigest()}")
    return f"sha256:{whole.hexdigest()}", digests


def files_of_part(files: list[Path], part: Part) -> list[Path]:
    """The files that hold a part's documents: a run of them, or all if there are fewer files than parts."""
    if len(files) < part.number:
        return files
    return files[part.index * len(files) // part.number : (part.index + 1) * len(files) // part.number]


def _rows_of_part(rows: datasets.Dataset, part: Part, source: str) -> datasets.Dataset:
    """The part's rows, a run of them. Raises DataError if there are fewer rows than parts."""
    count, number = rows.num_rows, part.number
    if count < max(2, number):
        raise DataError(
            f"data.source: {source}: {plural(count, 'document')} cannot be divided into {number} parts; "
            "prepare it on one machine"
        )
    return rows.select(range(part.index * count // number, (part.index + 1) * count // number))


def _read_files(files: list[str], chat: bool, text_column: str, source: str) -> Iterator[dict[str, Any]]:
    empty = True
    for path in files:
        for document in read_conversations(Path(path)) if chat else read_file(Path(path), text_column):
            yield {"messages" if chat else "text": document}
            empty = False
    if empty:
        raise DataError(f"data.source: {source}: empty; there is no text to train on")


def _read_chat_rows(rows: datasets.Dataset, where: str) -> Iterator[dict[str, list]]:
    for number, row in enumerate(rows, 1):
        try:
            yield {"messages": conversation_of(row)}
        except ValueError as error:
            raise DataError(f"data.source: {where}: row {number}: {error}") from None


def _python_docs() -> Iterator[dict[str, str]]:
    from pydoc_data.topics import topics

    yield {"text": "\n\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"}


def _collect(generator: Callable, features: datasets.Features, cache_dir: Path, **arguments) -> datasets.Dataset:
    try:
        return datasets.Dataset.from_generator(
            generator, features=features, cache_dir=str(cache_dir), gen_kwargs=arguments or None
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, DataError | MemoryError):
            raise error.__cause__ from None
        raise


def hub_error(data: DataSection, error: Exception) -> DataError:
    """An error of the Hub, or of a library that reads its data sets, in one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return DataError(f"data.source: {data.one_source}: no file or folder here, and the Hub did not give it: {reason}")


def check_text_column(features: datasets.Features, data: DataSection) -> None:
    """Raises DataError if a Hub data set has no such column of text."""
    if data.text_column not in features:
        raise DataError(
            f"data.text_column: {data.one_source} has no column {data.text_column!r}; it has: {', '.join(features)}"
        )
    if features[data.text_column] not in (datasets.Value("string"), datasets.Value("large_string")):
        raise DataError(f"data.text_column: column {data.text_column!r} of {data.one_source} does not hold text")


def revision_of(urls: Iterable[str], data: DataSection) -> str:
    """The commit in the URLs of a Hub data set's files; without one the recipe's revision."""
    commit = re.search(r"@([0-9a-f]{40})/", " ".join(urls))
    return commit[1] if commit else data.revision or UNKNOWN_REVISION


def _from_hub(data: DataSection, scratch: Path) -> Documents:
    def load(split: str) -> datasets.Dataset:
        try:
            loaded = datasets.load_dataset(
                data.one_source, data.config, split=split, revision=data.revision, trust_remote_code=False
            )
        except Exception as error:  # of the network, of the Hub, of a loading script, of a file format, ...
            raise hub_error(data, error) from None
        if not loaded.num_rows:
            raise DataError(f"data.source: {data.one_source}: split {split!r} is empty; there is no text to train on")
        if data.format == "chat":
            return loaded
        check_text_column(loaded.features, data)
        return loaded.select_columns(data.text_column).rename_columns({data.text_column: "text"})

    urls = check_space(data, scratch)
    train = load(data.split)
    revision = revision_of([*urls, *(train.info.download_checksums or ())], data)
    validation = load(data.validation_split) if data.validation_split else None
    if data.format == "chat":

        def conversations(rows: datasets.Dataset, split: str | None) -> datasets.Dataset:
            return _collect(
                _read_chat_rows, CHAT_FEATURES, scratch, rows=rows, where=f"{data.one_source}: split {split}"
            )

        train = conversations(train, data.split)
        validation = validation and conversations(validation, data.validation_split)
    return Documents(train, validation, revision)


def load_documents(data: DataSection, scratch: Path, part: Part | None = None) -> Documents:
    """The documents of `data.source`, or those of one part of it. `scratch` is a folder for temporary files.

    A part of at least as many files as parts reads its own files only; the revision is then that of these files.
    Raises DataError if the source does not exist, has no text, or cannot be read as `data.format`.
    """
    documents, divided = _load(data, scratch, part)
    if part is None or divided or part.number == 1:
        return documents
    source = without_login(data.one_source)
    validation = documents.validation and _rows_of_part(documents.validation, part, source)
    return Documents(_rows_of_part(documents.train, part, source), validation, documents.revision)


def _load(data: DataSection, scratch: Path, part: Part | None) -> tuple[Documents, bool]:
    """The documents, and whether they are those of the part only."""
    files = find_files(data.one_source)
    if is_on_hub(data.one_source):
        return _from_hub(data, scratch), False
    if data.validation_split:
        raise DataError("data.validation_split: only a Hub data set has splits; use data.validation_fraction instead")
    if data.one_source == PYTHON_DOCS:
        return Documents(
            _collect(_python_docs, TEXT_FEATURES, scratch), None, f"Python {sys.version.split()[0]}"
        ), False
    if data.one_source == ARITHMETIC:
        if data.format == "chat":
            return Documents(_collect(arithmetic_conversations, CHAT_FEATURES, scratch), None, f"{ARITHMETIC} 1"), False
        return Documents(_collect(arithmetic_text, TEXT_FEATURES, scratch), None, f"{ARITHMETIC} 1"), False
    downloaded = not files
    divided = part is not None and len(files) >= max(2, part.number)
    files = files_of_part(files, part) if part and divided else files
    if downloaded:
        files = [download(data.one_source, scratch, sha256=data.sha256, knobs=("data.source", "data.sha256"))]
    chat, chosen = data.format == "chat", [str(path) for path in files]
    if chat and os.path.isdir(os.path.expanduser(data.one_source)):  # without a README in the folder
        chosen = [path for path in chosen if file_format(Path(path)) in ROW_FORMATS]
    arguments = {"chat": chat, "text_column": data.text_column, "source": without_login(data.one_source)}
    try:
        documents = _collect(_read_files, CHAT_FEATURES if chat else TEXT_FEATURES, scratch, files=chosen, **arguments)
    except DataError as error:
        if not downloaded:
            raise
        raise DataError(str(error).replace(chosen[0], arguments["source"])) from None  # the file is temporary
    return Documents(documents, None, file_digest(files)), divided
