"""train.micro_batch_size auto: dry-run steps that find the largest size; the advice after an
out-of-memory error.
"""

import mmap
import os
import subprocess
import sys
import traceback

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from nanogpt_hf.checkpoint.writer import CheckpointWriter
from nanogpt_hf.commands import main
from nanogpt_hf.config.checks import divisors
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import Config, OptimSection, replace_knobs
from nanogpt_hf.distributed.full_state import FullState
from nanogpt_hf.errors import UserError
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.optim.optimizer import build_optimizer
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training import micro_batch, step
from nanogpt_hf.training.micro_batch import largest_micro_batch, memory_advice, next_size
from nanogpt_hf.training.start import prepare_run


@pytest.mark.parametrize(
    ("needed", "room", "size"),
    [
        ({1: 110}, 1000, 2),  # a second measurement gives the cost per sequence
        ({1: 110}, 100, None),
        ({1: 110, 2: 120}, 220, 12),  # 100 + 10 each
        ({1: 110, 2: 120}, 219, 8),
        ({1: 110, 2: 120}, 125, None),
        ({1: 110, 2: 120, 12: 180}, 220, None),  # 108 + 6 each: 24 would need 252
        ({1: 110, 2: 120, 12: 180}, 260, 24),
        ({1: 110, 2: 110}, 200, 24),  # too small to be measured
        ({24: 340}, 1000, None),
    ],
)
def test_next_size_assumes_linear_memory(needed, room, size):
    assert next_size([1, 2, 3, 4, 6, 8, 12, 24], needed, room) == size


class FakeMemory:
    """Memory of `room` bytes; a dry-run step takes 100 bytes and 10 per sequence."""

    def __init__(self, monkeypatch, room: int, max_size: int | None = None):
        self.tried, self.max_size = [], max_size
        monkeypatch.setattr(micro_batch, "available_memory", lambda accelerator: room)
        monkeypatch.setattr(micro_batch, "reset_peak_memory", lambda accelerator: None)
        monkeypatch.setattr(micro_batch, "peak_memory", lambda device: 100 + 10 * self.tried[-1])

    def dry_run(self, size: int) -> None:
        self.tried.append(size)
        if self.max_size is not None and size > self.max_size:
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("room", "max_size", "reserved", "tried"),
    [
        (5000, None, 0, [1, 2, 480]),
        (1000, None, 0, [1, 2, 80]),
        (1000, None, 500, [1, 2, 40]),
        (1000, 50, 0, [1, 2, 80, 60, 48]),  # too little memory: smaller sizes are tried
    ],
)
def test_few_dry_runs_find_largest_micro_batch(monkeypatch, room, max_size, reserved, tried):
    memory = FakeMemory(monkeypatch, room, max_size)
    found = largest_micro_batch(Accelerator(), divisors(480), memory.dry_run, reserved)
    assert (found, memory.tried) == (tried[-1], tried)


def test_out_of_memory_at_one_sequence_is_raised(monkeypatch):
    memory = FakeMemory(monkeypatch, room=1000, max_size=0)
    with pytest.raises(torch.OutOfMemoryError):
        largest_micro_batch(Accelerator(), divisors(480), memory.dry_run)


def test_other_errors_are_raised(monkeypatch):
    memory = FakeMemory(monkeypatch, room=1000)

    def dry_run(size):
        memory.dry_run(size)
        if size > 1:
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        largest_micro_batch(Accelerator(), divisors(480), dry_run)


def test_unmeasurable_memory_is_one_line(monkeypatch):
    monkeypatch.setattr(
        micro_batch.Path, "write_text", lambda *_: (_ for _ in ()).throw(PermissionError())
    )
    with pytest.raises(
        UserError, match="auto cannot measure memory on this machine's cpu; set a number"
    ):
        largest_micro_batch(Accelerator(), [1, 2, 4, 8], lambda size: None)


LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="peak memory of a CPU process is measured on Linux only"
)


@LINUX
@pytest.mark.slow
def test_peak_memory_is_that_of_this_program_only(root):
    """A launcher may have needed more before it became the program that trains."""
    measure = (
        "import psutil, torch; from types import SimpleNamespace;"
        "from nanogpt_hf.training.micro_batch import peak_memory, reset_peak_memory;"
        "device = torch.device('cpu'); reset_peak_memory(SimpleNamespace(device=device));"
        "assert peak_memory(device) < 1.1 * psutil.Process().memory_info().rss"
    )
    large = (
        "import os, sys; b'1' * 2**31; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    subprocess.run([sys.executable, "-c", large, "-c", measure], check=True, cwd=root)


@LINUX
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_peak_memory_is_measured():
    accelerator, size = Accelerator(), 64 * 2**20
    child = os.fork()  # since other threads of this process may free memory at any time
    if child == 0:
        try:
            micro_batch.reset_peak_memory(accelerator)
            before = micro_batch.peak_memory(accelerator.device)
            # new pages; an allocator may reuse those that an earlier test freed
            memory = mmap.mmap(-1, size)
            for page in range(0, size, mmap.PAGESIZE):  # torch's threads do not survive a fork
                memory[page] = 1
            # code that is loaded at its first use counts, too
            assert 0.9 * size < micro_batch.peak_memory(accelerator.device) - before < 1.5 * size
            memory.close()
            assert micro_batch.peak_memory(accelerator.device) - before > 0.9 * size
            micro_batch.reset_peak_memory(accelerator)
            assert micro_batch.peak_memory(accelerator.device) - before < 0.5 * size
            assert before < micro_batch.available_memory(accelerator)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def run(write_recipe, tmp_path):
    """A run that has taken its dry-run step, with two micro-batches per step."""
    run = prepare_run(load_config(write_recipe()), tmp_path / "run")
    yield run
    run.folder.unlock()


@pytest.mark.parametrize("fails", [False, True])
def test_dry_run_step_leaves_no_trace(run, monkeypatch, fails):
    before = {name: parameter.clone() for name, parameter in run.model.named_parameters()}
    if fails:

        def update(*arguments):
            raise torch.OutOfMemoryError("no memory for the optimizer state")

        monkeypatch.setattr(step, "update", update)
        with pytest.raises(torch.OutOfMemoryError):
            micro_batch.dry_run_step(run, 2)
    else:
        micro_batch.dry_run_step(run, 2)
    assert not run.optimizer.state
    assert (run.accelerator.gradient_accumulation_steps, run.accelerator.step) == (2, 0)
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_parameter_without_state_is_refused(run):
    del run.optimizer.param_groups[0]["params"][-1]
    with pytest.raises(UserError, match=r"^1 of \d+ parameters .*, first .* are unknown"):
        micro_batch.dry_run_step(run, 2)


def trained(folder, recipe, *arguments: str) -> RunFolder:
    assert main(["pretrain", str(recipe), "--run-dir", str(folder), *arguments]) == 0
    return RunFolder(folder)


@pytest.mark.long
def test_auto_equals_the_size_found_and_resume_keeps_it(
    tmp_path, write_recipe, monkeypatch, forget_accelerate
):
    recipe = write_recipe(model__dropout=0.1)  # 8 sequences per step
    monkeypatch.setattr(micro_batch, "peak_memory", lambda device: 0)
    monkeypatch.setattr(
        micro_batch, "next_size", lambda sizes, needed, room: None if 4 in needed else 4
    )
    auto = trained(tmp_path / "auto", recipe, "--train.micro_batch_size", "auto")
    assert "micro_batch_size: 4\n" in auto.recipe.read_text()
    forget_accelerate()
    four = trained(tmp_path / "four", recipe, "--train.micro_batch_size", "4")
    weights = [load_file(run.final / "model.safetensors") for run in (auto, four)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    # more memory is free now, but the resumed run keeps its size
    monkeypatch.setattr(
        micro_batch, "next_size", lambda sizes, needed, room: None if 8 in needed else 8
    )
    forget_accelerate()
    options = ("--train.micro_batch_size", "auto", "--resume", "--train.max_steps", "8")
    auto = trained(tmp_path / "auto", recipe, *options)
    assert "micro_batch_size: 4\n" in auto.recipe.read_text()


def test_auto_measures_memory(tmp_path, write_recipe):
    options = ("--train.micro_batch_size", "auto", "--train.max_steps", "2")
    run = trained(tmp_path / "run", write_recipe(), *options)
    # one micro-batch per step fits any machine
    assert "micro_batch_size: 8\n" in run.recipe.read_text()


def test_advice_names_knobs_and_savings(monkeypatch):
    config = replace_knobs(Config(), {"train.micro_batch_size": 64})
    advice = memory_advice(config, 50257, "bf16")
    # 40 · 12 layers · 1,024 tokens · 768 width · 64 sequences = 24.2 GB; 16 bytes · 124 M = 2.0 GB
    assert "optimizer state take 2.0 GB, activations of 64 sequences about 24.2 GB" in advice
    assert "train.micro_batch_size 32 saves 12.1 GB" in advice
    # selective keeps 24 of 40
    levels = "fsdp_activation_checkpointing in the accelerate config: selective saves about 9."
    assert levels in advice
    assert ", true saves about 21.7 GB" in advice
    assert "optim.state 8bit saves 0.7 GB" in advice  # 8 - 2.03 bytes · 124 M
    assert "\n" not in advice
    config = replace_knobs(config, {"optim.state": "8bit"})
    advice = memory_advice(config, 50257, "bf16")
    assert "optimizer state take 1.2 GB" in advice
    assert "optim.state" not in advice
    config = replace_knobs(config, {"train.micro_batch_size": 1})
    assert "micro_batch_size 0" not in memory_advice(config, 50257, "no")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    advice = memory_advice(replace_knobs(config, {"train.micro_batch_size": 64}), 50257, "bf16")
    assert "activations of 64 sequences about 2.4 GB" in advice
    assert "checkpointing" not in advice


@pytest.mark.parametrize("optim", [{}, {"name": "muon"}])
def test_saved_bytes_equal_the_copy_of_a_checkpoint(tmp_path, optim):
    model = GPTForCausalLM(GPTConfig(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    model.transformer.wpe.requires_grad_(False)
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, build_optimizer(model, OptimSection(**optim)))
    tokens = torch.arange(8)[None]
    accelerator.backward(model(tokens, labels=tokens).loss)
    optimizer.step()
    checkpoints = CheckpointWriter(accelerator, RunFolder(tmp_path), keep=1)
    checkpoints.save(model, optimizer, TrainState(step=1))
    checkpoints.wait()
    copied = sum(buffer.nbytes for buffer in checkpoints.buffers.values())
    assert FullState(accelerator, model, optimizer).saved_bytes() == copied
