"""AdamW's parameter groups."""

import pytest
import torch

from nanogpt_hf.config.optim_section import FAMILIES, MATRIX_FAMILIES
from nanogpt_hf.config.schema import LoraSection, ModelSection, OptimSection
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.lora import add_adapters
from nanogpt_hf.optim.optimizer import build_optimizer, describe_adamw, set_learning_rate

# of a module: its family, and how many layers are above it, but for those of blocks
KINDS = {
    "k_proj": ("query_key_value", None),
    "o_proj": ("attention_output", None),
    **dict.fromkeys(("fc", "gate_proj"), ("mlp_in", None)),
    **dict.fromkeys(("proj", "down_proj"), ("mlp_out", None)),
    **dict.fromkeys(("wte", "embed_tokens"), ("tokens", 3)),
    "wpe": ("positions", 3),
    **dict.fromkeys(("ln_f", "norm"), ("vectors", 0)),
    "lm_head": ("head", 0),
}


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(("architecture", "without"), [("gpt2", "head"), ("llama", "positions")])
def test_families_have_rates_of_their_own(name, architecture, without):
    section = ModelSection(architecture=architecture, n_layer=2, n_head=2, n_embd=8, n_positions=8)
    model = build_model(build_config(section, 11), 1)
    rates = {family: 2.0 + index for index, family in enumerate(FAMILIES)}
    optim = OptimSection(name=name, rates=rates, learning_rate=0.25, muon_learning_rate=0.5)
    optimizer = build_optimizer(model, optim, layer_decay=0.5)
    set_learning_rate(optimizer, 0.25)
    rate = {p: g["lr"] for g in optimizer.param_groups for p in g["params"]}
    found = set()
    for key, parameter in model.named_parameters():
        *path, kind, end = key.split(".")
        if end == "weight" and kind in KINDS:
            family, above = KINDS[kind]
            peak = 0.5 if name == "muon" and above is None else 0.25
            above = 2 - int(path[2]) if above is None else above
            assert rate[parameter] == peak * 0.5**above * rates[family], key
            found.add(family)
    assert found == set(FAMILIES) - {without}


def test_an_adapter_has_the_rate_of_its_layer():
    model = build_model(build_config(ModelSection(n_layer=1, n_head=2, n_embd=8), 11), 1)
    add_adapters(model, LoraSection(rank=2), seed=1)
    optimizer = build_optimizer(model, OptimSection(rates={"mlp_in": 3.0}))
    names = {id(p): name for name, p in model.named_parameters()}
    scaled = {names[id(p)] for g in optimizer.param_groups if g["scale"] == 3 for p in g["params"]}
    assert {name.partition("mlp.")[2] for name in scaled} == {
        f"fc.lora_{factor}.default.weight" for factor in "AB"
    }


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_families_have_betas_of_their_own(name):
    """As two optimizers of torch with a pair of betas each, over five steps."""
    section = ModelSection(n_layer=1, n_head=2, n_embd=8, n_positions=8)
    model, reference = (build_model(build_config(section, 11), 1) for _ in range(2))
    betas = {"tokens": [0.7, 0.99], "positions": [0.7, 0.99], "vectors": [0.5, 0.6]}
    optimizer = build_optimizer(model, OptimSection(name=name, betas=betas, learning_rate=0.01))
    theirs = dict(reference.named_parameters())
    decay = 0.1
    embeddings = [theirs.pop("transformer.wte.weight"), theirs.pop("transformer.wpe.weight")]
    vectors = [parameter for parameter in theirs.values() if parameter.dim() == 1]
    matrices = [parameter for parameter in theirs.values() if parameter.dim() == 2]
    alone = [
        torch.optim.AdamW(embeddings, 0.01, (0.7, 0.99), weight_decay=decay, fused=True),
        torch.optim.AdamW(vectors, 0.01, (0.5, 0.6), weight_decay=0, fused=True),
        torch.optim.AdamW(matrices, 0.01, (0.9, 0.95), weight_decay=decay, fused=True),
    ]
    set_learning_rate(optimizer, 0.01)
    draws = torch.Generator().manual_seed(3)
    for _ in range(5):
        for ours, its in zip(model.parameters(), reference.parameters(), strict=True):
            ours.grad = torch.randn(ours.shape, generator=draws)
            its.grad = ours.grad.clone()
        optimizer.step()
        for one in alone:
            one.step()
    for key, parameter in model.named_parameters():
        if name == "muon" and parameter.dim() == 2 and "wte" not in key and "wpe" not in key:
            continue
        assert torch.equal(parameter, reference.get_parameter(key)), key


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_families_have_weight_decays_of_their_own(name):
    """Without a gradient, a step multiplies a parameter by 1 - rate · decay."""
    section = ModelSection(n_layer=1, n_head=2, n_embd=8, n_positions=8)
    model, before = (build_model(build_config(section, 11), 1) for _ in range(2))
    decays = {"tokens": 0.3, "vectors": 0.2, "mlp_in": 0.0}
    optim = OptimSection(name=name, weight_decays=decays, learning_rate=0.01, weight_decay=0.5)
    optimizer = build_optimizer(model, optim)
    set_learning_rate(optimizer, 0.01)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    families = architecture_of(model).families(model)
    found = set()
    for key, parameter in model.named_parameters():
        is_muons = name == "muon" and families[key] in MATRIX_FAMILIES
        rate = 0.02 if is_muons else 0.01
        decay = decays.get(families[key], 0.5)
        expected = before.get_parameter(key) * (1 - rate * decay)
        torch.testing.assert_close(parameter, expected, atol=1e-7, rtol=1e-6, msg=key)
        found.add(families[key])
    assert {*decays, "positions", "mlp_out"} <= found
    assert describe_adamw(optim).endswith("weight decay 0.5 (tokens 0.3) (vectors 0.2) (mlp_in 0)")


def test_betas_that_a_recipe_does_not_name_are_not_in_the_groups():
    model = build_model(build_config(ModelSection(n_layer=1, n_head=2, n_embd=8), 11), 1)
    same = build_optimizer(model, OptimSection(betas={"tokens": [0.9, 0.95]}))
    assert [g["betas"] for g in same.param_groups] == [(0.9, 0.95)] * 3
    assert describe_adamw(OptimSection(betas={"tokens": [0.7, 0.99]})) == (
        "AdamW, betas 0.9 and 0.95 (tokens 0.7 and 0.99), weight decay 0.1"
    )
