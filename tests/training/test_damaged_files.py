"""Every file of a run, of its newest checkpoint and of its prepared data, damaged in every way, and
every command that reads it: no traceback, one line, and a run with a whole checkpoint resumes.
"""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from safetensors.torch import load_file, save_file

from arguments import argv
from assertions import copy_at, file_contents
from nanogpt_hf.commands import main
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.own_files import file_sha256, log_once
from nanogpt_hf.reports import curves
from nanogpt_hf.runs.find import find_model
from nanogpt_hf.runs.folder import RunFolder

pytestmark = pytest.mark.long
# A command takes less than one second without a fault.
SECONDS = 60
NEWEST = "checkpoints/step_00000004"
DAMAGES = {
    "absent": None,
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "not-utf8": lambda content: content[:-20] + b"\xff" + content[-19:],
    "null": lambda content: b"null\n",
    "list": lambda content: b"[]\n",
    "mapping": lambda content: b"{}\n",
    "deep": lambda content: b"[" * 3000 + b"]" * 3000 + b"\n",
}


def tree_damage(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """Change the mapping in a file: of YAML, of JSON, or of the first line of JSON lines."""

    def damage(path: Path) -> None:
        first, _, rest = (
            path.read_text().lstrip().partition("\n" if path.suffix == ".jsonl" else "\0")
        )
        tree = (yaml.safe_load if path.suffix == ".yaml" else json.loads)(first)
        change(tree)
        path.write_text(json.dumps(tree) + ("\n" + rest if rest else ""))

    return damage


def drop(*keys) -> Callable[[dict], None]:
    def change(tree) -> None:
        *outer, last = keys
        for key in outer:
            tree = tree[key]
        del tree[last]

    return change


def put(value, *keys) -> Callable[[dict], None]:
    def change(tree) -> None:
        *outer, last = keys
        for key in outer:
            tree = tree[key]
        tree[last] = value

    return change


def resealed(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """A damage whose file has the right checksum."""

    def both(path: Path) -> None:
        damage(path)
        sums = path.with_name("checksums.json")
        tree = json.loads(sums.read_text())
        sums.write_text(json.dumps(tree | {path.name: file_sha256(path)}))

    return both


def one_tensor_less(path: Path) -> None:
    tensors = load_file(path)
    tensors.pop(min(tensors))
    save_file(tensors, path)


def in_half_precision(path: Path) -> None:
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path)


class File(NamedTuple):
    """A file of the folder of a run and its data, and how its fields are damaged."""

    path: str
    fields: dict[str, Callable[[Path], None]]
    # "skipped": every command goes on. "passed over": the checkpoint before is used. "again": a
    # resume writes it, others name it. "needed": commands that need it name it.
    then: str


def json_fields(missing: tuple, other: dict[str, tuple]) -> dict[str, Callable[[Path], None]]:
    fields = {"field-missing": tree_damage(drop(*missing))}
    return fields | {name: tree_damage(put(*value)) for name, value in other.items()}


STATE_FIELDS = {
    "step-text": ("4", "step"),
    "step-null": (None, "step"),
    "step-negative": (-1, "step"),
    "step-other": (3, "step"),
    "identity-null": (None, "identity"),
    "identity-mapping": ({}, "identity"),
    "identity-list": ([], "identity"),
    "knobs-null": (None, "identity", "knobs"),
    "origin-text": ("x", "identity", "origin"),
    "origin-null": (None, "identity", "origin"),
    "origin-list": ([1], "identity", "origin"),
    "origin-number": ({"a": 1}, "identity", "origin"),
    "tokens-text": ("1", "tokens"),
    "evaluation-list": ([], "evaluation"),
}
TENSOR_FIELDS = {"field-missing": one_tensor_less, "other-type": in_half_precision}
FILES = {
    "recipe": File(
        "run/recipe.yaml",
        json_fields(("optim",), {"other-type": (5, "train"), "unknown": (5, "train", "steps")}),
        "again",
    ),
    "metrics": File(
        "run/metrics.jsonl",
        json_fields(("step",), {"other-type": ("1", "step"), "null-type": (None, "step")}),
        "skipped",
    ),
    "machine": File(
        "run/machine.json",
        json_fields(
            ("starts",),
            {
                "other-type": (5, "starts"),
                "entry": ([5], "starts"),
                "threads": ("x", "starts", 0, "fingerprint", "threads"),
                "processes": ("1", "starts", 0, "processes"),
                "precision": (None, "starts", 0, "precision"),
            },
        )
        | {
            f"no-{name}": tree_damage(drop("starts", 0, name))
            for name in ("fingerprint", "processes", "precision", "step")
        },
        "skipped",
    ),
    "verified": File(
        "run/verified.jsonl", json_fields(("step",), {"other-type": (5, "result")}), "skipped"
    ),
    "checksums": File(
        f"run/{NEWEST}/checksums.json",
        json_fields(("optimizer.safetensors",), {"other-type": (5, "model.safetensors")})
        | {"no-model": tree_damage(drop("model.safetensors"))},
        "passed over",
    ),
    "state": File(
        f"run/{NEWEST}/state.json",
        json_fields(("step",), {"other-type": ("4", "step")}),
        "passed over",
    ),
    "resealed-state": File(
        f"run/{NEWEST}/state.json",
        {name: resealed(tree_damage(put(*value))) for name, value in STATE_FIELDS.items()},
        "passed over",
    ),
    "model": File(f"run/{NEWEST}/model.safetensors", TENSOR_FIELDS, "passed over"),
    "optimizer": File(f"run/{NEWEST}/optimizer.safetensors", TENSOR_FIELDS, "passed over"),
    "manifest": File(
        "data/manifest.json",
        json_fields(
            ("train",),
            {
                "other-type": ("x", "train"),
                "recipe-null": (None, "recipe"),
                "knob-unknown": ({"no": 1}, "recipe"),
                "shards-text": ("x", "train", "shards"),
                "shard-text": ({"a": "x"}, "train", "shards"),
                "revision-null": (None, "revision"),
                "tokens-other": (9, "train", "tokens"),
                "bytes-zero": (0, "validation", "bytes"),
            },
        ),
        "needed",
    ),
    "shards": File(
        "data/train/state.json",
        json_fields(("_data_files",), {"other-type": (5, "_data_files")}),
        "needed",
    ),
    "tokens": File("data/train/data-00000.arrow", {}, "needed"),
    "tokenizer": File(
        "data/tokenizer/tokenizer.json",
        json_fields(("model",), {"other-type": (5, "model")}),
        "needed",
    ),
}
CELLS = [
    (name, damage)
    for name, file in FILES.items()
    for damage in (*(DAMAGES if name != "resealed-state" else {}), *file.fields)
]


class Timeout(BaseException):
    """A command took too long. Not an Exception, which a command might explain."""


class Workshop:
    """A folder with a run that was killed after its second checkpoint, its recipe and its data.

    Paths in the run are absolute, so the folder keeps its name, and each case gets its content
    again.
    """

    def __init__(self, folder: Path, kept: Path, final: dict[str, bytes]):
        self.folder = folder
        self.kept = kept
        self.final = final
        self.run = RunFolder(folder / "run")
        self.branch = folder / "branch"
        run = self.run.path
        train = argv("pretrain {} --run-dir {}", folder / "tiny.yaml", run)
        self.commands = {
            "verify": argv("verify {}", run),
            "inspect": argv("inspect {} --step 5", run),
            "branch": argv("branch {} --at 4 --run-dir {} --train.max_steps 9", run, self.branch),
            "report": argv("report {}", run),
            "compare": argv("compare {} --output {}", run, folder / "compare.png"),
            "resume": [*train, "--resume"],
            "auto-resume": [*train, "--auto-resume"],
        }

    def renew(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.kept, self.folder)

    def damage(self, name: str, damage: str) -> None:
        path = self.folder / FILES[name].path
        if damage not in DAMAGES:
            FILES[name].fields[damage](path)
        elif change := DAMAGES[damage]:
            path.write_bytes(change(path.read_bytes()))
        else:
            path.unlink()


@pytest.fixture(scope="module")
def workshop(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    work = folder / "work"
    work.mkdir()
    knobs = {"train__max_steps": 5, "checkpoint__keep": 9, "eval__every": 2, "eval__tokens": 64}
    complete = train(work / "run", train__micro_batch_size=8, **knobs)
    final = model_files(complete)
    assert main(argv("verify {}", complete.path)) == 0
    complete.path.rename(folder / "complete")
    copy_at(RunFolder(folder / "complete"), 4, work / "run")
    shutil.copytree(work, folder / "kept")
    return Workshop(work, folder / "kept", final)


def model_files(run: RunFolder) -> dict[str, bytes]:
    """The final model without its card, which states the duration."""
    return {name: c for name, c in file_contents(run.final).items() if name != "README.md"}


@pytest.fixture
def call(capsys, forget_accelerate, monkeypatch):
    """Run a command in this process: its exit status, and the lines that it printed."""

    def too_long(*_) -> None:
        raise Timeout

    monkeypatch.setattr(curves, "draw_curves", lambda *_: True)
    previous = signal.signal(signal.SIGALRM, too_long)

    def call(words: list[str]) -> tuple[int, list[str], list[str]]:
        forget_accelerate()
        log_once.cache_clear()
        capsys.readouterr()
        signal.alarm(SECONDS)
        status = main(words)
        signal.alarm(0)
        out, err = capsys.readouterr()
        return status, out.splitlines(), err.splitlines()

    yield call
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def check(workshop: Workshop, name: str, command: str, status: int, out: list, err: list) -> None:
    """Whether a command has ended as the table says."""
    file = FILES[name]
    said = "\n".join((*out, *err))
    path = workshop.folder / file.path
    trains = command in ("resume", "auto-resume")
    # losses that are not known differ from those that `verify` finds; the last step may be unknown
    lost = name == "metrics" and command in ("verify", "inspect", "compare")
    if status == 2 and not lost:
        *_, line = [line for line in err if line != "1 problem; nothing was started."]
        assert any(str(folder) in line for folder in (path, *path.parents[:2])), said
        assert command != "branch" or not workshop.branch.exists()
    elif status == 0 and trains:
        assert model_files(workshop.run) == workshop.final, said
    expected = {
        "skipped": {0, 1, 2} if lost else {0},
        "passed over": {0} if trains or command in ("report", "compare") else {1, 2},
        "again": {0} if trains else {2},
        # `report` and `compare` need none, but a manifest is named by one warning
        "needed": {0} if command in ("report", "compare") else {1, 2},
    }[file.then]
    # `verify` compares tensors alone.
    if name == "resealed-state" and command == "verify":
        expected |= {0}
    if name == "tokens":  # a byte between the tokens may have changed
        expected |= {0}
    if name == "recipe" and trains:
        assert workshop.run.recipe.read_text() == (workshop.kept / file.path).read_text()
    assert status in expected, said
    named = [line for line in (*out, *err) if str(path) in line and "metrics  " not in line]
    assert len(named) <= 1 or file.then != "skipped", said


def run_cell(workshop, call, name: str, damage: str, command: str) -> None:
    workshop.renew()
    workshop.damage(name, damage)
    status, out, err = call(workshop.commands[command])
    check(workshop, name, command, status, out, err)


COMMANDS = ("verify", "inspect", "branch", "report", "compare", "resume", "auto-resume")


@pytest.mark.parametrize(
    ("name", "damage", "command"),
    [(*cell, COMMANDS[number % 7]) for number, cell in enumerate(CELLS[::2])],
)
def test_every_second_damage_with_one_command(workshop, call, name, damage, command):
    run_cell(workshop, call, name, damage, command)


@pytest.mark.parametrize("field", [name for name in STATE_FIELDS if "tokens" not in name])
@pytest.mark.parametrize("words", ["verify {} --steps 2:4", "inspect {} --step 3"])
def test_damaged_first_checkpoint_is_named_by_its_own_path(workshop, call, field, words):
    workshop.renew()
    path = workshop.run.checkpoint(2) / "state.json"
    resealed(tree_damage(put(*STATE_FIELDS[field])))(path)
    status, out, err = call(argv(words, workshop.run.path))
    said = "\n".join((*out, *err))
    assert status == (1 if words.startswith("verify") else 2), said
    assert said.count(f"{path.parent}: damaged checkpoint: state.json") == 1
    assert "--overwrite" not in said


def test_model_of_a_run_is_found_though_its_recipe_is_lost(workshop):
    workshop.renew()
    workshop.run.recipe.unlink()
    assert find_model(str(workshop.run.path)) == str(workshop.run.best)
    # A checkpoint is no model, and the message names the models of its run.
    for checkpoint in workshop.run.checkpoint_folders():
        with pytest.raises(RunFolderError, match=f"holds no model: give {workshop.run.path},"):
            find_model(str(checkpoint))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("name", "damage"), CELLS)
def test_every_file_and_damage_with_every_command(workshop, call, name, damage, command):
    run_cell(workshop, call, name, damage, command)
