import json
import re
import typing

import pytest
import yaml

from nanogpt_hf.commands import main
from nanogpt_hf.config.checks import find_conflicts
from nanogpt_hf.config.json_schema import recipe_schema
from nanogpt_hf.config.load import config_to_yaml
from nanogpt_hf.config.names import shipped_recipes
from nanogpt_hf.config.schema import (
    KNOBS,
    Config,
    kind_options,
    replace_knobs,
)
from nanogpt_hf.config.step_size import accumulation_steps
from nanogpt_hf.config.values import convert
from nanogpt_hf.errors import UserError


def test_knobs_have_a_meaning_and_a_default_of_their_type():
    for key, knob in KNOBS.items():
        assert knob.meaning, key
        assert "\n" not in knob.meaning
        options = kind_options(knob.kind)
        kinds = tuple(
            typing.get_origin(option) or option
            for option in options
            if isinstance(option, type | type(list[str]))
        )
        assert knob.default in options or isinstance(knob.default, kinds), key
        if not isinstance(knob.default, list | dict):
            assert (
                convert(knob, None if knob.default is None else str(knob.default)) == knob.default
            ), key


def test_defaults_have_no_conflict_once_a_source_is_given():
    assert list(find_conflicts(replace_knobs(Config(), {"data.source": "python-docs"}))) == []


@pytest.fixture
def config():
    return replace_knobs(
        Config(),
        {"train.tokens_per_step": 491_520, "train.micro_batch_size": 12, "data.block_size": 1024},
    )


@pytest.mark.parametrize(("processes", "steps"), [(1, 40), (2, 20), (5, 8), (8, 5), (40, 1)])
def test_accumulation_gives_tokens_per_step(config, processes, steps):
    assert accumulation_steps(config, processes) == steps
    assert steps * processes * 12 * 1024 == 491_520


def test_fractional_accumulation_shows_sum_and_nearest_values(config):
    with pytest.raises(UserError, match="nearest") as raised:
        accumulation_steps(config, 3)
    assert str(raised.value) == (
        "train.tokens_per_step: 491,520 is not a multiple of train.micro_batch_size 12 × "
        "data.block_size 1024 × 3 processes = 36,864; nearest: 479,232 or 516,096"
    )
    assert accumulation_steps(replace_knobs(config, {"train.tokens_per_step": 479_232}), 3)


@pytest.fixture(scope="module")
def validator():
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.Draft202012Validator.check_schema(recipe_schema())
    return jsonschema.Draft202012Validator(recipe_schema())


def as_editors_read(text: str) -> dict:
    """YAML 1.2: PyYAML reads YAML 1.1, in which 1e-3 is a text."""

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return yaml.load(text, Loader)


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_and_resolved_ones_fit_the_json_schema(name, validator):
    recipe = shipped_recipes()[name]
    stated = as_editors_read(recipe.read_text(encoding="utf-8"))
    assert [error.message for error in validator.iter_errors(stated)] == []
    resolved = as_editors_read(config_to_yaml(Config()))
    assert [error.message for error in validator.iter_errors(resolved)] == []


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"modle": {}}, "modle"),
        ({"train": {"max_step": 3}}, "max_step"),
        ({"train": {"max_steps": 0}}, "minimum"),
        ({"train": {"max_steps": 2.5}}, "integer"),
        ({"data": {"format": "chatt"}}, "chatt"),
        ({"eval": {"tokens": "most"}}, "most"),
        ({"optim": {"learning_rate": "fast"}}, "fast"),
        ({"hub": {"private": "yes"}}, "yes"),
    ],
)
def test_json_schema_finds_mistakes(recipe, message, validator):
    (error,) = validator.iter_errors(recipe)
    assert message in error.message


def test_knobs_command_writes_a_json_schema(tmp_path, capsys):
    path = tmp_path / "recipe.schema.json"
    assert main(["knobs", "--json", str(path)]) == 0
    sections = json.loads(path.read_text())["properties"]
    keys = {f"{section}.{name}" for section in sections for name in sections[section]["properties"]}
    assert keys == KNOBS.keys()
    assert sections["eval"]["properties"]["tokens"] == {
        "description": KNOBS["eval.tokens"].meaning,
        "default": 2_457_600,
        "anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["all"]}],
    }
    assert sections["finetune"]["properties"]["model"]["type"] == ["string", "null"]
    out = capsys.readouterr().out
    assert all(f"--{key} " in out and knob.meaning in out for key, knob in KNOBS.items())
    assert "[gelu|gelu_new] (default gelu)" in out
