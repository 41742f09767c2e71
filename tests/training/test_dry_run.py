"""`--resume --dry-run` says what a resume would do, refuses what it refuses, and writes nothing."""

import json
import shutil

import pytest

from assertions import file_contents

pytestmark = pytest.mark.long


def damage(run) -> None:
    (run.checkpoint_folders()[-1] / "model.safetensors").write_bytes(b"")


def damage_all(run) -> None:
    for folder in run.checkpoint_folders():
        (folder / "state.json").unlink()


def lose(run) -> None:
    for folder in run.checkpoint_folders():
        shutil.rmtree(folder)


def other_text(run) -> None:
    path = run.checkpoint_folders()[-1] / "state.json"
    facts = json.loads(path.read_text())
    facts["identity"]["data"]["train sha256"] = 64 * "0"
    path.write_text(json.dumps(facts))
    from nanogpt_hf.own_files import file_sha256

    sums = path.with_name("checksums.json")
    sums.write_text(json.dumps(json.loads(sums.read_text()) | {path.name: file_sha256(path)}))


CASES = {
    "the same": (None, "--resume", {}, 0, "resumes from {}/checkpoints/step_00000004"),
    "auto": (None, "--auto-resume", {}, 0, "resumes from {}/checkpoints/step_00000004"),
    "longer": (None, "--resume", {"train__max_steps": 9}, 0, "train.max_steps: 4 -> 9"),
    "shorter": (None, "--resume", {"train__max_steps": 3}, 2, "is past train.max_steps 3"),
    "another model": (None, "--resume", {"model__n_layer": 1}, 2, "model.n_layer: 2 -> 1"),
    "another seed": (None, "--resume", {"train__seed": 5}, 2, "train.seed: "),
    # Not that the prepared data is another one: a run may not choose another folder for it.
    "another split": (None, "--resume", {"data__validation_fraction": 0.3}, 2, "0.1 -> 0.3"),
    # Without a line about the epochs.
    "another model, by epochs": (
        None,
        "--resume",
        {"model__n_layer": 1, "train__epochs": 2, "train__max_steps": 600_000},
        2,
        "model.n_layer: 2 -> 1",
    ),
    "another split, by epochs": (
        None,
        "--resume",
        {"data__validation_fraction": 0.3, "train__epochs": 2, "train__max_steps": 600_000},
        2,
        "0.1 -> 0.3",
    ),
    "damaged": (damage, "--resume", {}, 0, "resumes from {}/checkpoints/step_00000002"),
    "all damaged": (damage_all, "--resume", {}, 2, "all checkpoints are damaged"),
    "none": (lose, "--resume", {}, 2, "has no checkpoint"),
    "another text": (other_text, "--resume", {}, 2, "data train sha256: 00000000 -> "),
}


@pytest.fixture
def knobs() -> dict:
    return {"train__max_steps": 4, "checkpoint__every": 2, "eval__every": 2}


@pytest.mark.parametrize("case", CASES)
def test_dry_run_of_a_resume_checks_what_it_checks(case, pretrain):
    change, flag, other, status, text = CASES[case]
    run = pretrain().run
    if change:
        change(run)
    before = file_contents(run.path)
    ended = pretrain(flag, "--dry-run", **other)
    assert ended.status == status, ended.err
    assert text.format(run.path) in (ended.line if status else ended.out + ended.err)
    assert status or ended.out.endswith("nothing was started\n")
    assert "train.epochs" not in ended.out
    assert file_contents(run.path) == before


def test_dry_run_where_no_run_is(pretrain):
    ended = pretrain("--auto-resume", "--dry-run")
    assert (ended.status, f"{ended.run.path}: starts at step 0" in ended.out) == (0, True)
    assert not ended.run.path.exists()
    ended = pretrain("--resume", "--dry-run")
    assert (ended.status, "no checkpoint to resume from" in ended.line) == (2, True)
    assert not ended.run.path.exists()
