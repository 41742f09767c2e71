"""SIGKILL at any moment: the resumed run ends bit for bit where the one that nobody touched does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
PLACES = [
    "training",
    "evaluating",
    "writing a checkpoint",
    "flushing a checkpoint",
    "dropping an old checkpoint",
    "writing best",
    "replacing best",
]


def run(where: str, recipe: Path, folder: Path) -> int:
    """Train to the end through the kills; return how many there were."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed.py"), where, "0", "pretrain", recipe, "--run-dir", folder],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return int(done.stdout.rsplit("kills: ", 1)[1])


def files(folder: Path) -> dict[str, bytes]:
    found = {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "README.md"}  # which tells the time spent
    assert "model.safetensors" in found
    return found


def events(folder: Path) -> list[dict]:
    measured = ("seconds", "train/tokens_per_second", "train/data_wait", "train/memory_peak_bytes")
    return [{k: v for k, v in event.items() if k not in measured} for event in read_metrics(RunFolder(folder))]


def assert_same(killed: Path, whole: Path) -> None:
    assert files(killed / "final") == files(whole / "final")
    assert files(killed / "best") == files(whole / "best")
    assert events(killed) == events(whole)
    steps = [event["step"] for event in events(killed) if "train/loss" in event]
    assert steps == sorted(set(steps))
    assert json.loads(json.dumps(steps)) == list(range(1, len(steps) + 1))
    assert not [path for path in killed.rglob("*") if "partial" in path.name or path.name.endswith(".old")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, make_recipe):
    """A recipe with dropout, whose epoch ends on the way, and the run that nobody touched."""
    folder = tmp_path_factory.mktemp("kills")
    recipe = make_recipe(
        folder / "recipe_to_kill.yaml",
        model__n_embd=32,
        model__dropout=0.1,
        train__max_steps=60,
        train__tokens_per_step=512,
        train__micro_batch_size=16,
        eval__every=6,
        eval__tokens=1024,
        checkpoint__every=4,
    )
    assert run("nowhere", recipe, folder / "whole") == 0
    return recipe, folder / "whole"


@pytest.mark.parametrize("where", PLACES)
def test_killed_in_a_place_it_goes_on_bit_for_bit(whole, tmp_path, where):
    recipe, expected = whole
    assert run(where, recipe, tmp_path / "killed") == 1
    assert_same(tmp_path / "killed", expected)


def test_killed_at_random_moments_it_goes_on_bit_for_bit(whole, tmp_path):
    recipe, expected = whole
    assert run("anywhere", recipe, tmp_path / "killed") >= 3
    assert_same(tmp_path / "killed", expected)


def test_killed_at_changes_to_its_files_it_goes_on_bit_for_bit(tmp_path, make_recipe):
    """Every 17th change of a whole run; test_every_operation.py has every one of a save and of a replacement."""
    recipe = make_recipe(tmp_path / "recipe.yaml", model__dropout=0.1, train__max_steps=6, train__micro_batch_size=8)
    assert run("nowhere", recipe, tmp_path / "whole") == 0
    runs = tmp_path / "runs"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed_at_changes.py"), "3", "17", runs, "pretrain", recipe],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    killed = [folder for folder in runs.iterdir() if folder.is_dir()]
    assert len(killed) > 8
    for folder in killed:
        assert_same(folder, tmp_path / "whole")
