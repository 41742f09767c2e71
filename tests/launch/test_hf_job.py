"""launch/hf_job.py against a Hub on this machine: a run of two jobs, a job that may not start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long


def job(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the script as a job: a process that reads the Hub's address from its environment."""
    return subprocess.run(
        [sys.executable, ROOT / "launch" / "hf_job.py", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_second_job_continues_the_run_of_the_first(hub, write_recipe, tmp_path):
    # a learning rate that does not depend on the number of steps, which time decides here
    recipe = write_recipe(checkpoint__every=2, checkpoint__keep=2, optim__schedule="constant")
    first = RunFolder(tmp_path / "first")
    second = RunFolder(tmp_path / "second")
    arguments = ["tester/tiny", recipe, "--run-dir"]
    # a job whose time is up at once: it saves after its first step
    knobs = ["--train.max_time", "1s", "--train.max_steps", 10**6]
    completed = job(*arguments, first.path, *knobs)
    assert completed.returncode == 75, completed.stderr
    saved = first.newest_checkpoint()
    (commit,) = hub.repositories["tester/tiny"].branches["run"]
    names = {Path(name).parts[1] for name in commit["files"] if name.startswith("checkpoints/")}
    assert names == {saved.name}
    assert hub.repositories["tester/tiny"].private
    steps = int(saved.name.removeprefix("step_")) + 3
    completed = job(*arguments, second.path, "--train.max_steps", steps)
    assert completed.returncode == 0, completed.stderr
    assert f"continuing from {second.checkpoint(steps - 3)}" in completed.stdout
    whole = RunFolder(tmp_path / "whole")
    knobs = ["--run-dir", str(whole.path), "--train.max_steps", str(steps)]
    assert main(["pretrain", str(recipe), *knobs]) == 0
    losses, expected = (
        {line["step"]: line["train/loss"] for line in read_metrics(run) if "train/loss" in line}
        for run in (second, whole)
    )
    assert losses == expected
    final = (run.final / "model.safetensors" for run in (second, whole))
    assert len({path.read_bytes() for path in final}) == 1
    main_branch = hub.repositories["tester/tiny"].files()
    assert "model.safetensors" in main_branch
    assert not any(name.startswith("checkpoints/") for name in main_branch)


@pytest.mark.slow
def test_job_without_permission_starts_nothing(hub, write_recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    completed = job("tester/tiny", write_recipe(), "--run-dir", tmp_path / "run")
    assert completed.returncode == 2
    assert "Invalid user token" in completed.stderr
    # no warning of a library
    assert completed.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert hub.repositories == {}


@pytest.mark.slow
def test_job_keeps_nothing_in_a_public_repository(hub, write_recipe, tmp_path):
    public = hub.add("tester/public")
    completed = job("tester/public", write_recipe(), "--run-dir", tmp_path / "run")
    assert completed.returncode == 2
    assert "tester/public: it is public" in completed.stderr
    assert public.branches.keys() == {"main"}
    assert not (tmp_path / "run").exists()


def test_mistake_makes_no_repository(hub, write_recipe, tmp_path):
    completed = job("tester/tiny", write_recipe(), "--train.max_step", "3")
    assert completed.returncode == 2
    problem, end = completed.stderr.splitlines()
    assert "did you mean" in problem
    assert end == "1 problem; nothing was started."
    assert hub.repositories == {}
