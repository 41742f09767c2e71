"""SIGKILL anywhere in a run: the resumed run equals an uninterrupted one bit for bit."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from assertions import file_contents, numbers, series
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.recipe import read_recipe
from policy_runs import (
    MIXED,
    policy_words,
    save_student_and_teacher,
    save_tool_caller,
    taught_words,
    tool_words,
)

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
# one begins at an evaluation, the other with a checkpoint
STAGES = [
    {"at": 6, "data.block_size": 8},
    {"at": 24, "train.micro_batch_size": 8, "optim.betas": {"positions": [0.5, 0.9]}},
]
BETAS = {"tokens": [0.7, 0.99]}
PLACES = [
    "training",
    "writing a checkpoint",
    "replacing best",
    "evaluating",
    "flushing a checkpoint",
    "dropping an old checkpoint",
    "writing best",
]


@pytest.fixture(scope="module")
def run_killed():
    """A function that trains by a command line to the end despite kills, and returns their
    number.
    """
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("killed.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:

        def run_killed(words: Sequence[str], kill: str | int | None = None) -> int:
            process.stdin.write(json.dumps({"arguments": words, "kill": kill}) + "\n")
            process.stdin.flush()
            kills, status = json.loads(process.stdout.readline())
            assert status == 0
            return kills

        yield run_killed
        process.stdin.close()


@pytest.fixture(scope="module")
def train(run_killed):
    """`run_killed` for a recipe and a folder."""

    def train(
        recipe: Path, folder: Path, kill: str | int | None = None, options: tuple[str, ...] = ()
    ) -> int:
        return run_killed(["pretrain", str(recipe), "--run-dir", str(folder), *options], kill)

    return train


def assert_same(killed: Path, uninterrupted: Path) -> None:
    """Models, optimizer state, metrics and recipe are equal, and nothing half-written is left."""
    for model in ("final", "best"):
        ours, theirs = (file_contents(folder / model) for folder in (killed, uninterrupted))
        assert "model.safetensors" in theirs
        # the card states the duration
        assert ours | {"README.md": b""} == theirs | {"README.md": b""}
    runs = RunFolder(killed), RunFolder(uninterrupted)
    states = [
        {path.name: path.read_bytes() for path in run.newest_checkpoint().glob("*.safetensors")}
        for run in runs
    ]
    assert states[0] == states[1]
    assert len(states[0]) >= 2
    assert runs[0].recipe.read_text() == runs[1].recipe.read_text()
    events = numbers(runs[0])
    assert events == numbers(runs[1])
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
        optim__betas=BETAS,
        train__stages=STAGES,
    )
    assert train(recipe, folder / "uninterrupted") == 0
    return recipe, folder / "uninterrupted"


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_resume_after_kill_at_a_place_is_exact(train, uninterrupted, tmp_path, place):
    recipe, expected = uninterrupted
    assert train(recipe, tmp_path / "killed", place) == 1
    assert_same(tmp_path / "killed", expected)


def test_resume_after_random_kills_is_exact(train, uninterrupted, tmp_path):
    recipe, expected = uninterrupted
    assert train(recipe, tmp_path / "killed", "anywhere") >= 3
    assert_same(tmp_path / "killed", expected)


# 95% of 10 s: 6 steps of 0.5 s, and evaluations of 2 s at the steps 0, 3 and 6; an epoch has 1,058
# sequences.
STEPS_FROM = {"budget": ("--train.budget", "10s"), "epochs": ("--train.epochs", "0.04")}


@pytest.fixture(scope="module")
def counted(tmp_path_factory, make_recipe, train):
    """A recipe, and the folders of its uninterrupted runs by the knob from which each has its
    steps.
    """
    folder = tmp_path_factory.mktemp("counted")
    options = {"model__dropout": 0.1, "train__micro_batch_size": 8, "optim__betas": BETAS}
    recipe = make_recipe(folder / "recipe.yaml", **options, optim__warmup_steps=0.34)
    for name, words in STEPS_FROM.items():
        assert train(recipe, folder / name, options=words) == 0
        assert read_recipe(RunFolder(folder / name)).train.max_steps == 6
    return recipe, folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("epochs", "counting the steps of epochs"),
        ("epochs", "the dry-run step"),
        ("budget", "timing steps"),
        ("budget", "timing an evaluation"),
        ("budget", "writing a checkpoint"),
    ],
)
def test_run_whose_steps_are_found_is_exact_after_a_kill(train, counted, tmp_path, name, place):
    recipe, folder = counted
    assert train(recipe, tmp_path / "killed", place, STEPS_FROM[name]) == 1
    assert_same(tmp_path / "killed", folder / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS_FROM)
def test_resume_after_kill_at_file_changes_is_exact(train, counted, tmp_path, name):
    """Every 29th change of a run; test_every_operation.py tests each change of a save and of a
    replacement.
    """
    recipe, folder = counted
    for change in itertools.count(3, 29):
        killed = train(recipe, tmp_path / "killed", change, STEPS_FROM[name])
        assert_same(tmp_path / "killed", folder / name)
        if not killed:
            break
        shutil.rmtree(tmp_path / "killed")
    assert change > 4 * 29


def save_pairs(folder: Path, save_chat_model: Callable) -> None:
    save_chat_model(folder / "start", dropout=0.1)
    rows = [{"prompt": "a", "chosen": "1" * (1 + n % 3), "rejected": "2"} for n in range(40)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def pair_words(folder: Path) -> Callable[..., list[str]]:
    start = ["--from", str(folder / "start"), "--data", str(folder / "pairs.jsonl")]
    knobs = {"data.block_size": 64, "train.tokens_per_step": 256, "train.micro_batch_size": 2}
    knobs |= {"train.max_steps": 6, "eval.every": 3, "eval.tokens": 64, "checkpoint.every": 2}
    return policy_words(folder, [*start, "--loss", "dpo"], knobs)


# Command, what its runs start from, their words, other knobs, and a metric that is not 0.
FROM_A_MODEL = {
    "distillation": ("rl", save_student_and_teacher, taught_words, MIXED, "train/divergence"),
    "a tool": ("rl", save_tool_caller, tool_words, {"rl__kl": 0.1}, "train/tool_calls"),
    "preferences": ("align", save_pairs, pair_words, {"tracking__every": 1}, "train/loss"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FROM_A_MODEL)
def test_run_from_a_model_is_exact_after_kills_at_file_changes(
    run_killed, tmp_path, name, save_chat_model
):
    command, save, words_of, knobs, metric = FROM_A_MODEL[name]
    save(tmp_path, save_chat_model)
    words = words_of(tmp_path)
    assert run_killed([command, *words("uninterrupted", **knobs)]) == 0
    assert min(series(RunFolder(tmp_path / "uninterrupted"), metric)) > 0
    for change in itertools.count(5, 59):
        killed = run_killed([command, *words("killed", **knobs)], change)
        assert_same(tmp_path / "killed", tmp_path / "uninterrupted")
        if not killed:
            break
        shutil.rmtree(tmp_path / "killed")
    assert change > 3 * 59, change
