"""Models from recipes."""

import torch

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.model.build import build_config, build_model

SECTION = ModelSection(n_layer=1, n_head=2, n_embd=8, n_positions=8)


def test_vocabulary_is_padded_as_in_the_recipe():
    assert build_config(SECTION, 61).padded_vocab_size is None
    section = ModelSection(pad_vocab_to_multiple_of=64)
    config = build_config(section, 50257)
    assert (config.vocab_size, config.padded_vocab_size) == (50257, 50304)


def test_initial_weights_follow_the_seed_without_global_state():
    config = build_config(SECTION, 61)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = build_model(config, seed=1)
    assert torch.equal(torch.rand(1), expected)
    repeated = build_model(config, seed=1)
    other = build_model(config, seed=2)
    assert torch.equal(first.lm_head.weight, repeated.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
