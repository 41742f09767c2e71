import json
from pathlib import Path

import pytest

from nanogpt_hf.config.load import config_to_dict, config_to_yaml, load_config
from nanogpt_hf.config.schema import Config, get_value
from nanogpt_hf.errors import ConfigError

MINIMAL = "data: {source: python-docs}\n"  # the smallest complete recipe


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe; return its path."""

    def write(text, name="tiny.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def problems(path, overrides=()):
    """The problems of a recipe, without its path at the start of each line."""
    with pytest.raises(ConfigError) as raised:
        load_config(path, list(overrides))
    lines = raised.value.problems
    assert lines
    count = len(lines)
    assert str(raised.value) == "\n".join(
        [*lines, f"{count} problem{'s' if count > 1 else ''}; nothing was started."]
    )
    assert not any("\n" in line for line in lines), "a problem is one line"
    return [line.removeprefix(f"{path}: ") for line in lines]


def test_command_line_beats_recipe_beats_defaults(recipe):
    path = recipe(MINIMAL + "optim: {beta1: 0.5, beta2: 0.5}\n")
    config = load_config(path, [("optim.beta2", "0.75"), ("optim.beta2", "0.25")])
    assert config.optim.beta1 == 0.5
    assert config.optim.beta2 == 0.25
    assert config.optim.weight_decay == Config().optim.weight_decay


NOTATIONS = {
    "train.seed": {
        "491520": 491_520,
        "491_520": 491_520,
        "491,520": 491_520,  # as printed in our messages
        "1e6": 1_000_000,
        "1.0": 1,
        "010": 10,  # YAML 1.1 alone would read eight
        "12345678901234567890": 12345678901234567890,  # float() would lose its last digits
    },
    "optim.learning_rate": dict.fromkeys(["6e-4", "6E-4", "0.0006"], 6e-4),
    "data.revision": dict.fromkeys(["null", "~", "None"]),
    "model.bias": {"true": True, "True": True, "false": False, "FALSE": False},
    "eval.tokens": {"all": "all", "1e6": 1_000_000},
    "tracking.trackers": {
        "[a, b]": ["a", "b"],
        "a,b": ["a", "b"],
        "a": ["a"],
        "[]": [],
    },
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [(key, text, value) for key, values in NOTATIONS.items() for text, value in values.items()],
)
def test_notations_in_a_recipe_and_on_the_command_line(recipe, key, text, value):
    section, name = key.split(".")
    stated = recipe(f"{section}:\n  {name}: {text}\n")
    more = [("data.source", "x"), ("optim.min_learning_rate", "0")]
    assert get_value(load_config(stated, more), key) == value
    assert get_value(load_config(recipe(MINIMAL), [*more, (key, text)]), key) == value


def test_all_mistakes_are_reported_at_once(recipe):
    path = recipe(
        "modle: {n_layer: 1}\noptim: {learnig_rate: 1, beta1: fast}\ntrain: {max_steps: 0}\n"
    )
    message = problems(path, [("train.seed", "x"), ("eval.evry", "3")])
    assert message == [
        "modle: unknown section; did you mean model?",
        "optim.learnig_rate: unknown key; did you mean optim.learning_rate?",
        "optim.beta1: expected a number, got 'fast'",
        "train.max_steps: must be at least 1, got 0",
        "--train.seed: expected an integer, got 'x'",
        "--eval.evry: unknown key; did you mean eval.every?",
        "data.source: required: the text to train on, for example python-docs",
    ]


@pytest.mark.parametrize(
    "text",
    [
        MINIMAL,
        "data: {source: 'a: b # c', text_column: 'null', dir: 'über/x y'}\n",
        "data: {source: user/name, revision: '1.10'}\n",
        MINIMAL + "tracking: {trackers: [a, b]}\n",
        MINIMAL
        + (
            "optim: {learning_rate: 1e-5, min_learning_rate: 0.1e-5}\neval: {tokens: "
            "all}\nmodel: {bias: true}\n"
        ),
        ("data: {source: 'true', config: '3', split: 'null'}\ntracking: {project: '[x]'}\n"),
        "data: {source: 'https://example.org/x', sha256: '00e1'}\n",
    ],
)
def test_resolved_recipe_loads_as_the_same_config(recipe, tmp_path, text):
    config = load_config(recipe(text), [("train.seed", "12345678901234567890")])
    run = tmp_path / "tiny"  # a run folder's recipe is named after its folder
    run.mkdir()
    (run / "recipe.yaml").write_text(config_to_yaml(config), encoding="utf-8")
    assert load_config(run / "recipe.yaml") == config


def test_recorded_recipe_has_the_numbers_of_shares_and_of_what_follows_from_the_peak(recipe):
    schedule = {"warmup_steps": 0.05, "learning_rate": 3e-3}
    path = recipe(MINIMAL + f"optim: {json.dumps(schedule)}\ntrain: {{max_steps: 500}}\n")
    recorded = config_to_dict(load_config(path))["optim"]
    assert (recorded["warmup_steps"], recorded["min_learning_rate"]) == (25, 3e-4)
    more = {"train.max_steps": 10, "optim.learning_rate": 1e-5}
    recorded = config_to_dict(load_config(path, more))["optim"]
    assert (recorded["warmup_steps"], recorded["min_learning_rate"]) == (0, 1e-6)
    # What is stated stays.
    stated = {"optim.warmup_steps": 7, "optim.min_learning_rate": 0}
    recorded = config_to_dict(load_config(path, stated))["optim"]
    assert (recorded["warmup_steps"], recorded["min_learning_rate"]) == (7, 0)


def test_shipped_recipe_is_found_by_bare_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config("quickstart")
    assert config.name == "quickstart"
    assert config.data.source == "python-docs"
    assert problems("quickstrat") == ["no such recipe; did you mean quickstart?"]
    assert problems("recipes/quickstart.yaml") == ["no such recipe; did you mean quickstart?"]
    Path("quickstart").write_text(MINIMAL + "train: {max_steps: 30_000}\n")
    assert load_config("quickstart").train.max_steps == 30_000


def test_extra_fields_of_an_architecture(recipe):
    path = recipe(
        MINIMAL
        + (
            "model: {architecture: llama, extra: {rms_norm_eps: 1e-5, rope_parameters: "
            "{rope_theta: 5e5}}}"
        )
    )
    overrides = [
        ("model.extra.attention_bias", "true"),
        ("model.extra.hidden_act", "relu"),
        ("model.n_kv_head", "4"),
    ]
    config = load_config(path, overrides)
    fields = {
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 5e5},
        "attention_bias": True,
        "hidden_act": "relu",
    }
    assert config.model.extra == fields
    assert load_config(recipe(config_to_yaml(config))) == config
    assert load_config(path, [("model.extra", "{a: 1, b: null, c: [1.5, x]}")]).model.extra == {
        "a": 1,
        "b": None,
        "c": [1.5, "x"],
    }


def test_knobs_of_another_architecture_are_refused(recipe):
    llama = recipe(MINIMAL + "model: {architecture: llama, bias: true, dropout: 0.1, n_kv_head: 5}")
    knobs = [problem.partition(": ")[0] for problem in problems(llama)]
    assert knobs == ["model.n_kv_head", "model.bias", "model.dropout"]


def test_values_that_follow_from_others(recipe, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = recipe(MINIMAL, "my_first.yaml")
    config = load_config(path)
    assert (config.name, config.data.dir) == ("my_first", "data/my_first")
    assert load_config(path, [("data.dir", "~/tokens")]).data.dir == str(tmp_path / "tokens")
    split = {"data.validation_fraction": 0, "data.validation_split": "validation"}
    assert load_config(path, split | {"data.source": "a/b"}).data.validation_fraction == 0
    assert config.model.init == "gpt2"
    assert load_config(path, {"model.architecture": "llama"}).model.init == "own"
