"""A signal to the real launcher; 8-bit optimizer state on two processes."""

import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arguments import argv
from assertions import CHUNKS, EXPERIMENT, column, copy_at, held_by_ranks, tensor_files
from nanogpt_hf.runs.folder import RunFolder

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
OPTIONS = EXPERIMENT | {
    "model__dropout": 0.1,
    "train__micro_batch_size": 2,  # 128 tokens = 2 × 16 × processes × accumulation of 4 or 2
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, make_recipe) -> Path:
    return make_recipe(tmp_path_factory.mktemp("runs") / "recipe_for_all.yaml", **OPTIONS)


@pytest.fixture(scope="module")
def launch_in_chunks(launch_warm):
    return functools.partial(launch_warm, **CHUNKS)


@pytest.mark.exhaustive
@needs_torchao
def test_8bit_optimizer_state_resumes_exactly_and_moves(recipe, launch_in_chunks, tmp_path):
    options = argv(
        "--optim.state 8bit --optim.learning_rate 1e-3 --train.max_steps 4 --model.n_embd 128 "
        "--model.n_positions 128 --model.pad_vocab_to_multiple_of 128 --eval.every 2 "
        "--eval.samples [] --checkpoint.every 2"
    )

    def train(machine: str, name: str, *arguments: str) -> RunFolder:
        return launch_in_chunks(
            machine, "pretrain", "--run-dir", tmp_path / name, recipe, *options, *arguments
        )

    uninterrupted = train("fsdp2", "uninterrupted")
    for name in ("resumed", "moved"):
        copy_at(uninterrupted, 2, tmp_path / name)
    resumed, moved = train("fsdp2", "resumed", "--resume"), train("cpu_ddp", "moved", "--resume")
    assert tensor_files(resumed, 4) == tensor_files(uninterrupted, 4)
    assert column(resumed, "train/grad_norm") == column(uninterrupted, "train/grad_norm")
    assert column(moved, "val/loss") == pytest.approx(column(uninterrupted, "val/loss"), abs=1e-3)
    for sharded, copied in zip(held_by_ranks(uninterrupted), held_by_ranks(moved), strict=True):
        assert 0.48 < sharded["optimizer_state"] / copied["optimizer_state"] < 0.52
        # one byte each and the blocks' scales; LayerNorms stay float32
        for run in (sharded, copied):
            assert 1 < run["optimizer_state_bytes"] / run["optimizer_state"] < 1.03


@pytest.mark.slow
@pytest.mark.parametrize("stages", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_sigterm_to_the_launcher_saves_and_resumes(
    recipe, launch_command, launch_in_chunks, tmp_path, stages
):
    folder = tmp_path / "stopped"
    arguments = ["pretrain", recipe, "--run-dir", folder, "--train.max_steps", "100000"]
    command = launch_command("cpu_ddp", *arguments)
    if stages:
        own = [sys.executable, ROOT / "cli.py", "launch", "--config_file"]
        own += [ROOT / "accelerate_configs" / "pp.yaml", "--mixed_precision=no"]
        own += ["--parallelism_config_pp_schedule=zero_bubble", "--num_cpu_threads_per_process=1"]
        command = [str(word) for word in [*own, *arguments]]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | CHUNKS,
    )
    run = RunFolder(folder)
    deadline = time.monotonic() + 120
    while not (run.metrics.exists() and '"step": 7' in run.metrics.read_text()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75 or not stages
    assert ("2-way pipeline-parallel (zero_bubble)" in out) == stages
    assert "saved (received SIGTERM); continue with --resume" in out
    saved = run.newest_checkpoint()
    state = json.loads((saved / "state.json").read_text())
    assert state["step"] >= 7
    more = ["--resume", "--train.max_steps", str(state["step"] + 3)]
    launch_in_chunks("cpu" if stages else "cpu_ddp", "pretrain", "--run-dir", folder, recipe, *more)
    assert list(column(run, "train/loss")) == list(range(1, state["step"] + 4))
