"""Batched completions: as token by token for one prompt, from the model's distribution, each row
from its seed.
"""

import pytest
import torch
from decoder_types import tiny, tiny_section

from nanogpt_hf.errors import DivergedError
from nanogpt_hf.generate import generate_completions, generate_tokens
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.model.build import build_config
from nanogpt_hf.model.build import build_model as build_of_recipe

STATES = ["rwkv", "xlstm", "recurrent_gemma"]  # padding on the left would change them
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 2], [3, 4, 5]]


def build_model(**sizes) -> GPTForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2} | sizes
    model = GPTForCausalLM(GPTConfig(**sizes, bos_token_id=None, eos_token_id=None))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> GPTForCausalLM:
    return build_model()


def complete(model, prompts, seeds, **options):
    options = {"max_new_tokens": 8, "temperature": 1.0, "end_ids": [1]} | options
    return generate_completions(model, prompts, seeds=seeds, **options)


def make_large(model) -> None:
    """Change the weights so much that a mistake shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.sin(torch.arange(parameter.numel())).view(parameter.shape))


def without_cache(model, prompt, count) -> list[int]:
    """The likeliest tokens, each from the whole text before it."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    "architecture", ["mamba", "lfm2", "qwen3_5_text", "without attention", *STATES]
)
def test_states_and_convolutions_give_the_tokens_of_whole_texts(architecture):
    section = tiny_section("lfm2" if architecture == "without attention" else architecture)
    if architecture == "without attention":
        section.extra["layer_types"] = ["conv", "conv"]
    model = build_of_recipe(build_config(section, 12), 0).eval()
    make_large(model)
    options = {"max_new_tokens": 6, "temperature": 0.0}
    together = generate_completions(model, PROMPTS, seeds=[0] * 4, end_ids=(), **options).ids
    for prompt, row in zip(PROMPTS, together.tolist(), strict=True):
        single = [token for (token,) in generate_tokens(model, prompt, end_ids=(), **options)]
        assert single == row == without_cache(model, prompt, 6)


def test_cached_tokens_are_counted_if_the_first_layer_has_no_attention():
    """bamba itself gives each token after the first pass position 0."""
    model = tiny("bamba").eval()
    make_large(model)
    prompt = PROMPTS[2]
    steps = generate_tokens(model, prompt, max_new_tokens=12, temperature=0.0, end_ids=())
    assert [token for (token,) in steps] == without_cache(model, prompt, 12)


def test_greedy_rows_equal_generation_of_single_prompts(model):
    completions = complete(model, PROMPTS, [0] * 4, temperature=0.0)
    for row, prompt in enumerate(PROMPTS):
        steps = generate_tokens(model, prompt, max_new_tokens=8, temperature=0.0, end_ids={1})
        single = [token for (token,) in steps]
        # the token that ends it is part of a completion
        length = len(single) + int(completions.ended[row])
        assert completions.lengths[row] == length
        assert completions.ids[row, : len(single)].tolist() == single


def test_sampled_rows_depend_on_their_seed_and_not_on_other_rows(model):
    completions = complete(model, PROMPTS, [5, 6, 7, 5])
    assert torch.equal(completions.ids[0], completions.ids[3])
    assert not torch.equal(completions.ids[0], complete(model, PROMPTS[:1], [8]).ids[0])
    order = [2, 0, 3, 1]
    shuffled = complete(
        model, [PROMPTS[row] for row in order], [[5, 6, 7, 5][row] for row in order]
    )
    for ours, theirs in zip(shuffled, completions, strict=True):
        assert torch.equal(ours, theirs[order])


def test_blocks_of_tokens_are_counted_from_the_first_of_a_row():
    """deepseek_v4 attends to blocks of four tokens: padding on the left would shift them."""
    model = tiny("deepseek_v4").eval()
    prompt, seeds = [7, 8, 9, 10, 2, 5, 6, 3, 4], range(40)
    alone = complete(model, [prompt] * 40, seeds).ids
    beside = complete(model, [prompt] * 40 + [[*prompt, *prompt]], [*seeds, 0]).ids
    assert torch.equal(beside[:40], alone)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_first_tokens_follow_the_models_distribution(model, temperature):
    count = 3000
    drawn = complete(
        model, [PROMPTS[0]] * count, range(count), max_new_tokens=1, temperature=temperature
    ).ids[:, 0]
    with torch.no_grad():
        expected = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / temperature).softmax(-1)
    shares = torch.bincount(drawn, minlength=12) / count
    assert (shares - expected).abs().max() < 4 * (0.25 / count) ** 0.5


def test_completion_ends_with_an_end_token_and_is_padded_by_zeros(model):
    ids, lengths, ended = complete(model, PROMPTS * 20, range(80), end_ids=[1, 2])
    assert 0 < ended.sum() < 80
    for row, length, end in zip(ids.tolist(), lengths.tolist(), ended.tolist(), strict=True):
        assert (row[length - 1] in (1, 2)) == end
        assert not {1, 2} & set(row[: length - 1])
        assert row[length:] == [0] * (8 - length)
        assert end or length == 8


def test_logits_that_are_not_finite_raise_one_line():
    model = build_model()
    model.transformer.ln_f.weight.data[0] = torch.nan
    with pytest.raises(DivergedError, match="logits are not finite") as caught:
        complete(model, PROMPTS, range(4))
    assert "\n" not in str(caught.value)
