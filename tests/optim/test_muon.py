"""Muon: equal to torch's, skips steps without a finite gradient, and costs what is counted."""

import copy

import pytest
import torch
from accelerate import Accelerator
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.distributed.preparation import prepared_blocks
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.optim.muon import Muon, matrices
from nanogpt_hf.optim.newton_schulz import orthogonalization_flops, orthogonalize
from nanogpt_hf.optim.optimizer import build_optimizer, set_learning_rate, skip_step_unless_finite

SHAPES = {"square": (16, 16), "wide": (8, 32), "tall": (32, 8)}
SIZES = {
    "vocab_size": 11,
    "n_positions": 8,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "dropout": 0.0,
}


def tiny_model(**sizes) -> GPTForCausalLM:
    torch.manual_seed(0)
    return GPTForCausalLM(GPTConfig(**SIZES | sizes))


def backward(model: GPTForCausalLM, step: int) -> None:
    torch.manual_seed(step)
    tokens = torch.randint(0, 11, (4, 8))
    model(tokens, labels=tokens).loss.backward()


class Float32(TorchFunctionMode):
    """Compute in float32 where the code asks for bfloat16, as torch.optim.Muon does."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.bfloat16:
            return args[0].float()
        if kwargs.get("dtype") is torch.bfloat16:
            kwargs |= {"dtype": torch.float32}
        return function(*args, **kwargs)


@pytest.mark.parametrize("rank", [2, 32])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_ten_steps_equal_torch_optim_muon(scale, rank):
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES.values() for _ in range(3)]
    theirs = copy.deepcopy(ours)
    vector = torch.nn.Parameter(torch.zeros(4))
    muon = Muon(
        [{"params": ours, "weight_decay": 0.1}],
        [{"params": [vector]}],
        lr=0.02,
        momentum=0.95,
        scale=scale,
        betas=(0.9, 0.95),
    )
    reference = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn=scale
    )
    for _ in range(10):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(len(a), rank) @ torch.randn(rank, a.shape[1])
            b.grad = a.grad.clone()
        muon.step()
        with Float32():
            reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
        torch.testing.assert_close(
            muon.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"]
        )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("scale", "growth"), [("original", 1.0), ("match_rms_adamw", 2.0)])
def test_update_changes_a_layers_output_at_any_width_alike(scale, growth, shape):
    """Between widths 64 and 256 the change of a layer's output by a step is constant, so that a
    rate fits any width; with match_rms_adamw it grows as the root of the width.
    """
    changes = {}
    for width in (64, 256):
        torch.manual_seed(0)
        rows, columns = (width * size // 16 for size in SHAPES[shape])
        weight = torch.nn.Parameter(torch.zeros(rows, columns))
        rest = [{"params": [torch.nn.Parameter(torch.zeros(1))]}]
        groups = [{"params": [weight], "weight_decay": 0.0}]
        muon = Muon(groups, rest, lr=0.02, momentum=0.0, scale=scale, betas=(0.9, 0.95))
        inputs = torch.randn(4 * columns, columns)
        weight.grad = torch.randn(rows, columns)
        muon.step()
        changes[width] = (inputs @ weight.detach().T).square().mean().sqrt()
    assert changes[256] / changes[64] == pytest.approx(growth, rel=0.1)


def test_muon_updates_block_matrices_and_adamw_the_rest():
    model = tiny_model(bias=True)
    optim = OptimSection(
        name="muon", learning_rate=0.004, muon_learning_rate=0.02, weight_decay=0.3
    )
    optimizer = build_optimizer(model, optim)
    names = {id(p): name for name, p in model.named_parameters()}
    muon, decayed, plain = optimizer.param_groups
    assert [group["muon"] for group in optimizer.param_groups] == [True, False, False]
    layers = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "mlp.fc", "mlp.proj")
    wanted = {f"transformer.h.{i}.{layer}.weight" for i in range(2) for layer in layers}
    assert {names[id(p)] for p in muon["params"]} == wanted
    embeddings = {"transformer.wte.weight", "transformer.wpe.weight"}
    assert {names[id(p)] for p in decayed["params"]} == embeddings
    assert (muon["weight_decay"], decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.3, 0.0)
    set_learning_rate(optimizer, 0.001)  # a quarter of the peak
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.005, 0.001, 0.001])


@pytest.mark.parametrize("scaled", [False, True])
def test_non_finite_gradient_changes_nothing_in_muon(monkeypatch, scaled):
    model = tiny_model()
    optimizer = build_optimizer(model, OptimSection(name="muon"))
    # fp16 trains with a scaler.
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    # the path of optimizers that cannot skip by themselves, which waits for the device
    monkeypatch.setattr(scaler, "_maybe_opt_step", None)

    def step(step: int, wrong: float | None = None) -> None:
        torch.manual_seed(step)
        tokens = torch.randint(0, 11, (4, 8))
        scaler.scale(model(tokens, labels=tokens).loss).backward()
        if wrong is not None:
            model.transformer.h[0].mlp.fc.weight.grad[0] = wrong
        if scaled:
            scaler.unscale_(optimizer)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            skip_step_unless_finite(optimizer, norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def values() -> list[torch.Tensor]:
        state = [tensor for p in model.parameters() for tensor in optimizer.state[p].values()]
        return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]

    step(0)
    before = values()
    step(1, float("inf"))
    step(2, float("nan"))
    assert all(map(torch.equal, before, values()))
    step(3)
    assert not any(map(torch.equal, before, values()))


def flops_of_orthogonalize(*shape: int, dtype: torch.dtype = torch.float32) -> int:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(shape, dtype=dtype))
    return counter.get_total_flops()


def test_flops_of_orthogonalization_count_its_products():
    for shape in SHAPES.values():
        assert flops_of_orthogonalize(
            3, *shape, dtype=torch.bfloat16
        ) == 3 * orthogonalization_flops(*shape)
    assert flops_of_orthogonalize(3, 16, 16) == 3 * orthogonalization_flops(16, 16)


def test_muon_step_stacks_matrices_without_synchronization(counted):
    for layers in (2, 5):
        model = tiny_model(n_layer=layers)
        optimizer = build_optimizer(model, OptimSection(name="muon"))
        backward(model, 0)
        skip_step_unless_finite(optimizer, torch.ones(()))
        count = counted(optimizer.step)
        assert count["_local_scalar_dense"] == count["equal"] == count["nonzero"] == 0
        # of the square matrices 5 iterations; of two long shapes two passes each
        assert (count["bmm"], count["baddbmm"]) == (5 + 2 * 13, 2 * 5 + 2 * 5)
        assert count["_fused_adamw_"] == 2


def test_muon_compiles_into_one_graph_per_shape(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    models = [tiny_model() for _ in "ab"]
    optimizers = [build_optimizer(model, OptimSection(name="muon")) for model in models]
    with prepared_blocks(models[1], Accelerator(cpu=True), optimizers[1]):
        pass
    for learning_rate in (1e-3, 2e-3, 3e-3):
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(0)
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            set_learning_rate(optimizer, learning_rate)
            optimizer.step()
    assert counters["stats"]["unique_graphs"] == len({p.shape for p in matrices(models[1])}) == 3
    assert not counters["graph_break"]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b)
    torch.compiler.reset()
