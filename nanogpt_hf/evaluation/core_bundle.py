"""Read a bundle of CORE tasks, core.yaml, eval_meta_data.csv and eval_data/*.jsonl: a folder, or a
zip of one.
"""

import csv
import json
import os
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from nanogpt_hf.data.files import file_digest
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


def load_bundle(source: str, limit: int | None = None) -> CoreBundle:
    """The tasks of a folder, or of a zip of one; at most `limit` questions of each.

    Raises DataError, one line, if there is no such bundle, or a file cannot be read.
    """
    path = Path(os.path.expanduser(source))
    try:
        folder = _in_zip(path) if path.is_file() else path
        if not (folder / "core.yaml").is_file():
            raise DataError(f"--core: {source}: no bundle of CORE, which has core.yaml in it")
        tasks, files = _read(folder, limit)
        digest = file_digest(files).removeprefix("sha256:")
    except UserError:
        raise
    except Exception as error:  # zipfile, zlib, csv, yaml and json raise many types
        raise DataError(
            f"--core: {source}: cannot be read as a bundle of CORE: {type(error).__name__}: "
            f"{one_line(error)}"
        ) from None
    return CoreBundle(source, tasks, digest)


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


def _in_zip(archive: Path) -> zipfile.Path:
    """The folder with core.yaml in a zip."""
    with zipfile.ZipFile(archive) as file:
        found = [name for name in file.namelist() if PurePosixPath(name).name == "core.yaml"]
    return zipfile.Path(archive, min(found, default="").removesuffix("core.yaml"))
