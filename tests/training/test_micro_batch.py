"""train.micro_batch_size auto: dry-run steps that find the largest size."""

import mmap
import multiprocessing
import sys

import pytest
import torch
from accelerate import Accelerator

from assertions import same_weights
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import Config, OptimSection, replace_knobs
from nanogpt_hf.config.step_size import accumulation_steps, divisors
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.updates import Updater
from nanogpt_hf.errors import UserError
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import model_of_run
from nanogpt_hf.planning.footprint import footprint
from nanogpt_hf.training import auto_size, micro_batch
from nanogpt_hf.training.auto_size import largest_micro_batch
from nanogpt_hf.training.micro_batch import memory_advice
from nanogpt_hf.training.start import prepare_run


@pytest.mark.parametrize(("size", "smaller"), [(12, 6), (9, 3), (5, 1)])
def test_advice_is_a_micro_batch_that_divides_the_step(size, smaller):
    sizes = {"train.micro_batch_size": size, "train.tokens_per_step": size * 1024}
    config = replace_knobs(Config(), sizes)
    advice = memory_advice(config, model_of_run(config, 9), Launch(device="cpu"))
    assert f"train.micro_batch_size {smaller} (" in advice
    accumulation_steps(replace_knobs(config, {"train.micro_batch_size": smaller}), 1)


@pytest.mark.parametrize(
    ("room", "max_size", "reserved", "error", "tried"),
    [
        (5000, None, 0, 1.0, [240, 480]),
        (50_000, None, 0, 1.0, [480]),
        (1000, None, 0, 1.0, [40, 80]),
        (1000, None, 500, 1.0, [15, 40]),
        (1000, None, 0, 1.5, [20, 80]),  # the estimate is too high
        (1000, None, 0, 0.6, [60, 80]),  # it is too low
        (1000, 79, 0, 1.0, [40, 80, 60]),  # too little memory: a smaller size is tried
        (90, None, 0, 1.0, [1]),  # the smallest is tried in any case
    ],
)
def test_at_most_three_dry_runs_find_largest_micro_batch(
    monkeypatch, caplog, room, max_size, reserved, error, tried
):
    """In memory of `room` bytes: a dry-run step takes 100 bytes and 10 per sequence; the estimate
    is `error` times as much.
    """
    sizes = []

    def dry_run(size: int) -> None:
        sizes.append(size)
        if max_size and size > max_size:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def estimated(size: int) -> float:
        return error * (100 + 10 * size)

    monkeypatch.setattr(auto_size, "available_memory", lambda accelerator: room)
    monkeypatch.setattr(auto_size, "reset_peak_memory", lambda accelerator: None)
    monkeypatch.setattr(auto_size, "peak_memory", lambda device: 100 + 10 * sizes[-1])
    caplog.set_level("INFO")
    found = largest_micro_batch(Accelerator(), divisors(480), dry_run, estimated, reserved)
    fitting = [size for size in tried if not max_size or size <= max_size]
    assert (found, sizes) == (max(fitting), tried)
    lines = [line for line in caplog.messages if line.startswith("micro_batch_size auto: trial")]
    assert len(lines) == len(tried) <= auto_size.MAX_TRIALS


def test_one_gpu_begins_with_all_of_its_memory():
    def estimated(size: int) -> float:
        return 100.0 + 10 * size

    def first(share: float, failed: list[int]) -> int | None:
        return auto_size.next_size(divisors(480), {}, failed, 1000, estimated, share)

    assert first(1.0, []) == 80
    assert first(0.5, []) == 40
    assert first(1.0, [80]) == 32  # at most half of what did not fit, by the estimate
    assert first(1.0, [80, 1]) is None


def test_unmeasurable_memory_is_one_line(monkeypatch):
    monkeypatch.setattr(
        auto_size.Path, "write_text", lambda *_: (_ for _ in ()).throw(PermissionError())
    )
    with pytest.raises(
        UserError, match="auto cannot measure memory on this machine's cpu; set a number"
    ):
        largest_micro_batch(Accelerator(), [1, 2, 4, 8], lambda size: None, lambda size: 1.0)


LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="peak memory of a CPU process is measured on Linux only"
)


@LINUX
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_peak_memory_is_measured():
    accelerator = Accelerator()
    size = 64 * 2**20

    def peak() -> int:
        return auto_size.peak_memory(accelerator.device)

    def measure() -> None:
        auto_size.reset_peak_memory(accelerator)
        before = peak()
        # new pages; an allocator may reuse those that an earlier test freed
        memory = mmap.mmap(-1, size)
        for page in range(0, size, mmap.PAGESIZE):  # torch's threads do not survive a fork
            memory[page] = 1
        # code that is loaded at its first use counts, too
        assert 0.9 * size < peak() - before < 1.5 * size
        memory.close()
        assert peak() - before > 0.9 * size
        auto_size.reset_peak_memory(accelerator)
        assert peak() - before < 0.5 * size

    # since other threads of this process may free memory at any time
    child = multiprocessing.get_context("fork").Process(target=measure)
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    ("size", "optimizer", "micro_batch_size", "block_size"),
    [
        ({}, "adamw", 8, 64),
        ({"vocab_size": 9000}, "adamw", 1, 8),
        ({"dropout": 0.1, "n_head": 16}, "adamw", 2, 256),
        ({"bias": False, "n_layer": 6}, "muon", 1, 8),
        ({"n_layer": 12, "n_inner": 64}, "muon", 4, 64),
    ],
)
def test_memory_bound_is_not_below_the_estimate(
    size, optimizer, micro_batch_size, block_size, precision
):
    values = {"vocab_size": 500, "n_embd": 64, "n_layer": 2, "n_head": 4, "dropout": 0.0}
    with torch.device("meta"):
        model = GPTForCausalLM(GPTConfig(**values | {"n_positions": block_size} | size))
    step = {
        "micro_batch_size": micro_batch_size,
        "block_size": block_size,
        "accumulation": 1,
        "optim": OptimSection(name=optimizer),
    }
    launch = Launch(device="cpu", precision=precision)
    estimate = footprint(model, launch, **step).peak
    bound = architecture_of(model).memory_bound(model, micro_batch_size * block_size, block_size)
    assert estimate < bound < 8 * estimate


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

        monkeypatch.setattr(Updater, "step", update)
        with pytest.raises(torch.OutOfMemoryError):
            micro_batch.dry_run_step(run, 2)
    else:
        micro_batch.dry_run_step(run, 2)
    assert not run.optimizer.state
    assert (run.accelerator.gradient_accumulation_steps, run.accelerator.step) == (2, 0)
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_dry_run_step_takes_two_micro_batches_at_most(run, size):
    """The second one finds the gradients of the first; 8 sequences are 8 micro-batches or fewer."""
    shapes = []
    objective = run.objective

    def noting(model, batch):
        gradients = [parameter.grad is not None for parameter in model.parameters()]
        shapes.append((len(batch["input_ids"]), all(gradients)))
        return objective(model, batch)

    run.objective = noting
    # As `auto` finds it, before a size is chosen.
    run.accelerator.gradient_accumulation_steps = 8
    micro_batch.dry_run_step(run, size)
    assert shapes == [(size, False), (size, True)][: 8 // size]


@pytest.mark.long
def test_auto_equals_the_size_found_and_resume_keeps_it(start, monkeypatch):
    def take(size: int) -> None:
        monkeypatch.setattr(
            auto_size, "next_size", lambda sizes, needed, *_: None if size in needed else size
        )

    knobs = {"model__dropout": 0.1, "checkpoint__keep": 9}  # 8 sequences per step
    monkeypatch.setattr(auto_size, "peak_memory", lambda device: 0)
    take(4)
    auto = start("auto", train__micro_batch_size="auto", **knobs)
    assert load_config(auto.recipe).train.micro_batch_size == 4
    assert same_weights(auto, start("four", train__micro_batch_size=4, **knobs))
    take(8)  # more memory is free now, but the resumed run keeps its size
    auto = start("auto", resume=True, train__micro_batch_size="auto", train__max_steps=8, **knobs)
    assert load_config(auto.recipe).train.micro_batch_size == 4


def test_auto_measures_memory(start):
    run = start(train__micro_batch_size="auto", train__max_steps=2)
    # one micro-batch per step fits any machine
    assert load_config(run.recipe).train.micro_batch_size == 8
