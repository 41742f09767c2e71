"""Models from recipes and folders."""

import pytest
import torch

from nanogpt_hf.config.schema import ModelSection
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.build import build_gpt_config, build_model, load_model

SECTION = ModelSection(n_layer=1, n_head=2, n_embd=8, n_positions=8)


def test_vocabulary_is_the_tokenizers_padded_as_the_recipe_says():
    assert build_gpt_config(SECTION, 61).padded_vocab_size is None
    section = ModelSection(pad_vocab_to_multiple_of=64)
    config = build_gpt_config(section, 50257)
    assert (config.vocab_size, config.padded_vocab_size) == (50257, 50304)
    assert build_gpt_config(ModelSection(vocab_size=50304), 50257).padded_vocab_size == 50304


def test_a_vocabulary_larger_than_the_models_is_the_users_mistake():
    with pytest.raises(UserError, match="the tokenizer has 61 tokens, more than the model's 60"):
        build_gpt_config(ModelSection(vocab_size=60), 61)


def test_fresh_weights_follow_the_seed_and_leave_the_global_generator_alone():
    config = build_gpt_config(SECTION, 61)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = build_model(config, seed=1)
    assert torch.equal(torch.rand(1), expected)
    again, other = build_model(config, seed=1), build_model(config, seed=2)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_what_is_no_model_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="not a model folder"):
        load_model(str(tmp_path))
    with pytest.raises(UserError, match="looked up on the Hub") as caught:
        load_model("nobody/nothing")
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded as a GPT-2 model"):
        load_model(str(tmp_path))
