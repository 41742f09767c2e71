"""SIGKILL anywhere in a run, and file operations that fail: the resumed run equals an uninterrupted
one bit for bit.
"""

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import operations
from assertions import assert_undisturbed, file_contents, numbers
from nanogpt_hf.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
# a run in which operations fail
FAULTS = {"model__n_layer": 1, "train__max_steps": 4, "eval__every": 2, "checkpoint__keep": 1}
FAULTS |= {"eval__samples": ["A cat "]}
# one begins at an evaluation, the other with a checkpoint
STAGES = [{"at": 6, "data.block_size": 8}, {"at": 24, "train.micro_batch_size": 8}]
OTHER_PLACES = [
    "writing a checkpoint",
    "replacing best",
    "evaluating",
    "flushing a checkpoint",
    "dropping an old checkpoint",
    "writing best",
]


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """A function that gives an order to killed.py."""
    faults = operations.build_faults(tmp_path_factory.mktemp("faults"))
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("killed.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | faults,
    ) as process:

        def answer(recipe: Path, folder: Path, *options: str, **order) -> list:
            order |= {"arguments": ["pretrain", str(recipe), "--run-dir", str(folder), *options]}
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield answer
        process.stdin.close()


@pytest.fixture(scope="module")
def train(answer):
    """A function that trains a recipe to its end despite kills, and returns their number."""

    def train(recipe: Path, folder: Path, kill: str | int | None = None) -> int:
        kills, status = answer(recipe, folder, kill=kill)
        assert status == 0
        return kills

    return train


@pytest.fixture(scope="module")
def faulty(tmp_path_factory, make_recipe, answer):
    """A function that trains in a new folder, with its own prepared data, in which the nth
    operation fails; the folder of the run without a fault, and the number of operations.
    """
    if not shutil.which("cc") or sys.platform != "linux":
        pytest.skip("no C compiler on Linux: faults.c makes operations fail")
    folder = tmp_path_factory.mktemp("faults")
    recipe = make_recipe(folder / "recipe.yaml", **FAULTS)

    def faulty(name: str, point: int = 0, error: str = "EIO") -> list:
        (folder / name).mkdir(exist_ok=True)
        options = f"--data.dir {folder / name}/data --auto-resume".split()
        fault = [str(folder / name), point, getattr(errno, error)]
        return answer(recipe, folder / name / "run", *options, fault=fault)

    status, output, _, count = faulty("undisturbed")
    assert (status, count > 250) == (0, True), output
    return faulty, folder, count


def assert_same(killed: Path, uninterrupted: Path) -> None:
    for model in ("final", "best"):
        ours, theirs = (file_contents(folder / model) for folder in (killed, uninterrupted))
        assert "model.safetensors" in theirs
        # the card states the duration
        assert ours | {"README.md": b""} == theirs | {"README.md": b""}
    events = numbers(RunFolder(killed))
    assert events == numbers(RunFolder(uninterrupted))
    steps = [event["step"] for event in events if "train/loss" in event]
    assert steps == list(range(1, len(steps) + 1))
    assert not [
        path for path in killed.rglob("*") if "partial" in path.name or path.name.endswith(".old")
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, make_recipe, train):
    """A recipe with dropout and more than one epoch, and the folder of its uninterrupted run."""
    folder = tmp_path_factory.mktemp("kills")
    recipe = make_recipe(
        folder / "recipe_to_kill.yaml",
        model__n_embd=32,
        model__dropout=0.1,
        train__max_steps=40,
        train__tokens_per_step=512,
        train__micro_batch_size=16,
        eval__every=6,
        eval__tokens=1024,
        checkpoint__every=4,
        train__stages=STAGES,
    )
    assert train(recipe, folder / "uninterrupted") == 0
    return recipe, folder / "uninterrupted"


@pytest.mark.parametrize(
    "place", ["training", *(pytest.param(place, marks=pytest.mark.slow) for place in OTHER_PLACES)]
)
def test_resume_after_kill_at_a_place_is_exact(train, uninterrupted, tmp_path, place):
    recipe, expected = uninterrupted
    assert train(recipe, tmp_path / "killed", place) == 1
    assert_same(tmp_path / "killed", expected)


def test_resume_after_random_kills_is_exact(train, uninterrupted, tmp_path):
    recipe, expected = uninterrupted
    assert train(recipe, tmp_path / "killed", "anywhere") >= 3
    assert_same(tmp_path / "killed", expected)


@pytest.mark.slow
def test_resume_after_kill_at_file_changes_is_exact(train, tmp_path, make_recipe):
    """Every 29th change of a run; test_every_operation.py tests each change of a save and of a
    replacement.
    """
    recipe = make_recipe(
        tmp_path / "recipe.yaml", model__dropout=0.1, train__max_steps=6, train__micro_batch_size=8
    )
    assert train(recipe, tmp_path / "uninterrupted") == 0
    for change in itertools.count(3, 29):
        killed = train(recipe, tmp_path / "killed", change)
        assert_same(tmp_path / "killed", tmp_path / "uninterrupted")
        if not killed:
            break
        shutil.rmtree(tmp_path / "killed")
    assert change > 4 * 29


@pytest.mark.slow
def test_resume_after_a_failed_operation_is_exact(faulty):
    """16 of the operations of preparing the data and training. All take ten minutes."""
    (train, folder, count), share = faulty, 17
    for number, point in enumerate(range(count // share, count, count // share)):
        shutil.rmtree(folder / "failed", ignore_errors=True)
        error = operations.ERRORS[number % 4]
        status, output, operation, _ = train("failed", point, error)
        operations.check_fault(error, status, output)
        assert operation
        if status:
            status, output, *_ = train("failed")
        assert status == 0, (point, error, operation, output)
        assert_undisturbed(folder / "failed", folder / "undisturbed")
