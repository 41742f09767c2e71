"""Several processes, sharded or not, equal one process; runs resume exactly and move between machines."""

import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from assertions import CHUNKS, EXPERIMENT, assert_same_experiment, column, copy_at
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or shutil.which("g++") is None,
    reason="DeepSpeed or g++ (to compile its CPU operations) is not installed",
)
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None or shutil.which("g++") is None,
    reason="torchao or g++ (to compile its CPU step) is not installed",
)
ZERO_2, ZERO_3 = (pytest.param(f"deepspeed_zero{stage}", marks=needs_deepspeed) for stage in (2, 3))
# one config of each kind is trained by the real launcher, the others by forks of a process that has imported torch
REAL_LAUNCHERS = ("cpu_ddp", "fsdp2", "deepspeed_zero2")
OPTIONS = EXPERIMENT | {
    "model__dropout": 0.1,
    "train__micro_batch_size": 2,  # 128 tokens = 2 × 16 × processes × accumulation of 4 or 2
}


def tensor_files(run: Path, step: int) -> dict[str, bytes]:
    """The content of the files with tensors of the checkpoint of `step` and of the final model."""
    paths = [*(run / "final").glob("*.safetensors"), *(run / "checkpoints" / f"step_{step:08d}").glob("*.safetensors")]
    assert len(paths) >= 3
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, make_recipe) -> Path:
    return make_recipe(tmp_path_factory.mktemp("runs") / "recipe_for_all.yaml", **OPTIONS)


@pytest.fixture(scope="module")
def launch_in_chunks(launch_warm):
    return functools.partial(launch_warm, **CHUNKS)


@pytest.fixture(scope="module")
def trained_on(recipe, launch_command, launch_in_chunks):
    """The run of the recipe with an accelerate config; trained once per config."""

    @functools.cache
    def train(machine: str) -> RunFolder:
        arguments = ["pretrain", recipe, "--run-dir", recipe.parent / machine]
        if machine not in REAL_LAUNCHERS:
            return launch_in_chunks(machine, *arguments)
        command, environment = launch_command(machine, *arguments), os.environ | {"PYTHONPATH": str(ROOT)} | CHUNKS
        completed = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert completed.returncode == 0, completed.stdout[-2000:] + completed.stderr[-3000:]
        return RunFolder(recipe.parent / machine)

    return train


@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2", "fsdp2_checkpointing", "hsdp", ZERO_2, ZERO_3])
def test_several_processes_equal_one(trained_on, machine):
    # with dropout: recomputed activations must use the same masks
    assert_same_experiment(trained_on(machine), trained_on("cpu"))


@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2", "fsdp2_checkpointing", "hsdp"])
def test_layer_stats_of_several_processes_equal_one(trained_on, machine):
    several, one = read_metrics(trained_on(machine)), read_metrics(trained_on("cpu"))
    assert sum("layers/0/grad_norm" in event for event in one) == 10
    assert sum("layers/1/attention_logit_max" in event for event in one) == 3
    for ours, theirs in zip(several, one, strict=True):
        assert ours.keys() == theirs.keys()
        layers = {name: value for name, value in theirs.items() if name.startswith("layers/")}
        assert {name: ours[name] for name in layers} == pytest.approx(layers, rel=1e-3, abs=1e-5)


def held_by_rank(run: RunFolder, rank: int) -> dict:
    """What a process held at its last checkpoint: see launched.py."""
    return json.loads(Path(f"{run.path}.held.{rank}.json").read_text())


@pytest.mark.parametrize(
    ("machine", "kind"), [("fsdp2", "DTensor"), pytest.param("deepspeed_zero3", "Parameter", marks=needs_deepspeed)]
)
def test_weights_are_sharded(trained_on, machine, kind):
    for rank in (0, 1):
        sharded, whole = (held_by_rank(trained_on(name), rank)["weights"] for name in (machine, "cpu_ddp"))
        assert len(sharded) == len(whole) > 10
        assert {name for name, _, _ in sharded.values()} == {kind}
        assert sum(local for _, local, _ in sharded.values()) <= 0.52 * sum(n for _, _, n in sharded.values())
        assert all(local == n for _, local, n in whole.values())


@pytest.mark.parametrize("machine", ["fsdp2", ZERO_2, ZERO_3])
def test_optimizer_state_is_sharded(trained_on, machine):
    for rank in (0, 1):
        sharded, whole = (held_by_rank(trained_on(name), rank) for name in (machine, "cpu_ddp"))
        assert whole["optimizer_state"] == 2 * sum(n for _, _, n in whole["weights"].values())
        assert 0.48 <= sharded["optimizer_state"] / whole["optimizer_state"] <= 0.52


@pytest.mark.parametrize("machine", ["fsdp2", ZERO_2, ZERO_3])
def test_checkpoint_is_copied_in_shares(trained_on, machine):
    whole, *copied = (
        held_by_rank(trained_on(name), rank)["copied"] for name, rank in (("cpu_ddp", 0), (machine, 0), (machine, 1))
    )
    assert sum(copied) == whole
    assert max(copied) < 0.6 * whole


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cpu_ddp", "cpu"),
        ("cpu", "cpu_ddp"),
        ("cpu_ddp", "fsdp2"),
        ("fsdp2", "cpu"),
        pytest.param("fsdp2", "deepspeed_zero2", marks=needs_deepspeed),
        pytest.param("deepspeed_zero2", "deepspeed_zero3", marks=needs_deepspeed),
        pytest.param("deepspeed_zero3", "cpu", marks=needs_deepspeed),
    ],
)
def test_run_moves_between_machines(recipe, trained_on, launch_in_chunks, tmp_path, before, after):
    moved = copy_at(trained_on(before), 5, tmp_path / "moved")
    launch_in_chunks(after, "pretrain", "--run-dir", moved.path, recipe, "--resume")
    assert_same_experiment(moved, trained_on("cpu"))


@needs_deepspeed
@pytest.mark.parametrize("architecture", ["qwen3", "nanochat"])
def test_decoder_under_zero_3_equals_one_process_and_moves_to_fsdp2(recipe, launch_in_chunks, tmp_path, architecture):
    knobs = [f"--model.architecture={architecture}", "--model.n_kv_head=1", "--model.dropout=0"]

    def train(machine: str, name: str, *arguments: str) -> RunFolder:
        return launch_in_chunks(machine, "pretrain", "--run-dir", tmp_path / name, recipe, *knobs, *arguments)

    one, sharded = train("cpu", "one"), train("deepspeed_zero3", "sharded")
    assert_same_experiment(sharded, one)
    shutil.rmtree(sharded.checkpoint(10))
    shutil.rmtree(sharded.final)
    assert_same_experiment(train("fsdp2", "sharded", "--resume"), one)


@pytest.mark.parametrize("machine", ["cpu_ddp", ZERO_3])
def test_three_processes_resume_exactly(recipe, launch_in_chunks, tmp_path, machine):
    # With three processes the order of a sum matters. No size here is a multiple of three, so shards are padded.
    knobs = ["--train.tokens_per_step", "192", "--model.n_embd", "20"]

    def train(name: str, *arguments: str) -> RunFolder:
        command = ["pretrain", "--run-dir", tmp_path / name, recipe, *knobs, *arguments]
        return launch_in_chunks(machine, *command, machine_options=["--num_processes=3"])

    uninterrupted = train("uninterrupted")
    resumed = copy_at(uninterrupted, 5, tmp_path / "resumed")
    train("resumed", "--resume")
    assert tensor_files(resumed.path, 10) == tensor_files(uninterrupted.path, 10)
    assert column(resumed, "train/grad_norm") == column(uninterrupted, "train/grad_norm")


@pytest.mark.slow
@needs_torchao
def test_8bit_optimizer_state_resumes_exactly_and_moves(recipe, launch_in_chunks, tmp_path):
    options = ["--optim.state=8bit", "--optim.learning_rate=1e-3", "--train.max_steps=4", "--model.n_embd=128"]
    options += [
        "--model.n_positions=128",
        "--model.pad_vocab_to_multiple_of=128",
        "--eval.every=2",
        "--eval.samples=[]",
    ]
    options += ["--checkpoint.every=2"]

    def train(machine: str, name: str, *arguments: str) -> RunFolder:
        return launch_in_chunks(machine, "pretrain", "--run-dir", tmp_path / name, recipe, *options, *arguments)

    uninterrupted = train("fsdp2", "uninterrupted")
    for name in ("resumed", "moved"):
        copy_at(uninterrupted, 2, tmp_path / name)
    resumed, moved = train("fsdp2", "resumed", "--resume"), train("cpu_ddp", "moved", "--resume")
    assert tensor_files(resumed.path, 4) == tensor_files(uninterrupted.path, 4)
    assert column(resumed, "train/grad_norm") == column(uninterrupted, "train/grad_norm")
    assert column(moved, "val/loss") == pytest.approx(column(uninterrupted, "val/loss"), abs=1e-3)
    for rank in (0, 1):
        sharded, copied = held_by_rank(uninterrupted, rank), held_by_rank(moved, rank)
        assert 0.48 * copied["optimizer_state"] <= sharded["optimizer_state"] <= 0.52 * copied["optimizer_state"]
        for run in (sharded, copied):  # one byte each and the blocks' scales; LayerNorms stay float32
            assert run["optimizer_state"] < run["optimizer_state_bytes"] < 1.03 * run["optimizer_state"]


# 20 is no multiple of 3 processes, and there are fewer stacked matrices (2) than processes
MUON = ("--optim.name=muon", "--model.init=zero_residual", "--model.n_embd=20", "--train.tokens_per_step=384")
MUON_PROCESSES = {"cpu": 1, "cpu_ddp": 2, "fsdp2": 3, "hsdp": 4}


@pytest.fixture(scope="module")
def train_muon(recipe, launch_in_chunks):
    """Train or resume a run with Muon: (machine, folder, arguments) -> the run."""

    def train(machine: str, folder: Path, *arguments: str) -> RunFolder:
        count = [] if machine == "cpu" else [f"--num_processes={MUON_PROCESSES[machine]}"]
        return launch_in_chunks(
            machine, "pretrain", "--run-dir", folder, recipe, *MUON, *arguments, machine_options=count
        )

    return train


@pytest.fixture(scope="module")
def muon_on(train_muon, recipe):
    return functools.cache(lambda machine: train_muon(machine, recipe.parent / f"muon_{machine}"))


def second_half(train_muon, source: RunFolder, machine: str, folder: Path) -> RunFolder:
    copy_at(source, 5, folder)
    return train_muon(machine, folder, "--resume")


@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2", "hsdp"])
def test_muon_on_several_processes_equals_one(muon_on, machine):
    assert_same_experiment(muon_on(machine), muon_on("cpu"))


@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2"])
def test_muon_state_is_one_sharded_buffer_per_matrix(muon_on, machine):
    ranks = [held_by_rank(muon_on(machine), rank) for rank in range(MUON_PROCESSES[machine])]
    sizes = {name: size for name, (_, _, size) in ranks[0]["weights"].items()}
    matrices = sum(size for name, size in sizes.items() if ".h." in name and "ln_" not in name)
    total = 2 * sum(sizes.values()) - matrices
    state_sizes = [rank["optimizer_state"] for rank in ranks]
    assert state_sizes == [total] * 2 if machine == "cpu_ddp" else sum(state_sizes) == total


@pytest.mark.parametrize("machine", MUON_PROCESSES)
def test_muon_resumes_exactly(muon_on, train_muon, tmp_path, machine):
    uninterrupted = muon_on(machine)
    resumed = second_half(train_muon, uninterrupted, machine, tmp_path / "resumed")
    assert tensor_files(resumed.path, 10) == tensor_files(uninterrupted.path, 10)
    assert column(resumed, "train/grad_norm") == column(uninterrupted, "train/grad_norm")


@pytest.mark.parametrize(("before", "after"), [("cpu_ddp", "fsdp2"), ("fsdp2", "cpu"), ("cpu", "cpu_ddp")])
def test_muon_run_moves_between_machines(muon_on, train_muon, tmp_path, before, after):
    assert_same_experiment(second_half(train_muon, muon_on(before), after, tmp_path / "moved"), muon_on("cpu"))


def test_sigterm_to_the_launcher_saves_and_resumes(recipe, launch_command, launch_in_chunks, tmp_path):
    folder = tmp_path / "stopped"
    arguments = [recipe, "--run-dir", folder, "--train.max_steps", "100000"]
    process = subprocess.Popen(
        launch_command("cpu_ddp", "pretrain", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | CHUNKS,
    )
    run = RunFolder(folder)
    deadline = time.monotonic() + 120
    while not (run.metrics.exists() and '"step": 7' in run.metrics.read_text()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert "saved (received SIGTERM); continue with --resume" in out
    saved = run.newest_checkpoint()
    state = json.loads((saved / "state.json").read_text())
    assert state["step"] >= 7
    more = ["--resume", "--train.max_steps", str(state["step"] + 3)]
    launch_in_chunks("cpu_ddp", "pretrain", "--run-dir", folder, recipe, *more)
    assert list(column(run, "train/loss")) == list(range(1, state["step"] + 4))
