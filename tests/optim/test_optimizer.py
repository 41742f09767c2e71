"""AdamW's parameter groups."""

import pytest

from nanogpt_hf.config.schema import FAMILIES, LoraSection, ModelSection, OptimSection
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.lora import add_adapters
from nanogpt_hf.optim.optimizer import build_optimizer, set_learning_rate


def test_weight_decay_applies_to_matrices():
    model = GPTForCausalLM(GPTConfig(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2))
    optimizer = build_optimizer(model, OptimSection(weight_decay=0.3, beta1=0.8, beta2=0.9))
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert decayed["betas"] == plain["betas"] == (0.8, 0.9)
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, vectors = ([names[id(p)] for p in group["params"]] for group in (decayed, plain))
    assert sorted(matrices + vectors) == sorted(names.values())
    assert all(name.endswith("weight") and "ln_" not in name for name in matrices)
    assert all(name.endswith("bias") or "ln_" in name for name in vectors)


def test_optimizer_skips_frozen_parameters():
    model = GPTForCausalLM(GPTConfig(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2))
    model.transformer.h[0].requires_grad_(False)
    optimizer = build_optimizer(model, OptimSection())
    trained = sum(len(group["params"]) for group in optimizer.param_groups)
    assert trained == len(list(model.parameters())) - len(list(model.transformer.h[0].parameters()))


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_families_have_rates_of_their_own(name, architecture):
    section = ModelSection(architecture=architecture, n_layer=2, n_head=2, n_embd=8, n_positions=8)
    model = build_model(build_config(section, 11), 1)
    rates = {family: 2.0 + index for index, family in enumerate(FAMILIES)}
    optim = OptimSection(name=name, rates=rates, learning_rate=0.25, muon_learning_rate=0.5)
    optimizer = build_optimizer(model, optim, layer_decay=0.5)
    set_learning_rate(optimizer, 0.25)
    names = {id(p): name for name, p in model.named_parameters()}
    rate = {names[id(p)]: g["lr"] for g in optimizer.param_groups for p in g["params"]}
    last = f"{'transformer.h' if architecture == 'gpt2' else 'model.layers'}.1."
    muon = 0.25 if name == "muon" else 0.125  # of the last block, and half of it
    layers = {
        "gpt2": ("attn.k_proj", "attn.o_proj", "mlp.fc", "mlp.proj"),
        "llama": ("self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"),
    }[architecture]
    families = ("query_key_value", "attention_output", "mlp_in", "mlp_out")
    for layer, family in zip(layers, families, strict=True):
        assert rate[f"{last}{layer}.weight"] == muon * rates[family]
        assert rate[f"{last}{layer}.weight".replace(".1.", ".0.")] == muon / 2 * rates[family]
    others = {
        "gpt2": {"transformer.wte": "tokens", "transformer.wpe": "positions"},
        "llama": {"model.embed_tokens": "tokens"},
    }[architecture]
    for layer, family in others.items():
        assert rate[f"{layer}.weight"] == 0.25 / 8 * rates[family]
    norm, head = ("transformer.ln_f", None) if architecture == "gpt2" else ("model.norm", "lm_head")
    assert rate[f"{norm}.weight"] == 0.25 * rates["vectors"]
    if head:
        assert rate[f"{head}.weight"] == 0.25 * rates["head"]


def test_an_adapter_has_the_rate_of_its_layer():
    model = build_model(build_config(ModelSection(n_layer=1, n_head=2, n_embd=8), 11), 1)
    add_adapters(model, LoraSection(rank=2), seed=1)
    optimizer = build_optimizer(model, OptimSection(rates={"mlp_in": 3.0}))
    names = {id(p): name for name, p in model.named_parameters()}
    scaled = {names[id(p)] for g in optimizer.param_groups if g["scale"] == 3 for p in g["params"]}
    assert {name.partition("mlp.")[2] for name in scaled} == {
        f"fc.lora_{factor}.default.weight" for factor in "AB"
    }
