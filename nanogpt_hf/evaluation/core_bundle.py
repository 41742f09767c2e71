"""Read a bundle of CORE tasks, core.yaml, eval_meta_data.csv and eval_data/*.jsonl: a folder, or a
zip at a URL.
"""

import csv
import hashlib
import json
import os
import random
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import filelock
import yaml
from huggingface_hub import constants

from nanogpt_hf.data.files import download, file_digest, is_url, without_login
from nanogpt_hf.errors import DataError, UserError, one_line

_SHUFFLE_SEED = 1337  # nanochat's, so that --limit takes the same questions


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
    name = without_login(source)
    is_download = is_url(source)
    if sha256 and not is_download:
        raise DataError("--core-sha256: checks a download; leave it out for a folder")
    try:
        folder = _downloaded(source, sha256) if is_download else Path(os.path.expanduser(source))
        if not (folder / "core.yaml").is_file():
            raise DataError(f"--core: {name}: no bundle of CORE, which has core.yaml in it")
        tasks, files = _read(folder, limit)
        digest = file_digest(files).removeprefix("sha256:")
    except UserError:
        raise
    except Exception as error:  # zipfile, zlib, csv, yaml and json raise many types
        raise DataError(
            f"--core: {name}: cannot be read as a bundle of CORE: {type(error).__name__}: "
            f"{one_line(error)}"
        ) from None
    return CoreBundle(name, tasks, digest)


def _read(folder: Any, limit: int | None) -> tuple[list[CoreTask], list[Any]]:
    """The tasks of a folder, a path on disk or in a zip, and their files."""
    tasks, files = [], [folder / "core.yaml", folder / "eval_meta_data.csv"]
    with files[1].open(encoding="utf-8", newline="") as file:
        baselines = {
            row["Eval Task"]: 0.01 * float(row["Random baseline"]) for row in csv.DictReader(file)
        }
    for entry in yaml.safe_load(files[0].read_text(encoding="utf-8"))["icl_tasks"]:
        files.append(folder / "eval_data" / entry["dataset_uri"])
        options_of = _OPTIONS[entry["icl_task_type"]]
        with files[-1].open(encoding="utf-8") as file:
            rows = [json.loads(line) for line in file if line.strip()]
        questions = [CoreQuestion(options_of(row), row.get("gold", 0)) for row in rows]
        random.Random(_SHUFFLE_SEED).shuffle(questions)  # in nanochat's order
        task = CoreTask(
            entry["label"],
            entry["icl_task_type"],
            entry["num_fewshot"][0],
            entry.get("continuation_delimiter", " "),
            baselines[entry["label"]],
            questions[:limit],
        )
        if len(task.questions) <= task.num_fewshot:
            raise DataError(
                f"--limit: {task.label}: {task.num_fewshot} solved examples precede each "
                f"question, so it needs at least {task.num_fewshot + 1}, and has "
                f"{len(task.questions)}"
            )
        tasks.append(task)
    return tasks, files


# The options of a question by the type of its task.
_OPTIONS: dict[str, Callable[[dict[str, Any]], list[tuple[str, str]]]] = {
    "multiple_choice": lambda row: [(row["query"], choice) for choice in row["choices"]],
    "schema": lambda row: [(context, row["continuation"]) for context in row["context_options"]],
    "language_modeling": lambda row: [(row["context"].strip(), row["continuation"])],
}


def _downloaded(url: str, sha256: str | None) -> zipfile.Path:
    """The folder with core.yaml in the zip at a URL, which the cache of the Hugging Face libraries
    keeps; of several processes, one downloads it.
    """
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    archive = Path(constants.HF_ASSETS_CACHE) / "nanogpt_hf" / f"core_{name}.zip"
    if not archive.is_file():
        archive.parent.mkdir(parents=True, exist_ok=True)
        lock = archive.with_suffix(".lock")
        lock.touch()  # if no file can be made, filelock would retry for ever
        with filelock.FileLock(lock):
            if not archive.is_file():  # no other process was faster
                _download(url, sha256, archive)
    if sha256 and (digest := file_digest([archive])) != f"sha256:{sha256.lower()}":
        raise DataError(
            f"--core-sha256: {archive} was downloaded from {without_login(url)} with {digest}, "
            f"not {sha256}"
        )
    with zipfile.ZipFile(archive) as file:
        found = [name for name in file.namelist() if PurePosixPath(name).name == "core.yaml"]
    return zipfile.Path(archive, min(found, default="").removesuffix("core.yaml"))


def _download(url: str, sha256: str | None, archive: Path) -> None:
    """Download a zip, and move it to `archive` only if all its files can be read."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        file = download(url, Path(folder), sha256=sha256, knobs=("--core", "--core-sha256"))
        with zipfile.ZipFile(file) as content:
            if damaged := content.testzip():
                raise zipfile.BadZipFile(f"{damaged} in it is damaged")
        file.replace(archive)
