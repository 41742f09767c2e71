import re
from pathlib import Path

import pytest

from nanogpt_hf.config.checks import divisors
from nanogpt_hf.config.load import config_to_dict, config_to_yaml, load_config
from nanogpt_hf.config.schema import KNOBS, SECTIONS, Config, get_value
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
    config = load_config(path, [("optim.beta2", "0.25")])
    assert config.optim.beta1 == 0.5
    assert config.optim.beta2 == 0.25
    assert config.optim.weight_decay == Config().optim.weight_decay


def test_the_last_override_of_a_knob_counts(recipe):
    config = load_config(recipe(MINIMAL), [("train.seed", "1"), ("train.seed", "2")])
    assert config.train.seed == 2


def test_recipe_changes_only_the_knobs_it_states(recipe):
    config, defaults = load_config(recipe(MINIMAL + "train: {seed: 7}\n")), Config()
    stated = {"data.source", "data.dir", "train.seed", "model.init"}
    assert {key for key in KNOBS if get_value(config, key) != get_value(defaults, key)} == stated


def test_configs_do_not_share_their_lists(recipe):
    path = recipe(MINIMAL)
    load_config(path).tracking.trackers.append("wandb")
    assert load_config(path).tracking.trackers == []
    assert Config().tracking.trackers == []


@pytest.mark.parametrize("text", ["6e-4", "6E-4", "0.0006", "'6e-4'"])
def test_float_notations(recipe, text):
    path = recipe(MINIMAL + f"optim: {{learning_rate: {text}, min_learning_rate: 0}}\n")
    assert load_config(path).optim.learning_rate == 6e-4
    override = [("optim.learning_rate", text.strip("'")), ("optim.min_learning_rate", "0")]
    assert load_config(recipe(MINIMAL), override).optim.learning_rate == 6e-4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("491520", 491_520),
        ("491_520", 491_520),
        ("491,520", 491_520),  # as printed in our messages
        ("1e6", 1_000_000),
        ("1.0", 1),
        ("010", 10),  # YAML 1.1 alone would read eight
        ("12345678901234567890", 12345678901234567890),  # float() would lose its last digits
    ],
)
def test_integer_notations(recipe, text, value):
    assert load_config(recipe(MINIMAL + f"train:\n  seed: {text}\n")).train.seed == value
    assert load_config(recipe(MINIMAL), [("train.seed", text)]).train.seed == value


@pytest.mark.parametrize("text", ["1.10", "0123456", "2024-01-01", "on", "1e5"])
def test_text_is_not_interpreted_by_yaml(recipe, text):
    # A revision 1.10 must not become 1.1, nor a project `on` true.
    config = load_config(
        recipe(f"data: {{source: x, revision: {text}}}\ntracking: {{project: {text}}}\n")
    )
    assert config.data.revision == text
    assert config.tracking.project == text


@pytest.mark.parametrize("text", ["null", "~", "None", ""])
def test_null_unsets_a_knob(recipe, text):
    path = recipe(f"data:\n  source: x\n  revision: {text}\n")
    assert load_config(path).data.revision is None


def test_null_on_the_command_line_unsets_a_knob(recipe):
    path = recipe("data: {source: x, sha256: abc}\n")
    assert load_config(path, [("data.sha256", "null")]).data.sha256 is None


@pytest.mark.parametrize(
    "text", ["[wandb, tensorboard]", "wandb,tensorboard", '["wandb", "tensorboard"]']
)
def test_list_of_names(recipe, text):
    assert load_config(recipe(MINIMAL + f"tracking:\n  trackers: {text}\n")).tracking.trackers == [
        "wandb",
        "tensorboard",
    ]


def test_list_of_names_on_the_command_line(recipe):
    path = recipe(MINIMAL + "tracking: {trackers: [wandb]}\n")
    assert load_config(path, [("tracking.trackers", "[a, b]")]).tracking.trackers == ["a", "b"]
    assert load_config(path, [("tracking.trackers", "a")]).tracking.trackers == ["a"]
    assert load_config(path, [("tracking.trackers", "[]")]).tracking.trackers == []


def test_tokens_all_or_a_number(recipe):
    assert load_config(recipe(MINIMAL), [("eval.tokens", "all")]).eval.tokens == "all"
    assert load_config(recipe(MINIMAL), [("eval.tokens", "1e6")]).eval.tokens == 1_000_000


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("True", True), ("false", False), ("FALSE", False)]
)
def test_boolean_notations(recipe, text, value):
    assert load_config(recipe(MINIMAL + f"model: {{bias: {text}}}\n")).model.bias is value
    assert load_config(recipe(MINIMAL), [("model.bias", text)]).model.bias is value


def test_very_long_value_is_shortened(recipe):
    (message,) = problems(recipe(MINIMAL), [("train.max_steps", "9" * 100_000)])
    assert len(message) < 200


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


def test_override_of_a_wrong_value_is_checked_by_the_rules(recipe):
    path = recipe(MINIMAL + "model: {n_head: many}\n")
    assert problems(path, [("model.n_head", "5")]) == [
        "model.n_head: expected an integer, got 'many'",
        "model.n_embd: 768 is not a multiple of model.n_head 5",
    ]


@pytest.mark.parametrize("text", [b"data: \xff\xfe"])
def test_file_that_is_not_yaml_is_one_line(recipe, text):
    (message,) = problems(recipe(text))
    assert "not valid YAML" in message or "cannot be read as a recipe" in message


@pytest.mark.parametrize("text", ["- model\n- data\n", "just text\n", "3\n"])
def test_recipe_without_sections_names_them(recipe, text):
    (message,) = problems(recipe(text))
    assert message.startswith(f"expected sections ({', '.join(SECTIONS)}), got ")


@pytest.mark.parametrize("text", ["", "# nothing here\n", "model:\n"])
def test_empty_recipe_lacks_only_its_source(recipe, text):
    (message,) = problems(recipe(text))
    assert message.startswith("data.source: required")
    assert load_config(recipe(text), [("data.source", "python-docs")]).data.source == "python-docs"


def test_crlf_and_byte_order_mark_are_accepted(recipe):
    path = recipe(
        b"\xef\xbb\xbf" + MINIMAL.encode().replace(b"\n", b"\r\n") + b"train:\r\n  seed: 3\r\n"
    )
    assert load_config(path).train.seed == 3


def test_missing_recipe_suggests_the_nearest(recipe, tmp_path):
    recipe(MINIMAL, "gpt2_124m.yaml")
    for mistakes in ("gpt2_142m.yaml", "gpt2_124m"):
        assert problems(tmp_path / mistakes) == ["no such recipe; did you mean gpt2_124m.yaml?"]


def test_suggested_tokens_per_step_divide(recipe):
    (message,) = problems(recipe(MINIMAL), [("train.tokens_per_step", "500000")])
    nearest = re.findall(r"[\d,]{5,}", message.partition("nearest:")[2])
    assert len(nearest) == 2
    for value in nearest:  # copied as printed
        assert load_config(recipe(MINIMAL), [("train.tokens_per_step", value)])


def test_values_are_checked_after_all_overrides(recipe):
    overrides = [
        ("model.n_embd", "64"),
        ("model.n_head", "4"),
        ("data.block_size", "2048"),
        ("model.n_positions", "2048"),
    ]
    config = load_config(recipe(MINIMAL), overrides)
    assert (config.model.n_embd, config.model.n_head, config.data.block_size) == (64, 4, 2048)


def test_validation_fraction_is_optional_with_a_split(recipe):
    overrides = [("data.validation_fraction", "0"), ("data.validation_split", "validation")]
    assert load_config(recipe(MINIMAL), overrides).data.validation_fraction == 0


def test_name_and_data_folder_follow_the_recipe(recipe):
    config = load_config(recipe(MINIMAL, "my_first.yaml"))
    assert (config.name, config.data.dir) == ("my_first", "data/my_first")
    assert load_config(recipe(MINIMAL), [("data.dir", "elsewhere")]).data.dir == "elsewhere"


def test_tilde_in_data_dir_is_home(recipe, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(recipe("data: {source: x, dir: ~/tokens}\n")).data.dir == str(
        tmp_path / "tokens"
    )


@pytest.mark.parametrize(
    "text",
    [
        MINIMAL,
        "data: {source: 'a: b # c', text_column: 'null', revision: '1.10', dir: 'über/x y'}\n",
        MINIMAL + "tracking: {trackers: [a, b]}\n",
        MINIMAL
        + (
            "optim: {learning_rate: 1e-5, min_learning_rate: 0.1e-5}\neval: {tokens: "
            "all}\nmodel: {bias: true}\n"
        ),
        (
            "data: {source: 'true', config: '3', split: 'null', sha256: '00e1'}\ntracking: "
            "{project: '[x]'}\n"
        ),
    ],
)
def test_resolved_recipe_loads_as_the_same_config(recipe, tmp_path, text):
    config = load_config(recipe(text), [("train.seed", "12345678901234567890")])
    run = tmp_path / "tiny"  # a run folder's recipe is named after its folder
    run.mkdir()
    (run / "recipe.yaml").write_text(config_to_yaml(config), encoding="utf-8")
    assert load_config(run / "recipe.yaml") == config


def test_resolved_recipe_states_every_knob():
    tree = config_to_dict(Config())
    assert {f"{section}.{name}" for section, body in tree.items() for name in body} == set(KNOBS)


def test_shipped_recipe_is_found_by_bare_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config("quickstart")
    assert config.name == "quickstart"
    assert config.data.source == "python-docs"
    assert problems("quickstrat") == ["no such recipe; did you mean quickstart?"]
    assert problems("recipes/quickstart.yaml") == ["no such recipe; did you mean quickstart?"]
    Path("quickstart").write_text(MINIMAL + "train: {max_steps: 30_000}\n")
    assert load_config("quickstart").train.max_steps == 30_000


def test_sizes_out_of_bounds_are_refused(recipe):
    for key, value in (
        ("model.n_layer", "1e30"),
        ("model.pad_vocab_to_multiple_of", "1e12"),
        ("model.n_positions", "1e10"),
    ):
        (message,) = problems(recipe(MINIMAL), [(key, value)])
        assert message.startswith(f"--{key}: must be at most ")
        assert len(message) < 120
    # an integer without a bound in the schema
    (message,) = problems(recipe(MINIMAL), [("eval.every", "9" * 4000)])
    assert message == f"--eval.every: must be at most 1,000,000,000,000,000, got {'9' * 40}"


@pytest.mark.parametrize("name", ["..yaml", "...yaml"])
def test_recipe_without_a_name_is_refused(tmp_path, name):
    (tmp_path / name).write_text(MINIMAL)
    (message,) = problems(tmp_path / name)
    assert "would have no name" in message


def test_only_100_problems_are_shown(recipe):
    with pytest.raises(ConfigError) as error:
        load_config(
            recipe(MINIMAL + "model: {" + ", ".join(f"k{i}: 1" for i in range(150)) + "}\n")
        )
    lines = str(error.value).splitlines()
    assert lines[-2:] == ["... and 50 more", "150 problems; nothing was started."]


@pytest.mark.parametrize("number", [1, 2, 12, 97, 480, 1024])
def test_divisors(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_divisors_of_large_numbers_are_fast():
    assert divisors(10**10)[-2:] == [5 * 10**9, 10**10]
    assert divisors(9_999_999_967) == [1, 9_999_999_967]


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
    assert load_config(path, {"model.extra": {"a": 2}}).model.extra == {"a": 2}
    assert problems(path, [("model.extra", "7")]) == [
        "--model.extra: expected a mapping such as {tie_word_embeddings: true}, got '7'"
    ]


def test_knobs_of_another_architecture_are_refused(recipe):
    llama = recipe(MINIMAL + "model: {architecture: llama, bias: true, dropout: 0.1, n_kv_head: 5}")
    assert problems(llama) == [
        "model.n_kv_head: 5 does not divide model.n_head 12",
        "model.bias: llama has no such knob; leave it out; its config may have a field such as "
        "attention_bias, for model.extra",
        "model.dropout: llama has no such knob; leave it out; its config may have a field such as "
        "attention_dropout, for model.extra",
    ]
    [problem] = problems(recipe(MINIMAL + "model: {n_inner: 64}", "gpt2.yaml"))
    assert problem == (
        "model.n_inner: gpt2 has no such knob; leave it out, or set model.architecture"
    )
    [problem] = problems(
        llama,
        [
            ("model.bias", "false"),
            ("model.dropout", "0"),
            ("model.n_kv_head", "6"),
            ("model.depth", "4"),
        ],
    )
    assert "counts the parameters of gpt2, not of llama" in problem


def test_own_initial_weights_of_gpt2_are_gpt2s(recipe):
    assert load_config(recipe(MINIMAL)).model.init == "gpt2"
    assert load_config(recipe(MINIMAL + "model: {architecture: llama}")).model.init == "own"
