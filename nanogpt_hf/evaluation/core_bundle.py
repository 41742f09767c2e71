"""Read a bundle of CORE tasks, core.yaml, eval_meta_data.csv and eval_data/*.jsonl: a folder, or a zip at a URL."""

import csv
import hashlib
import os
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import constants

from nanogpt_hf.data.download import download, is_url, without_login
from nanogpt_hf.data.files import read_rows
from nanogpt_hf.data.place import make_once
from nanogpt_hf.data.source import file_digest
from nanogpt_hf.errors import DataError
from nanogpt_hf.formatting import format_bytes

_SHUFFLE_SEED = 1337  # nanochat's, so that --limit takes the same questions
_LARGEST = 4 * 2**30  # bytes of an unpacked bundle; DCLM's has less than one GiB
_SHA256 = "sha256"  # the file that marks an unpacked bundle as complete


@dataclass(frozen=True)
class CoreQuestion:
    """Contexts, each with its continuation, and the number of the right one."""

    options: list[tuple[str, str]]
    gold: int


@dataclass(frozen=True)
class CoreTask:
    """A task of CORE: its questions, how many solved examples precede each, and the accuracy of guessing."""

    label: str
    kind: str  # multiple_choice, schema or language_modeling
    num_fewshot: int
    delimiter: str  # between context and continuation
    baseline: float
    questions: list[CoreQuestion]


@dataclass(frozen=True)
class CoreBundle:
    """The tasks of a bundle, and the sha256 of their files."""

    name: str
    tasks: list[CoreTask]
    sha256: str


def load_bundle(source: str, sha256: str | None = None, limit: int | None = None) -> CoreBundle:
    """The tasks of a folder, or of a zip at a URL, which is downloaded once; at most `limit` questions of each.

    Raises DataError, one line, if there is no such bundle, the zip has another sha256, or a task cannot be used.
    """
    if sha256 and not is_url(source):
        raise DataError("--core-sha256: checks a download; leave it out for a folder")
    folder = _unpacked(source, sha256) if is_url(source) else Path(os.path.expanduser(source))
    if not (folder / "core.yaml").is_file():
        raise DataError(f"--core: {without_login(source)}: no bundle of CORE, which has core.yaml in it")
    baselines = _read_baselines(folder / "eval_meta_data.csv")
    entries = _read_entries(folder / "core.yaml")
    tasks, files = [], [folder / "core.yaml", folder / "eval_meta_data.csv"]
    for number, entry in enumerate(entries, 1):
        where = f"--core: {folder / 'core.yaml'}: task {number}"
        task, file = _read_task(folder, entry, baselines, limit, where)
        if task.label in [other.label for other in tasks]:
            raise DataError(f"{where}: a second task is labelled {task.label}")
        tasks.append(task)
        files.append(file)
    return CoreBundle(without_login(source), tasks, file_digest(files).removeprefix("sha256:"))


def _unpacked(url: str, sha256: str | None) -> Path:
    """The folder of a downloaded bundle, in the cache of the Hugging Face libraries."""
    folder = Path(constants.HF_ASSETS_CACHE) / "nanogpt_hf" / "core" / hashlib.sha256(url.encode()).hexdigest()[:16]
    marker, shown = folder / _SHA256, without_login(url)

    def write(partial: Path) -> str:
        archive = download(url, partial, sha256=sha256, knobs=("--core", "--core-sha256"))
        digest = file_digest([archive]).removeprefix("sha256:")
        _unpack(archive, partial / "bundle", shown)
        archive.unlink()
        (partial / _SHA256).write_text(digest, encoding="utf-8")
        return digest

    digest, _ = make_once(
        folder,
        find=lambda: marker.read_text(encoding="utf-8") if marker.is_file() else None,
        check=lambda: None,
        write=write,
        last=_SHA256,
    )
    if sha256 and sha256.lower() != digest:
        raise DataError(f"--core-sha256: {folder} was downloaded from {shown} with sha256 {digest}, not {sha256}")
    found = sorted(path.parent for path in (folder / "bundle").rglob("core.yaml"))
    return found[0] if found else folder / "bundle"


def _unpack(archive: Path, folder: Path, url: str) -> None:
    try:
        with zipfile.ZipFile(archive) as file:
            size = sum(member.file_size for member in file.infolist())
            if size > _LARGEST:
                raise DataError(f"--core: {url}: would take {format_bytes(size)} unpacked; that is no bundle of CORE")
            file.extractall(folder)
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:  # damaged, encrypted, of another method
        raise DataError(f"--core: {url}: cannot be unpacked: {error}") from None


def _read_baselines(path: Path) -> dict[str, float]:
    """Task -> the accuracy of guessing."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return {row["Eval Task"]: 0.01 * float(row["Random baseline"]) for row in csv.DictReader(file)}
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        reason = f"no column {error}" if isinstance(error, KeyError) else error
        raise DataError(f"--core: {path}: cannot be read as the tasks' baselines: {reason}") from None


def _read_entries(path: Path) -> list[Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"--core: {path}: cannot be read: {' '.join(str(error).split())}") from None
    entries = tree.get("icl_tasks") if isinstance(tree, dict) else None
    if not isinstance(entries, list) or not entries:
        raise DataError(f"--core: {path}: expected a list of tasks under icl_tasks")
    return entries


def _read_task(
    folder: Path, entry: Any, baselines: dict[str, float], limit: int | None, where: str
) -> tuple[CoreTask, Path]:
    """A task, with its questions in nanochat's order, and the file of its questions."""
    entry = entry if isinstance(entry, dict) else {}
    label, uri = (_text_of(entry, key, where) for key in ("label", "dataset_uri"))
    kind, shots = entry.get("icl_task_type"), entry.get("num_fewshot")
    delimiter = entry.get("continuation_delimiter", " ")
    where = f"{where} ({label})"
    if kind not in _OPTIONS:
        raise DataError(f"{where}: icl_task_type {kind!r}: expected one of {', '.join(_OPTIONS)}")
    if not (isinstance(shots, list) and shots and type(shots[0]) is int and shots[0] >= 0):
        raise DataError(f"{where}: num_fewshot {shots!r:.40}: expected a list of a number, such as [10]")
    if not isinstance(delimiter, str):
        raise DataError(f"{where}: continuation_delimiter {delimiter!r:.40}: expected text")
    if label not in baselines:
        raise DataError(f"{where}: eval_meta_data.csv has no random baseline for it")
    if not 0 <= baselines[label] < 1:
        raise DataError(f"{where}: a random baseline of {100 * baselines[label]:g} percent; expected 0 to below 100")
    data = (folder / "eval_data").resolve()
    file = (data / uri).resolve()
    if not file.is_relative_to(data) or file.suffix != ".jsonl" or not file.is_file():
        raise DataError(f"{where}: no file {uri} in {folder / 'eval_data'}")
    questions = _read_questions(file, _OPTIONS[kind])
    random.Random(_SHUFFLE_SEED).shuffle(questions)
    questions = questions[:limit]
    if len(questions) <= shots[0]:
        raise DataError(
            f"{where}: {shots[0]} solved examples precede each question, so it needs at least {shots[0] + 1}, "
            f"and has {len(questions)}"
        )
    return CoreTask(label, kind, shots[0], delimiter, baselines[label], questions), file


def _read_questions(file: Path, options_of: Callable[[dict[str, Any]], list[tuple[str, str]]]) -> list[CoreQuestion]:
    questions = []
    for position, row in read_rows(file):
        where = f"--core: {file}: {position}"
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object, got {row!r:.40}")
        try:
            options = options_of(row)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from None
        gold = row.get("gold") if len(options) > 1 else 0
        if type(gold) is not int or not 0 <= gold < len(options):
            raise DataError(f"{where}: gold {gold!r:.40}: expected the number of an option, 0 to {len(options) - 1}")
        questions.append(CoreQuestion(options, gold))
    return questions


def _text_of(row: dict[str, Any], key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}: {key} {value!r:.40}: expected text")
    return value


def _value(row: dict[str, Any], key: str) -> str:
    """A field as the text that a template would write."""
    value = row.get(key)
    if not isinstance(value, str | int | float):
        raise ValueError(f"{key} {value!r:.40}: expected text")
    return str(value)


def _values(row: dict[str, Any], key: str) -> list[str]:
    values = row.get(key)
    if not isinstance(values, list) or len(values) < 2:
        raise ValueError(f"{key} {values!r:.40}: expected a list of at least two texts")
    return [_value({key: value}, key) for value in values]


def _continued(context: str, continuation: str) -> list[tuple[str, str]]:
    if not continuation.strip():
        raise ValueError("continuation is empty")
    return [(context.strip(), continuation)]


# The options of a question by the type of its task.
_OPTIONS: dict[str, Callable[[dict[str, Any]], list[tuple[str, str]]]] = {
    "multiple_choice": lambda row: [(_value(row, "query"), choice) for choice in _values(row, "choices")],
    "schema": lambda row: [(context, _value(row, "continuation")) for context in _values(row, "context_options")],
    "language_modeling": lambda row: _continued(_value(row, "context"), _value(row, "continuation")),
}
