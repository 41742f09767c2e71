"""Activation checkpointing: which blocks compute again, what they keep; no number changes."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.recompute import check_level, recompute_blocks

SIZES = {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 32}


class Counting(TorchDispatchMode):
    """Counts calls of operations by name."""

    def __init__(self):
        super().__init__()
        self.calls: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


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


def test_selective_blocks_repeat_no_product_and_no_attention_without_dropout():
    counts = {}
    for level in ("", "true", "selective"):
        with Counting() as counted:
            gradients(level)
        products = counted.calls["mm"] + counted.calls["addmm"]
        counts[level] = products, counted.calls["_scaled_dot_product_flash_attention_for_cpu"]
    assert counts[""] == counts["selective"]
    # but for the last product of a block, whose result no gradient needs
    assert counts["true"] == (counts[""][0] + 3 * 5, counts[""][1] + 3)


def test_frozen_blocks_below_are_not_computed_again():
    assert gradients("true", frozen=2)[1] == {0: 1, 1: 1, 2: 2}


def test_evaluation_computes_nothing_again():
    model = build_model(build_config(ModelSection(**SIZES), vocab_size=61), seed=0).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(ids).logits
        generated = model.generate(ids, max_new_tokens=4, do_sample=False)
        recompute_blocks(model, "true")
        assert torch.equal(model(ids).logits, expected)
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)


def test_one_block_of_more_than_there_are_is_refused():
    check_level("3", 3)
    with pytest.raises(UserError, match=r"checkpointing 4: the model has 3 blocks; set true"):
        check_level("4", 3)
