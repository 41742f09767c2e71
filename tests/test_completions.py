"""Batched completions: as token by token for one prompt, from the model's distribution, each row
from its seed, whichever rows are read with it.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from decoder_types import accepted_types, tiny, tiny_section

from nanogpt_hf.errors import DivergedError
from nanogpt_hf.generate import Completions, completions, generate_completions, generate_tokens
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.model.build import build_config
from nanogpt_hf.model.build import build_model as build_of_recipe

STATES = ["rwkv", "xlstm", "recurrent_gemma"]  # padding on the left would change them
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 2], [3, 4, 5]]
ENDS = (1, 5, 9, 11, 13)
# Prompts and the limits of their completions: a row joins while others are shorter or longer.
UNEVEN = [
    ([17, 4, 33], 8),
    ([6], 12),
    ([40, 41, 3, 8, 22, 50, 51, 7, 30], 3),
    ([12, 4, 58, 32, 2], 12),
    ([12, 4, 58, 32, 2], 12),
    ([12, 4, 58, 32, 2], 1),
    ([20, 21], 0),
    ([29] * 14, 9),
    ([44, 3], 12),
    ([6], 6),
]


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


def complete(model, prompts, seeds, max_new_tokens=8, **options):
    options = {"temperature": 1.0, "end_ids": [1]} | options
    limits = [max_new_tokens] * len(prompts)
    return generate_completions(model, prompts, seeds=seeds, limits=limits, **options)


def make_large(model) -> None:
    """Change the weights so much that a mistake shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.sin(torch.arange(parameter.numel())).view(parameter.shape))


class Drawn(NamedTuple):
    """A completion as a few plain lines draw it: the whole text is read for each token."""

    ids: list[int]
    # The uniform number of each token, and the token's log-probability at the temperature.
    log_probs: list[tuple[float, float]]
    ended: bool


@torch.no_grad()
def drawn_alone(model, prompt, seed, limit, temperature, end_ids=ENDS) -> Drawn:
    ids = list(prompt)
    log_probs = []
    numbers = (np.random.Philox(key=seed).random_raw(limit) >> np.uint64(11)) / 2**53
    for number in numbers:
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        log_p = (logits / (temperature or 1)).log_softmax(-1)
        token = int(logits.argmax())
        if temperature:
            token = int((log_p.double().exp().cumsum(0) <= number).sum())
        ids.append(token)
        log_probs.append((number, log_p[token].item()))
        if token in end_ids:
            break
    new = ids[len(prompt) :]
    return Drawn(new, log_probs, bool(new) and new[-1] in end_ids)


@pytest.fixture
def drawn_log_probs(monkeypatch) -> dict[float, float]:
    """Log-probability of each drawn token at the temperature, by its uniform number."""
    found = {}
    draw = completions.draw_by_quantile

    def noted(logits, numbers, temperature):
        tokens = draw(logits, numbers, temperature)
        log_p = (logits / (temperature or 1)).log_softmax(-1)
        found.update(zip(numbers, log_p.gather(-1, tokens[:, None])[:, 0].tolist(), strict=True))
        return tokens

    monkeypatch.setattr(completions, "draw_by_quantile", noted)
    return found


def assert_equals_rows_alone(model, temperature, batch_sizes, log_probs) -> set[bool]:
    """The completions of UNEVEN equal the ones of plain lines, for every size of the batch.

    Returns how they end: True by a token, False at their limit.
    """
    prompts, limits = zip(*UNEVEN, strict=True)
    seeds = range(len(prompts))
    options = {"limits": limits, "temperature": temperature, "end_ids": ENDS}
    rows = zip(prompts, seeds, limits, strict=True)
    expected = [drawn_alone(model, *row, temperature) for row in rows]
    for size in batch_sizes:
        log_probs.clear()
        found = generate_completions(model, prompts, seeds=seeds, batch_size=size, **options)
        for row, one in enumerate(expected):
            length = int(found.lengths[row])
            assert found.ids[row, :length].tolist() == one.ids, (size, row)
            assert bool(found.ended[row]) == one.ended
            for number, expected_value in one.log_probs:
                assert log_probs[number] == pytest.approx(expected_value, abs=2e-4), (size, row)
            assert not found.ids[row, length:].any()
    return {row.ended for row in expected}


@pytest.mark.one_row_per("architecture", "temperature")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "architecture",
    ["nanogpt_hf", "qwen3", "llama", "gemma2", "llama4_text", "qwen3_moe", "mamba", "lfm2"],
)
def test_rows_that_join_and_leave_equal_rows_alone(architecture, temperature, drawn_log_probs):
    """Windows of attention have four tokens, so that texts are longer."""
    model = tiny(architecture).eval()
    ends = assert_equals_rows_alone(model, temperature, [1, 3, len(UNEVEN)], drawn_log_probs)
    # Greedy completions of some of the models reach their limits only.
    assert ends == {True, False} or not temperature


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", accepted_types())
def test_rows_of_every_type_equal_rows_alone(architecture, drawn_log_probs):
    model = tiny(architecture).eval()
    if "indexed_attention" in (getattr(model.config, "layer_types", None) or ()):
        pytest.skip("many scores of its index are 0, and the width decides which of them it takes")
    for temperature in (0.0, 0.8):
        assert_equals_rows_alone(model, temperature, [3, len(UNEVEN)], drawn_log_probs)


def passes_of(model, monkeypatch) -> list[tuple[int, int]]:
    """Rows and columns of each forward pass from now on."""
    shapes = []
    forward = model.forward

    def counted(ids, **options):
        shapes.append(tuple(ids.shape))
        return forward(ids, **options)

    monkeypatch.setattr(model, "forward", counted)
    return shapes


def test_no_row_is_read_after_its_end(monkeypatch):
    model = build_model()
    shapes = passes_of(model, monkeypatch)
    found = complete(model, PROMPTS * 8, range(32), end_ids=[1, 2, 3], batch_size=4)
    assert len(set(found.lengths.tolist())) > 3
    # The others read prefixes, none of which has a single token.
    steps = [rows for rows, columns in shapes if columns == 1]
    assert sum(steps) == found.lengths.sum()
    # One batch after another would wait for the longest row of each.
    assert len(steps) < found.lengths.view(8, 4).amax(1).sum()


def test_samples_of_one_prompt_read_it_once(monkeypatch):
    model = build_model()
    shapes = passes_of(model, monkeypatch)
    prompts = [prompt for prompt in ([3, 4, 5], [7, 8, 9, 10, 2]) for _ in range(8)]
    complete(model, prompts, range(16), end_ids=[1, 2, 3], batch_size=3)
    assert [shape for shape in shapes if shape[1] > 1] == [(1, 2), (1, 4)]


@pytest.mark.parametrize("architecture", ["nanogpt_hf", "mamba", "lfm2"])
def test_each_forward_pass_is_announced_until_all_processes_have_ended(architecture, monkeypatch):
    """The processes of a sharded model call it equally often."""
    model = tiny(architecture).eval()
    prompts, limits = zip(*UNEVEN, strict=True)
    options = {"temperature": 1.0, "end_ids": ENDS, "batch_size": 3}

    def run(prompts, others: int) -> tuple[list[bool], Completions]:
        """Complete while other processes call the model `others` times."""
        called = []

        def all_ended(ended: bool) -> bool:
            called.append(ended)
            assert len(called) == len(shapes) + 1
            return ended and len(called) > others

        shapes = passes_of(model, monkeypatch)
        found = generate_completions(
            model,
            prompts,
            seeds=range(len(prompts)),
            limits=limits[: len(prompts)],
            all_ended=all_ended,
            **options,
        )
        assert len(shapes) == max(others, called.index(True))
        monkeypatch.undo()
        return called, found

    alone, expected = run(prompts, 0)
    longer, found = run(prompts, len(alone) + 5)
    assert longer.count(True) == 7
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    _, nothing = run([], 4)
    assert [tensor.shape[0] for tensor in nothing] == [0, 0, 0]


def test_texts_that_fill_the_context_do_not_change_the_others():
    model = build_model(n_positions=12)
    prompts = [[3, 4, 5] * 4, [6], [7, 8, 9, 10, 2], [6]]
    options = {"max_new_tokens": 30, "end_ids": (), "temperature": 0.0}
    together = complete(model, prompts, range(4), batch_size=3, **options)
    for row, prompt in enumerate(prompts):
        steps = generate_tokens(model, prompt, **options)
        assert together.ids[row].tolist() == [token for (token,) in steps]


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
    for prompts in (PROMPTS, [[6], [7], [3]]):
        together = complete(model, prompts, [0] * len(prompts), end_ids=(), **options).ids
        for prompt, row in zip(prompts, together.tolist(), strict=True):
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
    found = complete(model, PROMPTS, [0] * 4, temperature=0.0)
    for row, prompt in enumerate(PROMPTS):
        steps = generate_tokens(model, prompt, max_new_tokens=8, temperature=0.0, end_ids={1})
        single = [token for (token,) in steps]
        # the token that ends it is part of a completion
        length = len(single) + int(found.ended[row])
        assert found.lengths[row] == length
        assert found.ids[row, : len(single)].tolist() == single


@pytest.mark.parametrize("temperature", [1e-5, 1e-20, 1e-39, 1e-44, 5e-324])
def test_lowest_temperatures_are_greedy(model, temperature):
    """Logits that are divided by them are infinite."""
    found = complete(model, PROMPTS, range(4), temperature=temperature)
    expected = complete(model, PROMPTS, range(4), temperature=0.0)
    assert torch.equal(found.ids, expected.ids)


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
    prompt = [7, 8, 9, 10, 2, 5, 6, 3, 4]
    seeds = range(40)
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("token", [3, 9])
def test_logits_that_are_not_finite_raise_one_line(token, value, temperature):
    """Also if only a prompt that waits has the token whose embedding is damaged."""
    model = build_model()
    model.transformer.wte.weight.data[token, 0] = value
    with pytest.raises(DivergedError, match="logits are not finite") as caught:
        complete(model, PROMPTS, range(4), temperature=temperature, batch_size=2)
    assert "\n" not in str(caught.value)
