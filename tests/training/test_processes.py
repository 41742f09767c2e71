"""The same experiment on any number of processes, sharded or not, and moved between them in the middle."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nanogpt_hf.training.run_folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics

ROOT = Path(__file__).parents[2]
ENTRY = Path(__file__).with_name("launched.py")
OPTIONS = {
    "model__dropout": 0.1,
    "train__max_steps": 10,
    "train__micro_batch_size": 2,  # 128 tokens = 2 × 16 × processes × accumulation: 4 alone, 2 in a pair
    "eval__every": 5,
    "eval__tokens": "all",
    "checkpoint__every": 5,
    "checkpoint__keep": 5,
}


def command(machine: str, *arguments: object) -> list[str]:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_cpu_threads_per_process=1"]
    config = ["--config_file", str(ROOT / "accelerate_configs" / f"{machine}.yaml")]
    if machine != "cpu":
        config += ["--num_processes=2", "--main_process_port=0"]
    if machine.startswith("fsdp"):
        config += ["--mixed_precision=no", "--dynamo_backend=no"]
    return [*launch, *config, str(ENTRY), "pretrain", *map(str, arguments)]


def launch(machine: str, recipe: Path, folder: Path, *arguments: str) -> RunFolder:
    """Train with an accelerate config that ships; two processes unless it is `cpu`."""
    done = subprocess.run(
        command(machine, recipe, "--run-dir", folder, *arguments),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return RunFolder(folder)


def column(run: RunFolder, name: str) -> dict[int, float]:
    rows = [(event["step"], event[name]) for event in read_metrics(run) if name in event]
    assert rows
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def assert_same_experiment(run: RunFolder, reference: RunFolder) -> None:
    for name, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-4), ("val/loss", 1e-5)):
        assert column(run, name) == pytest.approx(column(reference, name), abs=tolerance), name
    ours, theirs = (load_file(r.final / "model.safetensors") for r in (run, reference))
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < 1e-5


@pytest.fixture(scope="module")
def runs(tmp_path_factory, make_recipe):
    """One experiment on each kind of machine, with the recipe."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = make_recipe(folder / "recipe_for_all.yaml", **OPTIONS)
    machines = ("cpu", "cpu_ddp", "fsdp2", "fsdp2_checkpointing")
    return recipe, {machine: launch(machine, recipe, folder / machine) for machine in machines}


@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2", "fsdp2_checkpointing"])
def test_two_processes_are_the_same_experiment_as_one(runs, machine):
    # with dropout: activations that are computed again must meet the same masks
    _, kinds = runs
    assert_same_experiment(kinds[machine], kinds["cpu"])


def held(run: RunFolder, rank: int) -> dict[str, list]:
    return json.loads(Path(f"{run.path}.held.{rank}.json").read_text())


def test_fsdp2_really_sharded_and_ddp_did_not(runs):
    _, kinds = runs
    for rank in (0, 1):
        sharded, whole = held(kinds["fsdp2"], rank), held(kinds["cpu_ddp"], rank)
        assert len(sharded) == len(whole) > 10
        assert {kind for kind, _, _ in sharded.values()} == {"DTensor"}
        assert sum(local for _, local, _ in sharded.values()) <= 0.52 * sum(n for _, _, n in sharded.values())
        assert all(local == n for _, local, n in whole.values())


@pytest.mark.parametrize(
    ("before", "after"), [("cpu_ddp", "cpu"), ("cpu", "cpu_ddp"), ("cpu_ddp", "fsdp2"), ("fsdp2", "cpu")]
)
def test_a_run_moves_between_machines_in_the_middle(runs, tmp_path, before, after):
    recipe, kinds = runs
    shutil.copytree(kinds[before].path, tmp_path / "moved")
    moved = RunFolder(tmp_path / "moved")
    shutil.rmtree(moved.checkpoint(10))
    shutil.rmtree(moved.final)
    launch(after, recipe, moved.path, "--resume")
    assert_same_experiment(moved, kinds["cpu"])


def test_sigterm_to_the_launcher_saves_on_all_processes_and_the_run_goes_on(runs, tmp_path):
    recipe, _ = runs
    folder = tmp_path / "stopped"
    arguments = [recipe, "--run-dir", folder, "--train.max_steps", "100000"]
    process = subprocess.Popen(
        command("cpu_ddp", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    run = RunFolder(folder)
    deadline = time.monotonic() + 120
    while not (run.metrics.exists() and '"step": 7' in run.metrics.read_text()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert "saved (SIGTERM came); go on with --resume" in out
    saved = run.newest_checkpoint()
    state = json.loads((saved / "state.json").read_text())
    assert state["step"] >= 7
    launch("cpu_ddp", recipe, folder, "--resume", "--train.max_steps", str(state["step"] + 3))
    assert list(column(run, "train/loss")) == list(range(1, state["step"] + 4))


def test_what_the_config_asks_for_and_the_machine_cannot_give_is_one_clear_line(runs, tmp_path):
    recipe, _ = runs
    plain = [str(ROOT / "cli.py") if word == str(ENTRY) else word for word in command("fsdp2", recipe)]
    done = subprocess.run(
        [*plain, "--run-dir", str(tmp_path / "never")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
    )
    assert done.returncode != 0
    assert "the accelerate config asks for FSDP, but this machine gives" in done.stderr
    assert not (tmp_path / "never").exists()
