"""The size dial `--depth`: its choices, overrides, and a resolved recipe of plain numbers."""

import pytest
import yaml

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import config_to_dict, config_to_yaml, load_config
from nanogpt_hf.config.names import vocab_size_by_name
from nanogpt_hf.config.schema import get_value
from nanogpt_hf.model.architecture import count_parameters
from nanogpt_hf.model.build import build_config

SIZES = {"source": "my.txt", "tokenizer": "char", "block_size": 64}


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe with these sections beside `data`; return its path."""

    def write(data=None, **sections):
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump({"data": SIZES | (data or {}), **sections}))
        return path

    return write


def parameters(config):
    return count_parameters(
        build_config(
            config.model, vocab_size_by_name(config.data.tokenizer, config.data.vocab_size)[0]
        )
    )


@pytest.mark.parametrize("tokenizer", ["char", "gpt2"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("depth", "ratio"), [(1, 20), (2, 0.5), (5, 20), (12, 3)])
def test_dial_tokens_are_ratio_times_parameters(recipe, depth, ratio, tokenizer, bias):
    path = recipe(
        {"tokenizer": tokenizer}, model={"bias": bias}, train={"tokens_per_parameter": ratio}
    )
    config = load_config(path, {"model.depth": depth})
    trained = config.train.max_steps * config.train.tokens_per_step
    assert abs(trained - ratio * parameters(config)) <= config.train.tokens_per_step / 2


@pytest.mark.parametrize("block_size", [1, 50, 128, 1024])
@pytest.mark.parametrize("width", [None, 36, 127])
def test_dial_choices_are_divisible(recipe, block_size, width):
    stated = [("model.n_embd", str(width))] if width else []
    for depth in (1, 3, 8, 13):
        config = load_config(
            recipe({"block_size": block_size}), [("model.depth", str(depth)), *stated]
        )
        assert config.model.n_embd % config.model.n_head == 0
        micro_batch = config.train.micro_batch_size * block_size
        assert config.train.tokens_per_step % micro_batch == 0
        assert micro_batch <= max(8192, block_size)


def test_depth_12_is_gpt2_small_with_compute_optimal_tokens(recipe):
    config = load_config(recipe({"tokenizer": "gpt2", "block_size": 1024}), {"model.depth": 12})
    assert (config.model.n_layer, config.model.n_head, config.model.n_embd) == (12, 12, 768)
    assert config.train.max_steps * config.train.tokens_per_step == pytest.approx(2.5e9, rel=0.01)
    # by hand: 72 · 12 · 768² + 12 · 12 · 768 · 1024 FLOPs per token, times 20 · 124,337,664 tokens:
    # 1.549e18
    assert config.optim.learning_rate == pytest.approx(0.3118 * 1.549e18**-0.125, rel=0.003)
    assert config.train.tokens_per_step == 2**17  # 0.2920 · 1.549e18^0.3271 = 260,218, rounded down


CHOICES = {
    "model.n_layer": 3,
    "model.n_embd": 40,
    "model.n_head": 8,
    "train.tokens_per_step": 640,
    "train.micro_batch_size": 2,
    "optim.learning_rate": 0.01,
    "optim.min_learning_rate": 1e-7,
    "train.max_steps": 70,
    "optim.warmup_steps": 1,
}


@pytest.mark.parametrize("key", CHOICES)
@pytest.mark.parametrize("source", ["recipe", "command line"])
def test_stated_knob_overrides_the_dial(recipe, key, source):
    section, name = key.split(".")
    stated = {key: CHOICES[key]}
    # The recipe also states the depth.
    if source == "recipe":
        sections = {"model": {"depth": 2}}
        sections[section] = sections.get(section, {}) | {name: stated.pop(key)}
        config = load_config(recipe(**sections))
    else:
        config = load_config(recipe(), stated | {"model.depth": 2})
    assert get_value(config, key) == CHOICES[key]
    row = next(choice for choice in config.derived if choice.key == key)
    assert row.value == CHOICES[key]
    assert row.reason.startswith("stated; the dial chooses ")
    assert {choice.key for choice in config.derived} == set(CHOICES)


def test_learning_rate_scales_with_root_of_stated_batch(recipe):
    chosen = load_config(recipe(), {"model.depth": 4})
    batch = chosen.train.tokens_per_step // 4
    stated = load_config(recipe(), [("model.depth", "4"), ("train.tokens_per_step", str(batch))])
    assert stated.optim.learning_rate == pytest.approx(chosen.optim.learning_rate / 2, rel=0.01)
    assert stated.train.max_steps == pytest.approx(4 * chosen.train.max_steps, abs=2)


def test_resolved_recipe_has_plain_numbers_and_keeps_the_dial(recipe, tmp_path):
    config = load_config(recipe(), [("model.depth", "3"), ("train.tokens_per_parameter", "5")])
    assert config.model.depth is None
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(config_to_yaml(config))
    reloaded = load_config(resolved)
    assert config_to_dict(reloaded) == config_to_dict(config)
    assert reloaded.derived == ()
    larger = load_config(resolved, {"model.depth": 6})
    assert (larger.model.n_layer, larger.model.n_embd) == (6, 384)


@pytest.mark.parametrize(("scale", "rate"), [("original", 0.02), ("match_rms_adamw", 0.00311)])
def test_dial_learning_rate_of_muon_follows_its_scale(recipe, scale, rate):
    optim = {"name": "muon", "muon_scale": scale, "muon_learning_rate": 0.5}
    config = load_config(
        recipe({"tokenizer": "gpt2", "block_size": 1024}, optim=optim), {"model.depth": 4}
    )
    assert config.optim.muon_learning_rate == rate
    assert config.optim.learning_rate == 0.00311
    adamw = load_config(recipe(optim=optim), {"model.depth": 4, "optim.name": "adamw"})
    assert "optim.muon_learning_rate" not in {choice.key for choice in adamw.derived}


def test_rates_over_width(recipe):
    """Muon's rate is the same at any width. AdamW's is at most 4e-3 for matrices, and at most
    1.6e-2 for what Muon leaves to it.
    """
    muon = {"optim.name": "muon"}
    settings = {
        "adamw": {},
        "muon": muon,
        "match": muon | {"optim.muon_scale": "match_rms_adamw"},
        "short": muon | {"train.tokens_per_parameter": 0.01},
    }
    chosen = {
        (name, depth): load_config(recipe(), knobs | {"model.depth": depth}).optim
        for name, knobs in settings.items()
        for depth in (1, 2, 4, 6, 12)
    }
    assert {chosen["muon", depth].muon_learning_rate for depth in (1, 2, 4, 6, 12)} == {0.02}
    rates = {key: optim.learning_rate for key, optim in chosen.items()}
    # By hand: 72 · 64² + 12 · 64 · 64 FLOPs per token, times 20 · 123,072 parameters; and
    # 72 · 2 · 128² + 12 · 2 · 128 · 64, times 20 · 541,312.
    assert rates["muon", 1] == pytest.approx(0.3118 * 8.469e11**-0.125, rel=0.005)
    assert rates["muon", 2] == pytest.approx(0.3118 * 2.767e13**-0.125, rel=0.005)
    assert rates["short", 1] == rates["short", 2] == 1.6e-2
    for depth in (1, 2):
        assert rates["adamw", depth] == rates["match", depth] == 4e-3
    # Where the formula gives less than both limits, they are equal.
    for depth in (6, 12):
        assert rates["adamw", depth] == rates["match", depth] == rates["muon", depth] < 4e-3


def test_dry_run_and_estimate_show_dial_choices(recipe, capsys, tmp_path, text_file):
    path = recipe({"source": str(text_file), "dir": str(tmp_path / "data")})
    assert main(argv("pretrain {} --depth 2 --dry-run", path)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert main(argv("estimate {} --depth 2", path)) == 0
    estimated = capsys.readouterr().out.splitlines()
    for key in CHOICES:
        assert next(line for line in printed if line.startswith(f"  {key} ")) in estimated
    assert "  depth: null" in printed
