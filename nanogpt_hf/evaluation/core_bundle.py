"""Read a bundle of CORE tasks, core.yaml, eval_meta_data.csv and eval_data/*.jsonl: a folder, or a
zip at a URL.
"""

import csv
import hashlib
import json
import os
import random
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import constants

from nanogpt_hf.data.files import download, file_digest, is_url, without_login
from nanogpt_hf.errors import DataError, one_line
from nanogpt_hf.place import make_once

_SHUFFLE_SEED = 1337  # nanochat's, so that --limit takes the same questions
_SHA256 = "sha256"  # the file that marks an unpacked bundle as complete


@dataclass(frozen=True)
class CoreQuestion:
    """Contexts, each with its continuation, and the number of the right one."""

    options: list[tuple[str, str]]
    gold: int


@dataclass(frozen=True)
class CoreTask:
    """A task of CORE: its questions, how many solved examples precede each, and the accuracy of
    guessing.
    """

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
    """The tasks of a folder, or of a zip at a URL, which is downloaded once; at most `limit`
    questions of each.

    Raises DataError, one line, if there is no such bundle, the zip has another sha256, or a file
    cannot be read.
    """
    if sha256 and not is_url(source):
        raise DataError("--core-sha256: checks a download; leave it out for a folder")
    folder = _unpacked(source, sha256) if is_url(source) else Path(os.path.expanduser(source))
    entries_file, baselines_file = folder / "core.yaml", folder / "eval_meta_data.csv"
    if not entries_file.is_file():
        raise DataError(
            f"--core: {without_login(source)}: no bundle of CORE, which has core.yaml in it"
        )
    tasks, files = [], [entries_file, baselines_file]
    with _reading(baselines_file), baselines_file.open(encoding="utf-8", newline="") as file:
        baselines = {
            row["Eval Task"]: 0.01 * float(row["Random baseline"]) for row in csv.DictReader(file)
        }
    with _reading(entries_file):
        for entry in yaml.safe_load(entries_file.read_text(encoding="utf-8"))["icl_tasks"]:
            files.append(folder / "eval_data" / entry["dataset_uri"])
            options_of = _OPTIONS[entry["icl_task_type"]]
            with _reading(files[-1]):
                questions = _read_questions(files[-1], options_of)[:limit]
            task = CoreTask(
                entry["label"],
                entry["icl_task_type"],
                entry["num_fewshot"][0],
                entry.get("continuation_delimiter", " "),
                baselines[entry["label"]],
                questions,
            )
            if len(questions) <= task.num_fewshot:
                raise DataError(
                    f"--limit: {task.label}: {task.num_fewshot} solved examples precede each "
                    f"question, so it needs at least {task.num_fewshot + 1}, and has "
                    f"{len(questions)}"
                )
            tasks.append(task)
    return CoreBundle(without_login(source), tasks, file_digest(files).removeprefix("sha256:"))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Context for reading a file of a bundle: an error becomes one line that names the file."""
    try:
        yield
    except (
        *(OSError, ValueError, LookupError, TypeError, AttributeError),
        *(yaml.YAMLError, csv.Error),
    ) as error:
        raise DataError(
            f"--core: {path}: not as in a bundle of CORE: {type(error).__name__}: {one_line(error)}"
        ) from None


def _read_questions(
    path: Path, options_of: Callable[[dict[str, Any]], list[tuple[str, str]]]
) -> list[CoreQuestion]:
    """The questions in nanochat's order."""
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    questions = [CoreQuestion(options_of(row), row.get("gold", 0)) for row in rows]
    random.Random(_SHUFFLE_SEED).shuffle(questions)
    return questions


# The options of a question by the type of its task.
_OPTIONS: dict[str, Callable[[dict[str, Any]], list[tuple[str, str]]]] = {
    "multiple_choice": lambda row: [(row["query"], choice) for choice in row["choices"]],
    "schema": lambda row: [(context, row["continuation"]) for context in row["context_options"]],
    "language_modeling": lambda row: [(row["context"].strip(), row["continuation"])],
}


def _unpacked(url: str, sha256: str | None) -> Path:
    """The folder of a downloaded bundle, in the cache of the Hugging Face libraries."""
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    folder = Path(constants.HF_ASSETS_CACHE) / "nanogpt_hf" / "core" / name
    marker = folder / _SHA256

    def write(partial: Path) -> str:
        archive = download(url, partial, sha256=sha256, knobs=("--core", "--core-sha256"))
        digest = file_digest([archive]).removeprefix("sha256:")
        try:
            with zipfile.ZipFile(archive) as file:
                file.extractall(partial / "bundle")
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
            raise DataError(f"--core: {without_login(url)}: cannot be unpacked: {error}") from None
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
        raise DataError(
            f"--core-sha256: {folder} was downloaded from {without_login(url)} with sha256 "
            f"{digest}, not {sha256}"
        )
    found = sorted(path.parent for path in (folder / "bundle").rglob("core.yaml"))
    return found[0] if found else folder / "bundle"
