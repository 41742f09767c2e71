"""8-bit AdamW: equal to torchao, estimated bytes, exact resume, conversion of its state to
float32.
"""

import math

import pytest
import torch

from assertions import column, copy_at, numbers, same_weights
from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.errors import UserError
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.optim import adamw_8bit
from nanogpt_hf.optim.optimizer import (
    build_optimizer,
    kind_of,
    set_learning_rate,
    skip_step_unless_finite,
)
from nanogpt_hf.runs.folder import RunFolder

try:
    adamw_8bit.check_8bit()
except UserError as obstacle:
    pytest.skip(str(obstacle), allow_module_level=True)
pytestmark = [pytest.mark.long, pytest.mark.slow]  # torch compiles its step
torchao = pytest.importorskip("torchao")
# Each shape is compiled once: there are only (128, 128) and that of a LayerNorm.
OPTIONS = {
    "model__n_embd": 128,
    # A knob sets n_inner of this architecture.
    "model__architecture": "llama",
    "model__n_inner": 128,
    "model__n_positions": 128,
    "model__pad_vocab_to_multiple_of": 128,
    "optim__learning_rate": 1e-3,
    "optim__state": "8bit",
    "train__micro_batch_size": 8,  # one micro-batch per step
    "checkpoint__every": 3,
    "tracking__layers": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("moments")


@pytest.fixture(scope="module")
def recipe(folder, make_recipe):
    return make_recipe(folder / "eight.yaml", **OPTIONS)


@pytest.fixture(scope="module")
def train(folder, forget_accelerate):
    def train(name: str, *words: object) -> RunFolder:
        forget_accelerate()
        assert main([*map(str, words), "--run-dir", str(folder / name), "--quiet"]) == 0
        return RunFolder(folder / name)

    return train


@pytest.fixture(scope="module")
def uninterrupted(train, recipe) -> RunFolder:
    return train("whole", "pretrain", recipe)


@pytest.fixture
def half(uninterrupted, folder):
    """A copy of the run at its step 3."""

    def copy(name: str, of: RunFolder = uninterrupted) -> RunFolder:
        return copy_at(of, 3, folder / name)

    return copy


def test_run_switches_between_8bit_and_float32_state(uninterrupted, half, train, recipe):
    switched = train(
        half("switched").path.name, "pretrain", recipe, "--resume", "--optim.state", "float32"
    )
    assert column(switched, "val/loss") == pytest.approx(
        column(uninterrupted, "val/loss"), abs=2e-3
    )
    back = train(half("back", of=switched).path.name, "pretrain", recipe, "--resume")
    assert same_weights(back, uninterrupted)
    states = [
        (run.checkpoint(6) / "optimizer.safetensors").read_bytes() for run in (back, uninterrupted)
    ]
    assert states[0] == states[1]
    assert numbers(back) == numbers(uninterrupted)


@pytest.fixture(scope="module")
def stepped():
    """A model, its optimizer, and a function that takes a step with random gradients."""
    sizes = GPTConfig(
        vocab_size=128, n_positions=128, n_embd=128, n_inner=128, n_layer=1, n_head=2, bias=False
    )
    torch.manual_seed(0)
    model = GPTForCausalLM(sizes)
    optimizer = build_optimizer(model, OptimSection(state="8bit"))

    def step(scale: float = 1.0, learning_rate: float = 1e-3) -> None:
        for parameter in model.parameters():
            parameter.grad = scale * torch.randn_like(parameter)
        set_learning_rate(optimizer, learning_rate)
        skip_step_unless_finite(optimizer, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, optimizer, step


def parts(state_tensor: torch.Tensor) -> list[torch.Tensor]:
    return (
        [state_tensor.codes, state_tensor.scale, state_tensor.qmap]
        if hasattr(state_tensor, "codes")
        else [state_tensor]
    )


def test_8bit_state_has_the_estimated_bytes(stepped):
    model, optimizer, _ = stepped
    state_bytes = {
        name: sum(
            part.untyped_storage().nbytes()
            for key in ("exp_avg", "exp_avg_sq")
            for part in parts(optimizer.state[parameter][key])
        )
        for name, parameter in model.named_parameters()
    }
    assert sum(state_bytes.values()) == kind_of(OptimSection(state="8bit")).state_bytes(model, 1)
    for name, parameter in model.named_parameters():
        assert state_bytes[name] / parameter.numel() == (
            8 if parameter.dim() == 1 else 2 + 8 / 256 + 2048 / parameter.numel()
        )
    assert sum(state_bytes.values()) < 0.28 * kind_of(OptimSection()).state_bytes(model, 1)


def test_non_finite_gradient_changes_nothing_in_8bit(stepped):
    model, optimizer, step = stepped

    def bits() -> list[torch.Tensor]:
        optimizer_state = [
            optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")
        ]
        return [
            part.clone()
            for tensor in [*model.parameters(), *optimizer_state]
            for part in parts(tensor.detach())
        ]

    before = bits()
    step(scale=math.inf)
    assert all(torch.equal(a, b) for a, b in zip(bits(), before, strict=True))
    step()
    assert not any(torch.equal(a, b) for a, b in zip(bits()[:5], before[:5], strict=True))


def test_new_learning_rate_applies_without_recompilation(stepped):
    model, _, step = stepped
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(learning_rate=0.0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    step(learning_rate=0.5)
    assert all((a - b).abs().max() > 0.1 for a, b in zip(model.parameters(), before, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq"])
def test_8bit_state_converts_to_float32_and_back_exactly(stepped, kind):
    _, optimizer, _ = stepped
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(4096, 256))
    values = torch.randn(4096, 256) * 10 ** torch.empty(4096, 1).uniform_(-15, 3)
    values[::3] *= torch.rand(1366, 256) < 0.01  # mostly zeros, some blocks only zeros
    values = values if kind == "exp_avg" else values.square()
    state_tensor = optimizer._new_buffer(parameter, kind == "exp_avg")
    state_tensor.copy_(values)
    dequantized = adamw_8bit.as_float32(state_tensor)
    resumed = optimizer._new_buffer(parameter, kind == "exp_avg")
    adamw_8bit.restore(resumed, dequantized)
    assert torch.equal(resumed.codes, state_tensor.codes)
    assert torch.equal(resumed.dequantize(), dequantized)
    full = (values != 0).sum(1) > 3  # other blocks may have another scale with the same values
    assert 2800 < full.sum() < 4096
    assert torch.equal(resumed.scale[full], state_tensor.scale[full])
    # torchao's conversion shrinks every block whose largest value is negative
    if kind == "exp_avg":
        assert 0.4 < (resumed.copy_(dequantized).scale != state_tensor.scale).float().mean() < 0.6
