"""Stages of a model: together they compute what the whole model does."""

import copy

import pytest
import torch

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.distributed import pipeline_stages
from nanogpt_hf.distributed.pipeline_stages import (
    Links,
    ModelStage,
    split_blocks,
    stages_problem,
    tiny_model,
)
from nanogpt_hf.model.build import build_config, build_model
from nanogpt_hf.model.head_gpt import CACHE


class Chain(Links):
    """Links of stages in one process that run one after the other: the last value that one sent."""

    def __init__(self):
        self.hidden = None

    def receive(self, hidden):
        assert hidden.shape == self.hidden.shape
        return self.hidden

    def send(self, hidden):
        self.hidden = hidden


def section(architecture: str, **knobs) -> ModelSection:
    return ModelSection(
        architecture=architecture, n_layer=3, n_head=2, n_embd=32, n_positions=16, **knobs
    )


@pytest.mark.parametrize(
    ("blocks", "head", "count", "sizes"),
    [
        (12, 0.1, 2, [6, 6]),
        (12, 5.4, 2, [9, 3]),  # gpt2_124m
        (12, 5.4, 4, [3, 4, 4, 1]),
        (48, 2.6, 4, [12, 13, 13, 10]),
        (3, 0.1, 2, [2, 1]),
        (3, 9.0, 3, [1, 1, 1]),
        (4, 0.0, 3, [1, 2, 1]),
    ],
)
def test_blocks_are_split_by_compute(blocks, head, count, sizes):
    split = split_blocks(blocks, head, count)
    assert [len(part) for part in split] == sizes
    assert [i for part in split for i in part] == list(range(blocks))


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "nanochat"])
@pytest.mark.parametrize("count", [2, 3])
def test_stages_in_turn_equal_the_whole_model(architecture, count):
    whole = build_model(build_config(section(architecture), vocab_size=61), seed=0).eval()
    chain = Chain()
    models = [copy.deepcopy(whole) for _ in range(count)]
    stages = [ModelStage(model, index, count, chain) for index, model in enumerate(models)]
    ids = torch.arange(32).view(2, 16)
    labels = ids.roll(-1, 1)
    with torch.no_grad():
        expected = whole(ids, shift_labels=labels, num_items_in_batch=1)
        for model in models:
            out = model(ids, shift_labels=labels, num_items_in_batch=1)
        assert torch.equal(out.logits, expected.logits)
        hidden = ids
        for stage in stages[:-1]:
            hidden = stage.micro_batch(hidden)
        assert torch.equal(stages[-1].micro_batch(hidden, shift_labels=labels), expected.loss)
    names = [name for model in models for name, _ in model.named_parameters()]
    copied = ["lm_head.weight"] if stages[0].tied_name else []
    assert sorted(names) == sorted([*(name for name, _ in whole.named_parameters()), *copied])


def test_stages_generate_with_a_cache_as_the_whole_model():
    whole = build_model(build_config(section("gpt2"), vocab_size=61), seed=0).eval()
    chain = Chain()
    models = [copy.deepcopy(whole) for _ in range(2)]
    for index, model in enumerate(models):
        ModelStage(model, index, 2, chain)
    ids = torch.arange(10).view(1, 10)
    caches = [None, None]
    cache = None
    with torch.no_grad():
        for tokens in (ids[:, :7], ids[:, 7:8], ids[:, 8:]):
            expected = whole(tokens, **{CACHE: cache}, use_cache=True)
            cache = expected[CACHE]
            for index, model in enumerate(models):
                out = model(tokens, **{CACHE: caches[index]}, use_cache=True)
                caches[index] = out[CACHE]
            torch.testing.assert_close(out.logits, expected.logits, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "nanochat"])
def test_decoder_is_cut(architecture):
    assert stages_problem(section(architecture)) is None


def test_decoder_that_cannot_be_cut_is_refused():
    # its blocks return tuples
    assert "cannot be cut into stages" in str(stages_problem(section("falcon")))


def test_tiny_model_of_a_mixture_has_tiny_experts():
    widths = {"num_experts": 64, "moe_intermediate_size": 11008}
    model = tiny_model(section("qwen3_moe", extra=widths))
    assert model.config.num_experts == 64
    assert model.num_parameters() < 1_000_000


def test_architecture_is_cut_once_for_all_layouts(monkeypatch):
    built = []
    monkeypatch.setattr(pipeline_stages, "tiny_model", lambda s: built.append(s) or tiny_model(s))
    # Sizes that no other test has, since answers are remembered.
    for width in (48, 48, 64):
        assert stages_problem(section("llama", n_inner=width)) is None
    assert [each.n_inner for each in built] == [48, 64]
