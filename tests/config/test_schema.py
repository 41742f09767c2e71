import typing
from typing import Literal

import pytest

from nanogpt_hf.config.checks import accumulation_steps, find_conflicts
from nanogpt_hf.config.schema import (
    KNOBS,
    SECTIONS,
    Config,
    get_value,
    kind_options,
    replace_knobs,
)
from nanogpt_hf.config.values import convert


@pytest.mark.parametrize("key", KNOBS)
def test_knob_has_meaning_and_default_of_its_type(key):
    knob = KNOBS[key]
    assert knob.meaning
    assert "\n" not in knob.meaning
    options = kind_options(knob.kind)
    kinds = tuple(
        typing.get_origin(option) or option for option in options if isinstance(option, type | type(list[str]))
    )
    assert knob.default in options or isinstance(knob.default, kinds)


@pytest.mark.parametrize("key", [key for key, knob in KNOBS.items() if not isinstance(knob.default, list | dict)])
def test_default_is_equal_after_write_and_read(key):
    knob = KNOBS[key]
    assert convert(knob, None if knob.default is None else str(knob.default)) == knob.default


def test_sections_match_the_config():
    assert SECTIONS == (
        "model",
        "data",
        "optim",
        "train",
        "eval",
        "checkpoint",
        "tracking",
        "finetune",
        "lora",
        "rl",
        "hub",
    )
    assert {key.partition(".")[0] for key in KNOBS} == set(SECTIONS)


def test_get_value_and_replace_knobs_cover_every_knob():
    config = replace_knobs(Config(), {key: number for number, key in enumerate(KNOBS)})
    assert [get_value(config, key) for key in KNOBS] == list(range(len(KNOBS)))


def test_defaults_have_no_conflict_once_a_source_is_given():
    assert list(find_conflicts(replace_knobs(Config(), {"data.source": "python-docs"}))) == []


FINETUNE = {"finetune.model": "gpt2"}


@pytest.mark.parametrize(
    ("values", "key", "message"),
    [
        ({"data.source": ""}, "data.source", "required"),
        ({"finetune.freeze_layers": 2}, "finetune.freeze_layers", "a model from scratch has nothing to keep"),
        (FINETUNE | {"finetune.unfreeze_every": 5}, "finetune.unfreeze_every", "no layer is frozen"),
        (
            FINETUNE | {"finetune.freeze_layers": 2, "finetune.unfreeze_every": 5, "train.micro_batch_size": "auto"},
            "finetune.unfreeze_every",
            "memory that train.micro_batch_size auto does not measure",
        ),
        ({"lora.rank": 4}, "lora.rank", "an adapter needs a base model"),
        (FINETUNE | {"lora.targets": []}, "lora.targets", "expected some of q_proj"),
        (FINETUNE | {"lora.rank": 4, "lora.quantize": "4bit", "lora.merge": True}, "lora.quantize", "cannot be merged"),
        ({"train.max_time": "soon"}, "train.max_time", "expected a time such as 11h30m"),
        ({"hub.repo": "no-owner"}, "hub.repo", "expected user/name, got 'no-owner'"),
        ({"hub.push": "best"}, "hub.push", "needs hub.repo"),
        ({"hub.license": "MIT License"}, "hub.license", "expected the Hub's name of a licence"),
    ],
)
def test_find_conflicts_names_one_knob_per_rule(values, key, message):
    (conflict,) = find_conflicts(replace_knobs(Config(), {"data.source": "python-docs", **values}))
    assert conflict.keys[0] == key
    assert set(conflict.keys) <= set(KNOBS)
    assert message in conflict.message


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (int, (int,)),
        (list[str], (list[str],)),
        (int | None, (int, type(None))),
        (typing.Optional[str], (str, type(None))),  # noqa: UP045  (as given by get_type_hints)
        (Literal["a", "b"], ("a", "b")),
        (int | Literal["all"], (int, "all")),
    ],
)
def test_annotation_gives_allowed_types(kind, options):
    assert kind_options(kind) == options


@pytest.fixture
def config():
    return replace_knobs(
        Config(), {"train.tokens_per_step": 491_520, "train.micro_batch_size": 12, "data.block_size": 1024}
    )


@pytest.mark.parametrize(("processes", "steps"), [(1, 40), (2, 20), (5, 8), (8, 5), (40, 1)])
def test_accumulation_gives_tokens_per_step(config, processes, steps):
    assert accumulation_steps(config, processes) == steps
    assert steps * processes * 12 * 1024 == 491_520


def test_fractional_accumulation_shows_sum_and_nearest_values(config):
    with pytest.raises(ValueError, match="nearest") as raised:
        accumulation_steps(config, 3)
    assert str(raised.value) == (
        "train.tokens_per_step: 491,520 is not a multiple of train.micro_batch_size 12 × data.block_size 1024 × "
        "3 processes = 36,864; nearest: 479,232 or 516,096, or train.micro_batch_size 10"
    )
    assert accumulation_steps(replace_knobs(config, {"train.micro_batch_size": 10}), 3) == 16
    for nearest in (479_232, 516_096):
        assert accumulation_steps(replace_knobs(config, {"train.tokens_per_step": nearest}), 3) == nearest // 36_864


def test_too_many_processes_for_tokens_per_step_are_refused(config):
    with pytest.raises(ValueError, match=r"nearest: 983,040, or train\.micro_batch_size 6$"):
        accumulation_steps(config, 80)


def test_huge_micro_batch_size_is_refused_quickly(config):
    with pytest.raises(ValueError, match=r"train\.micro_batch_size 480$"):
        accumulation_steps(replace_knobs(config, {"train.micro_batch_size": 10**15}), 1)


def test_no_micro_batch_size_is_suggested_if_none_divides(config):
    with pytest.raises(ValueError, match=r"nearest: 491,520 or 503,808$"):
        accumulation_steps(replace_knobs(config, {"train.tokens_per_step": 491_521}), 1)
