import json
import typing

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.config.checks import accumulation_steps, find_conflicts
from nanogpt_hf.config.schema import (
    KNOBS,
    Config,
    kind_options,
    replace_knobs,
)
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


def test_knobs_command_writes_the_schema(tmp_path, capsys):
    path = tmp_path / "knobs.json"
    assert main(["knobs", "--json", str(path)]) == 0
    schema = json.loads(path.read_text())
    assert schema.keys() == KNOBS.keys()
    assert schema["eval.tokens"] == {
        "types": ["int"],
        "choices": ["all"],
        "default": 2_457_600,
        "low": 1,
        "high": None,
        "meaning": KNOBS["eval.tokens"].meaning,
    }
    assert schema["finetune.model"]["types"] == ["str", "null"]
    out = capsys.readouterr().out
    assert all(f"--{key} " in out and knob.meaning in out for key, knob in KNOBS.items())
    assert "[gelu|gelu_new] (default gelu)" in out
