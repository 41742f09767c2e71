import json
from pathlib import Path

import pytest
import yaml

from nanogpt_hf.commands import main
from nanogpt_hf.config.load import config_to_dict, config_to_yaml, load_config
from nanogpt_hf.config.names import data_folder
from nanogpt_hf.config.schema import Config, get_value
from nanogpt_hf.config.stated import as_overrides
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


@pytest.mark.parametrize("text", ["a\0b", "\ud800", "\0"])
@pytest.mark.parametrize("knob", ["data.dir", "data.source", "tracking.trackers"])
def test_text_that_no_recipe_could_hold_is_refused(knob, text):
    overrides = {"data.source": "x"} | {knob: [text] if knob == "tracking.trackers" else text}
    with pytest.raises(ConfigError, match=knob):
        load_config(None, overrides, name="x")


@pytest.mark.parametrize("other", [{"align.loss": "dpo"}, {"train.stages": "[{at: 3}]"}])
def test_problem_with_a_long_value_is_short(other):
    values = {"data.source": "x", "train.budget": "5" * 10_000} | other
    with pytest.raises(ConfigError) as raised:
        load_config(None, values, name="x")
    assert max(map(len, raised.value.problems)) < 400


def test_warmup_of_a_budget_is_compared_with_steps_when_they_are_known():
    # A small model takes more steps in a long time than train.max_steps has by default.
    values = {"data.source": "x", "optim.warmup_steps": 700_000}
    config = load_config(None, values | {"train.budget": "99h"}, name="x")
    assert config.optim.warmup_steps == 700_000
    with pytest.raises(ConfigError, match="700000 is more than"):
        load_config(None, values, name="x")


NOTATIONS = {
    "train.seed": {
        "491520": 491_520,
        "491_520": 491_520,
        # Messages print numbers so.
        "491,520": 491_520,
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
        '["a, b", c ]': ["a, b", "c"],
        """[ "The ", 'If "you" ']""": ["The ", 'If "you" '],
        "[rl:arithmetic, 007, x.yaml]": ["rl:arithmetic", "007", "x.yaml"],
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


def test_lowest_rate_of_the_recipe_is_left_out_under_a_lower_peak(recipe, caplog):
    caplog.set_level("INFO")
    rates = "optim: {learning_rate: 3e-3, min_learning_rate: 6e-5}\n"
    path = recipe(MINIMAL + rates, "lower.yaml")
    assert load_config(path, {"optim.learning_rate": 6e-5}).optim.min_learning_rate == 6e-5
    assert caplog.messages == []
    assert load_config(path, {"optim.learning_rate": 5e-5}).optim.min_learning_rate == 5e-6
    (line,) = caplog.messages
    assert "lower.yaml: optim.min_learning_rate: left out, 6e-05 is above" in line
    # What the command line states is not left out, and a recipe that contradicts itself is refused.
    both = [("optim.learning_rate", "5e-5"), ("optim.min_learning_rate", "6e-5")]
    (problem,) = problems(path, both)
    assert problem.startswith("--optim.min_learning_rate: 6e-05 is above optim.learning_rate 5e-05")
    wrong = recipe(MINIMAL + rates.replace("3e-3", "3e-5"))
    assert "optim.min_learning_rate: 6e-05 is above" in problems(wrong)[0]


ONE_KNOB = [
    "pretrain quickstart --train.max_steps 10",
    "pretrain quickstart --optim.learning_rate 5e-5",
    "pretrain quickstart_tuned --train.max_steps 3 --optim.learning_rate 1e-6",
    "sweep quickstart --optim.learning_rate 1e-5,1e-3",
]


@pytest.mark.parametrize("command", ONE_KNOB)
def test_one_knob_of_the_first_recipe_can_be_changed_alone(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), "--dry-run"]) == 0


FOLDERS = [
    # The folder of the recipe, and what the command line states.
    ("", {}, "data/tiny"),
    ("", {"data.source": "python-docs"}, "data/tiny"),
    ("", {"data.source": "texts/my.txt"}, "data/my-char"),
    ("", {"data.source": "my.txt", "data.tokenizer": "user/words"}, "data/my-words"),
    ("", {"data.source": "my.txt", "data.dir": "here"}, "here"),
    ("", {"data.source": "https://host/a.txt?token=secret"}, "data/a-char"),
    ("there", {}, "there"),
    ("there", {"data.source": "my.txt"}, "there"),
    ("there", {"data.source": "my.txt", "data.dir": "here"}, "here"),
]


@pytest.mark.parametrize(("folder", "overrides", "expected"), FOLDERS)
def test_another_text_is_prepared_in_a_folder_of_its_own(recipe, folder, overrides, expected):
    stated = f", dir: {folder}" if folder else ""
    path = recipe(f"data: {{source: python-docs, tokenizer: char{stated}}}\n")
    config = load_config(path, as_overrides(overrides))
    assert config.data.dir == expected
    # A run that moves, and whose text moves, keeps its prepared data.
    (path.parent / "recipe.yaml").write_text(config_to_yaml(config))
    moved = load_config(path.parent / "recipe.yaml", {"data.source": "elsewhere.txt"})
    assert moved.data.dir == expected


def test_folder_of_a_mixture_is_named_after_its_texts():
    mixture = [{"source": "texts/a.txt", "weight": 1}, {"source": "user/b", "weight": 2}]
    assert data_folder(mixture, "gpt2") == "data/a-b-gpt2"


def test_recipe_without_a_text_keeps_its_folder(recipe):
    path = recipe("data: {tokenizer: char, dir: there}\n")
    assert load_config(path, {"data.source": "my.txt"}).data.dir == "there"


def test_shipped_recipe_is_found_by_bare_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config("quickstart")
    assert config.name == "quickstart"
    assert config.data.source == "python-docs"
    assert problems("quickstrat") == ["no such recipe; did you mean quickstart?"]
    assert problems("recipes/quickstart.yaml") == ["no such recipe; did you mean quickstart?"]
    Path("quickstart").write_text(MINIMAL + "train: {max_steps: 30_000}\n")
    assert load_config("quickstart").train.max_steps == 30_000


@pytest.mark.parametrize("extra", [{"id2label": {0: "a"}}, {"names": {None: [1, 2.5], "b": None}}])
def test_written_recipe_has_the_keys_of_a_mapping(extra):
    knobs = {"model.architecture": "llama", "model.extra": extra, "data.source": "python-docs"}
    written = yaml.safe_load(config_to_yaml(load_config(None, knobs, name="mine")))
    assert written["model"]["extra"] == extra


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
        ("model.extra.eos_token_id", "[3, 4]"),
        ("model.extra.id2label", '{0: a, 1: "[b]"}'),
        ("model.n_kv_head", "4"),
    ]
    config = load_config(path, overrides)
    fields = {
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 5e5},
        "attention_bias": True,
        "hidden_act": "relu",
        "eos_token_id": [3, 4],
        "id2label": {"0": "a", "1": "[b]"},
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
