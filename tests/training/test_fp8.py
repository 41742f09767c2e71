"""Runs in fp8, which torchao emulates on a CPU: resumed, exported, sharded, refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from assertions import copy_at, numbers, same_weights, series
from nanogpt_hf.commands import main
from nanogpt_hf.distributed import accelerate_config
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.load import load_model

pytest.importorskip("torchao", reason="torchao is not installed")
pytestmark = pytest.mark.long
KNOBS = {
    "model__n_embd": 32,
    "model__n_layer": 2,
    "train__max_steps": 6,
    "train__tokens_per_step": 256,
    "train__micro_batch_size": 4,
    "optim__learning_rate": 3e-3,
    "checkpoint__every": 3,
    "checkpoint__keep": 9,
    "tracking__every": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES = {
    "gpt2": {"model__dropout": 0.1},
    "qwen3 by Muon": {"model__architecture": "qwen3", "optim__name": "muon"},
    "experts": {"model__architecture": "qwen3_moe", "model__extra": EXPERTS},
}


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(accelerate_config, "EMULATES_FP8", True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")


@pytest.mark.parametrize(
    "case", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in [*CASES][1:])]
)
def test_run_resumes_bit_for_bit_and_is_a_model_of_transformers(
    case, start, emulated, tmp_path, text_file, monkeypatch
):
    knobs = KNOBS | CASES[case]
    whole = start("whole", **knobs)
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "selective")
    resumed = copy_at(whole, 3, tmp_path / "resumed")
    start("resumed", resume=True, **knobs)
    assert same_weights(whole, resumed)
    assert numbers(whole) == numbers(resumed)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    losses = series(whole, "train/loss")
    plain = series(start("bf16", **knobs), "train/loss")
    assert losses != plain
    assert losses == pytest.approx(plain, abs=5e-3)
    assert main(["export", str(whole.path), str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours = load_model(whole.final)
    ids = torch.arange(24).view(2, 12) % model.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids).logits, ours.eval()(ids).logits)


@pytest.mark.slow
def test_processes_that_are_killed_resume_and_are_near_one_process(
    launch_warm, make_recipe, tmp_path
):
    def launch(machine: str, name: str, *options, **variables):
        words = ["pretrain", recipe, "--run-dir", tmp_path / name, *options]
        return launch_warm(
            *(machine, *words), machine_options=["--mixed_precision=fp8"], **variables
        )

    recipe = make_recipe(tmp_path / "recipe.yaml", **KNOBS)
    fp8 = {"EMULATE_FP8": "1"}
    one = launch("cpu", "one", **fp8)
    small = launch("cpu", "small", "--train.micro_batch_size", "2", **fp8)
    for machine in ("cpu", "cpu_ddp", "fsdp2"):
        whole = one if machine == "cpu" else launch(machine, machine, **fp8)
        change = 12
        name = f"killed_{machine}"
        killed = launch(
            *(machine, name),
            ends_with=lambda status, output: status != 0 or pytest.fail(output),
            FAULT=f"0:killed:{change}",
            **fp8,
        )
        assert not killed.final.exists()
        launch(machine, name, "--auto-resume", **fp8)
        assert same_weights(whole, killed)
        assert numbers(whole) == numbers(killed)
        losses = series(whole, "train/loss")
        assert losses == pytest.approx(series(one, "train/loss"), abs=2e-3)
        # DDP's micro-batches, and so their scales, are those of one process
        near = pytest.approx(series(one, "train/loss"), abs=1e-6)
        assert (losses == near) == (machine != "fsdp2")
    losses = series(small, "train/loss")
    assert losses == pytest.approx(series(one, "train/loss"), abs=2e-3)
    assert losses != pytest.approx(series(one, "train/loss"), abs=1e-6)


def test_model_without_layers_for_it_is_refused(start, emulated):
    with pytest.raises(UserError, match=r"mixed_precision fp8.*that 16 divides"):
        start(**KNOBS | {"model__n_embd": 20})


def test_gpu_needs_products_of_8_bits(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    device = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    accelerate_config.settled(Mesh())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(UserError, match=r"compute capability 8\.9 or higher"):
        accelerate_config.settled(Mesh())
