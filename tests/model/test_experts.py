"""Mixtures of experts and hybrids: equal to plain transformers, also on disk; a balance loss that
adds up; Muon and FLOPs.
"""

import pytest
import torch
from decoder_types import VOCAB, tiny, tiny_section
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import grouped_mm_experts_forward

from decoder_batch import batch, gradients
from nanogpt_hf.config.schema import Config, OptimSection, replace_knobs
from nanogpt_hf.errors import UserError
from nanogpt_hf.methods.terms import next_token_loss, text_objective
from nanogpt_hf.model import loss_gpt
from nanogpt_hf.model.architecture import architecture_of, count_parameters, saved_buffers
from nanogpt_hf.model.build import start_model
from nanogpt_hf.model.checks import check_balance, check_causal
from nanogpt_hf.model.experts import experts_of, load_figures, products
from nanogpt_hf.model.load import load_model
from nanogpt_hf.optim.muon import Stored, matrices
from nanogpt_hf.optim.newton_schulz import orthogonalize
from nanogpt_hf.optim.optimizer import build_optimizer, set_learning_rate

TYPES = ["qwen3_moe", "mixtral", "olmoe", "granitemoe", "gpt_oss", "glm4_moe", "deepseek_v3"]
OTHERS = ["llama", "qwen3", "nanochat", "gemma3_text", "lfm2", "qwen3_5_text"]


def model_of(architecture: str):
    """A tiny model with weights and saved buffers large enough that a mistake shows."""
    model = tiny(architecture)
    draw = torch.Generator().manual_seed(1)
    for buffer in saved_buffers(model).values():
        buffer.add_(torch.randn(buffer.shape, generator=draw), alpha=0.1)
    return model


@pytest.mark.parametrize("architecture", [*TYPES, *OTHERS])
def test_loss_gradients_and_folder_are_those_of_transformers(architecture, tmp_path, monkeypatch):
    monkeypatch.setattr(loss_gpt, "LOGITS_PER_CHUNK", VOCAB * 7)
    model = model_of(architecture).train()
    row = architecture_of(model)
    check_causal(model, packs=False)
    row.write_model(tmp_path, model.config, model.state_dict())
    options = {"experts_implementation": "eager"} if architecture in TYPES else {}
    standard = AutoModelForCausalLM.from_pretrained(tmp_path, **options).train()
    assert type(standard) is not type(model)
    assert type(standard).__name__ == type(model).__name__ == standard.config.architectures[0]
    assert saved_buffers(standard).keys() == saved_buffers(model).keys()
    theirs = standard(**batch(), labels=batch()["input_ids"], num_items_in_batch=7).loss
    ours = model(**batch(), num_items_in_batch=7, skip_logits=True)
    torch.testing.assert_close(ours.loss, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        gradients(model, ours.loss), gradients(standard, theirs), atol=1e-5, rtol=1e-5
    )
    again = load_model(str(tmp_path)).eval()
    ids = batch()["input_ids"]
    torch.testing.assert_close(again(ids).logits, standard.eval()(ids).logits)
    assert count_parameters(model.config) == standard.num_parameters()


@pytest.mark.parametrize("architecture", TYPES)
def test_balance_loss_adds_up_over_rows(architecture):
    model = model_of(architecture).train()
    config = replace_knobs(Config(), {"optim.balance_loss": 3.0})
    loss_of = text_objective(config, None)  # pyright: ignore
    whole, metrics = loss_of(model, batch())
    rows = [
        loss_of(model, {name: tensor[i : i + 1] for name, tensor in batch().items()})
        for i in range(3)
    ]
    torch.testing.assert_close(sum(loss for loss, _ in rows), whole)
    for name, value in metrics.items():
        torch.testing.assert_close(sum(of[name] for _, of in rows), value)
    without = next_token_loss(model, batch())[0]
    torch.testing.assert_close(without + 3 * metrics["balance_loss"], whole)
    metrics["balance_loss"].backward()
    routers = [
        p for n, p in model.named_parameters() if n.endswith(("gate.weight", "router.weight"))
    ]
    routers += [p for n, p in model.named_parameters() if n.endswith("router.layer.weight")]
    assert routers
    assert all(router.grad.any() for router in routers)
    targets = int((batch()["shift_labels"] != -100).sum())
    load = metrics["expert_load"]
    assert load.shape == (len(experts_of(model)), 4)
    torch.testing.assert_close(load.sum(1), torch.full((len(load),), float(targets)))


def test_balance_loss_is_one_per_target_if_experts_have_equal_work():
    model = model_of("qwen3_moe").train()
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.gate.weight.zero_()  # equal probabilities, whatever the choices
    metrics = next_token_loss(model, batch())[1]
    assert metrics["balance_loss"].item() / 39 == pytest.approx(1)
    assert metrics["router_entropy"].item() / 39 == pytest.approx(torch.tensor(4.0).log().item())
    assert load_figures(torch.tensor([[0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25]])) == {
        "expert_load_max": 2,
        "unused_experts": 2,
    }


def test_products_of_experts_follow_autocast(monkeypatch):
    experts = experts_of(model_of("qwen3_moe").train())[0]
    product = F.grouped_mm
    dtypes = set()

    def grouped_mm(rows, matrices, **options):
        dtypes.update((rows.dtype, matrices.dtype))
        return product(rows, matrices, **options)

    hidden = torch.randn(6, 32, requires_grad=True)
    weights = torch.full((6, 2), 0.5)
    chosen = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [0, 1], [1, 3]])  # none takes expert 2
    expected = grouped_mm_experts_forward(experts, hidden, chosen, weights)
    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    for rows in (hidden, hidden.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            out = products(experts, rows, chosen, weights)
        out.float().sum().backward()
        assert dtypes == {torch.bfloat16}
        assert torch.equal(experts.chosen, chosen)
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    assert {p.grad.dtype for p in experts.parameters()} == {torch.float32}


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_muon_takes_each_expert_as_a_matrix(architecture):
    model = model_of(architecture).train()
    experts = model.model.layers[0].mlp.experts
    fused, transposed = (1, True) if architecture == "gpt_oss" else (2, False)
    stored = matrices(model)
    assert stored[experts.gate_up_proj] == Stored(fused, transposed)
    assert stored[experts.down_proj] == Stored(1, transposed)
    assert not any(p.dim() == 2 for p in experts.parameters() if p in stored)
    optim = OptimSection(name="muon", weight_decay=0.0, muon_learning_rate=0.1)
    optimizer = build_optimizer(model, optim)
    set_learning_rate(optimizer, optim.learning_rate)
    gradients(model, next_token_loss(model, batch())[0])
    before = {p: p.detach().clone() for p in (experts.gate_up_proj, experts.down_proj)}
    optimizer.step()
    for p, old in before.items():
        # Nesterov's momentum of the first step.
        momentum = torch.lerp(p.grad, 0.05 * p.grad, 0.95)
        # The parts of the last expert.
        parts = momentum[3:].chunk(stored[p].fused, 1)
        outputs, inputs = parts[0].shape[:0:-1] if transposed else parts[0].shape[1:]
        update = torch.cat([orthogonalize(part) for part in parts], 1)[0]
        update *= 0.1 * max(1, outputs / inputs) ** 0.5
        torch.testing.assert_close(old[3] - p[3], update, atol=1e-5, rtol=1e-4)


def test_only_active_parameters_count_as_work():
    model = model_of("deepseek_v3")
    row = architecture_of(model)
    config = model.config
    # The second block has four experts, and two are chosen.
    expert = 3 * 32 * 16
    assert row.sizes(config).idle == 2 * expert
    active = count_parameters(config) - row.sizes(config).looked_up - 2 * expert
    attention = row.flops_per_token(config, 16) - 6 * active
    assert attention == row.flops_per_token(config, 32) - row.flops_per_token(config, 16)


def test_a_balance_loss_needs_experts_whose_routers_show_logits():
    recipe = Config(optim=OptimSection(balance_loss=0.1))
    for architecture in ("llama", "deepseek_v4"):
        with pytest.raises(UserError, match=f"optim.balance_loss: {architecture} has no experts"):
            check_balance(recipe, tiny(architecture).config)
    check_balance(recipe, tiny("qwen3_moe").config)


def test_what_only_chooses_tokens_is_frozen_with_a_line_in_the_log(caplog):
    with caplog.at_level("INFO"):
        model = start_model(Config(model=tiny_section("deepseek_v32")), VOCAB, None)
    assert "frozen, since the loss gives no gradient: model.layers.0." in caplog.text
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert frozen
