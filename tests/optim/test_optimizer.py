"""AdamW's parameter groups."""

from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.optim.optimizer import build_optimizer


def test_weight_decay_applies_to_matrices():
    model = GPTForCausalLM(GPTConfig(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2))
    optimizer = build_optimizer(model, OptimSection(weight_decay=0.3, beta1=0.8, beta2=0.9))
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert decayed["betas"] == plain["betas"] == (0.8, 0.9)
    names = {id(p): name for name, p in model.named_parameters()}
    in_groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    assert sorted(in_groups[0] + in_groups[1]) == sorted(names.values())
    assert all(name.endswith("weight") and "ln_" not in name for name in in_groups[0])
    assert all(name.endswith("bias") or "ln_" in name for name in in_groups[1])
    assert len(in_groups[0]) == 2 + 2 * 6
    assert len(in_groups[1]) == 2 * (6 + 4) + 2


def test_optimizer_skips_frozen_parameters():
    model = GPTForCausalLM(GPTConfig(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2))
    model.transformer.h[0].requires_grad_(False)
    optimizer = build_optimizer(model, OptimSection())
    trained = sum(len(group["params"]) for group in optimizer.param_groups)
    assert trained == len(list(model.parameters())) - len(list(model.transformer.h[0].parameters()))
