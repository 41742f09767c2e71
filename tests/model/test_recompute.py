"""Activation checkpointing: which blocks compute again, what they keep; no number changes."""

from collections import Counter
from functools import partial

import pytest
import torch

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.recompute import recompute_blocks

SIZES = {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 32}


def gradients(level: str, architecture="gpt2", frozen=-1, **knobs) -> tuple[dict, Counter]:
    """All gradients of a micro-batch, and how often each block's MLP and products ran."""
    section = ModelSection(architecture=architecture, **SIZES | knobs)
    model = build_model(build_config(section, vocab_size=61), seed=0).train()
    architecture_of(model).freeze(model, frozen)
    runs: Counter = Counter()
    for index, block in enumerate(architecture_of(model).blocks(model)):
        block.mlp.register_forward_pre_hook(lambda *_, index=index: runs.update([index]))
    if level:
        recompute_blocks(model, level)
    ids = torch.randint(0, 61, (4, 32), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    batch = {"input_ids": ids, "shift_labels": ids, "num_items_in_batch": 1, "skip_logits": True}
    model(**batch, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, runs


@pytest.mark.parametrize(
    ("architecture", "knobs"),
    [
        ("gpt2", {"dropout": 0.1}),
        ("qwen3", {"extra": {"attention_dropout": 0.1}}),
        ("gpt_oss", {"extra": {"num_local_experts": 4}}),  # changes results in place
    ],
)
def test_gradients_are_those_of_the_plain_model_bit_for_bit(architecture, knobs):
    expected, runs = gradients("", architecture, **knobs)
    assert runs == {0: 1, 1: 1, 2: 1}
    repeated = {"true": {0: 2, 1: 2, 2: 2}, "2": {0: 2, 1: 1, 2: 2}, "3": {0: 2, 1: 1, 2: 1}}
    for level in ("true", "2", "3", "selective"):
        found, runs = gradients(level, architecture, **knobs)
        assert runs == repeated.get(level, repeated["true"])
        assert all(torch.equal(found[name], expected[name]) for name in expected), level


def test_selective_blocks_repeat_no_product_and_no_attention_without_dropout(counted):
    counts = {}
    for level in ("", "true", "selective"):
        calls = counted(partial(gradients, level))
        products = calls["mm"] + calls["addmm"]
        counts[level] = products, calls["_scaled_dot_product_flash_attention_for_cpu"]
    assert counts[""] == counts["selective"]
    # but for the last product of a block, whose result no gradient needs
    assert counts["true"] == (counts[""][0] + 3 * 5, counts[""][1] + 3)


def test_frozen_blocks_below_are_not_computed_again():
    assert gradients("true", frozen=2)[1] == {0: 1, 1: 1, 2: 2}
