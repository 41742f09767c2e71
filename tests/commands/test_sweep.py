"""The `sweep` command: runs that it starts, skips and resumes, its table, interruption, several processes."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import sweep

ROOT = Path(__file__).parents[2]
RATES = ["--optim.learning_rate", "1e-2,2e-2"]


@pytest.fixture
def in_process(monkeypatch, forget_accelerate):
    """Train runs in this process; return the run folders' names, in order."""
    started = []

    def run(self, command, environment):
        arguments = command[command.index("pretrain") :]
        started.append(Path(arguments[arguments.index("--run-dir") + 1]).name)
        forget_accelerate()
        return main(arguments)

    monkeypatch.setattr(sweep._CurrentRun, "run", run)
    return started


def read_table(folder):
    with (folder / "sweep.csv").open(newline="") as file:
        return {row["run"]: row for row in csv.DictReader(file)}


def test_sweep_over_a_mixture(in_process, make_recipe, text_file, byte_tokenizer, tmp_path):
    source = [{"source": str(text_file), "weight": weight, "name": f"part{weight}"} for weight in (3, 1)]
    values = {"data__source": source, "data__tokenizer": str(byte_tokenizer), "train__max_steps": 2}
    recipe = make_recipe(tmp_path / "mixture.yaml", **values, eval__every=2)
    folder = tmp_path / "sweep"
    assert main(["sweep", str(recipe), "--sweep-dir", str(folder), "--train.seed", "1,2"]) == 0
    assert in_process == ["seed=1", "seed=2"]
    assert {row["status"] for row in read_table(folder).values()} == {"done"}


def test_sweep_trains_runs_and_skips_finished_ones(write_recipe, tmp_path, in_process, capsys):
    recipe, folder = str(write_recipe(train__max_steps=2)), tmp_path / "sweep"
    arguments = ["sweep", recipe, *RATES, "--train.seed", "1", "--sweep-dir", str(folder)]
    assert main(arguments) == 0
    assert in_process == ["learning_rate=0.01", "learning_rate=0.02"]
    assert f"plot: {folder / 'sweep.png'}" in capsys.readouterr().out
    rows = read_table(folder)
    assert [row["status"] for row in rows.values()] == ["done", "done"]
    assert [float(row["optim.learning_rate"]) for row in rows.values()] == [0.01, 0.02]
    assert {row["steps"] for row in rows.values()} == {"2"}
    assert len({row["val_loss"] for row in rows.values()}) == 2
    # each run equals that of pretrain
    single = tmp_path / "single"
    pretrain = ["pretrain", recipe, "--optim.learning_rate", "2e-2", "--train.seed", "1", "--run-dir", str(single)]
    assert main(pretrain) == 0
    weights = [(run / "final" / "model.safetensors").read_bytes() for run in (single, folder / "learning_rate=0.02")]
    assert weights[0] == weights[1]
    # again: nothing to do; with another value: only its run
    assert main(arguments) == 0
    assert len(in_process) == 2
    assert main([*arguments, "--optim.learning_rate", "1e-2,2e-2,3e-2"]) == 0
    assert in_process[2:] == ["learning_rate=0.03"]
    assert main([*arguments, "--overwrite"]) == 0
    assert in_process[3:] == ["learning_rate=0.01", "learning_rate=0.02"]


def test_failed_run_does_not_stop_the_sweep(write_recipe, tmp_path, in_process, capsys):
    recipe, folder = str(write_recipe(train__max_steps=3)), tmp_path / "sweep"
    blocked = folder / "learning_rate=0.01"
    blocked.mkdir(parents=True)
    (blocked / "notes.txt").write_text("not a run")
    assert main(["sweep", recipe, *RATES, "--sweep-dir", str(folder)]) == 1
    assert "is not empty and holds no run" in capsys.readouterr().err
    assert [row["status"] for row in read_table(folder).values()] == ["failed (2)", "done"]
    (blocked / "notes.txt").unlink()  # the failed run is started again
    assert main(["sweep", recipe, *RATES, "--sweep-dir", str(folder)]) == 0
    assert in_process == ["learning_rate=0.01", "learning_rate=0.02", "learning_rate=0.01"]


def test_sweep_folder_of_another_recipe_is_refused(write_recipe, tmp_path, in_process, capsys):
    recipe, folder = str(write_recipe(train__max_steps=2)), tmp_path / "sweep"
    arguments = ["sweep", recipe, *RATES, "--sweep-dir", str(folder)]
    assert main(arguments) == 0
    for knob, change in (("--train.max_steps", "train.max_steps: 2 -> 3"), ("--train.seed", "train.seed: 1337 -> 3")):
        assert main([*arguments, knob, "3"]) == 2
        message = capsys.readouterr().err
        assert change in message
        assert message.count("\n") == 1
        assert "--overwrite" in message
    assert len(in_process) == 2


@pytest.mark.parametrize("locked", [".", "learning_rate=0.02"])
def test_folder_in_which_another_process_trains_is_refused(write_recipe, tmp_path, in_process, capsys, locked):
    folder = RunFolder(tmp_path / "sweep" / locked)
    folder.lock()
    arguments = ["sweep", str(write_recipe()), *RATES, "--sweep-dir", str(tmp_path / "sweep")]
    for more in ([], ["--overwrite"]):
        assert main([*arguments, *more]) == 2
        assert f"{folder.path}: another process is training in it" in capsys.readouterr().err
    assert in_process == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's prctl")
def test_run_of_a_killed_sweep_gets_sigterm(tmp_path):
    if not (child := os.fork()):
        script = f"echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; sleep 60"
        sweep._CurrentRun().run(["sh", "-c", script], dict(os.environ))
        os._exit(0)
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    run = Path("/proc") / (tmp_path / "pid").read_text().strip()
    while run.exists() and ") Z " not in (run / "stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_signal_between_two_runs_starts_no_other(tmp_path):
    current = sweep._CurrentRun()
    current.stop(signal.SIGTERM, None)
    assert current.run(["touch", str(tmp_path / "started")], {}) == 75
    assert not (tmp_path / "started").exists()


def test_sweep_dry_run_lists_runs_with_sizes(write_recipe, tmp_path, monkeypatch, in_process, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", str(write_recipe()), "--depth", "1,2", "--model.aspect_ratio", "8", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"2 runs below {Path('runs') / 'tiny-depth'}"
    first, second = (line.split() for line in lines if line.startswith("depth="))
    assert [first[0], second[0]] == ["depth=1", "depth=2"]
    assert all(
        int(a.replace(",", "")) < int(b.replace(",", "")) for a, b in zip(first[1:4:2], second[1:4:2], strict=True)
    )
    assert lines[-1] == "nothing was started"
    assert in_process == []
    assert not (tmp_path / "runs").exists()


def start(arguments, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, str(ROOT / "cli.py"), *arguments], env=environment, **pipes, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [[], ["launch", "--config_file", str(ROOT / "accelerate_configs" / "cpu_ddp.yaml")]]
)
def test_interrupted_sweep_saves_and_continues(write_recipe, tmp_path, launcher):
    recipe, folder = str(write_recipe(train__max_steps=60, checkpoint__every=1000)), tmp_path / "sweep"
    arguments = [*launcher, "sweep", recipe, *RATES, "--sweep-dir", str(folder)]
    first, second = (RunFolder(folder / f"learning_rate={rate}") for rate in (0.01, 0.02))
    process = start([*arguments, "--train.max_steps", "100000"], start_new_session=True)
    deadline = time.monotonic() + 200
    while not (first.metrics.is_file() and '"step": 20,' in first.metrics.read_text()):
        assert time.monotonic() < deadline, process.kill()
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C on a terminal does
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 75, output
    assert "saved" in output
    assert "interrupted" in output
    assert first.newest_checkpoint() is not None
    assert not second.path.exists()
    steps = int(first.newest_checkpoint().name.removeprefix("step_"))
    # both runs to their ends: the first from its checkpoint
    for run in (first,):
        run.recipe.write_text(run.recipe.read_text().replace("max_steps: 100000", f"max_steps: {steps + 4}"))
    process = start([*arguments, "--train.max_steps", str(steps + 4)])
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    rows = json.loads((folder / "sweep.json").read_text())["runs"]
    assert [(row["status"], row["steps"]) for row in rows] == [("done", steps + 4)] * 2
    events = [json.loads(line) for line in first.metrics.read_text().splitlines()]
    trained = [event["step"] for event in events if "train/loss" in event]
    assert trained == list(range(1, steps + 5))  # resumed, not started again
    if launcher:
        assert json.loads(first.machine.read_text())["starts"][-1]["processes"] == 2
