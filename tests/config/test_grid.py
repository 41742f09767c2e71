"""The grid of a sweep: values of the command line, names of runs, data folders."""

import pytest

from nanogpt_hf.config.grid import _SAME_TOKENS, build_grid, sweep_name
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import KNOBS, get_value
from nanogpt_hf.data.manifest import DECIDING_KNOBS
from nanogpt_hf.errors import ConfigError


@pytest.fixture
def recipe(write_recipe):
    return str(write_recipe())


def test_grid_has_every_combination_in_order(recipe):
    overrides = [("train.seed", "1, 2"), ("optim.beta1", "0.5"), ("optim.learning_rate", "1e-2,2e-2,0.03")]
    runs = build_grid(recipe, overrides)
    values = [(run.config.train.seed, run.config.optim.learning_rate) for run in runs]
    assert values == [(seed, rate) for seed in (1, 2) for rate in (0.01, 0.02, 0.03)]
    assert {run.config.optim.beta1 for run in runs} == {0.5}
    assert runs[0].values == {"train.seed": 1, "optim.learning_rate": 0.01}
    assert runs[0].name == "seed=1_learning_rate=0.01"
    assert len({run.name for run in runs}) == 6
    assert sweep_name(runs) == "tiny-seed-learning_rate"


def test_overrides_of_a_run_are_its_arguments(recipe):
    for run in build_grid(recipe, [("eval.samples", '["Once upon", The], [], ["A"]'), ("lora.rank", "null")]):
        assert load_config(recipe, run.overrides) == run.config
        assert list(run.config.eval.samples) == list(run.values["eval.samples"])
    assert [len(run.values["eval.samples"]) for run in build_grid(recipe, [("eval.samples", "[a, b],[c],[]")])] == [
        2,
        1,
        0,
    ]


def test_quoted_values_are_not_split(recipe):
    runs = build_grid(recipe, [("data.text_column", '"a,b", c'), ("data.split", "x: y #1")])
    assert [run.config.data.text_column for run in runs] == ["a,b", "c"]
    assert runs[0].config.data.split == "x: y #1"
    assert runs[0].name == "text_column=a-b"


def test_depth_is_swept_by_the_size_dial(recipe):
    small, large = build_grid(recipe, [("model.depth", "1,3"), ("model.aspect_ratio", "8")])
    assert (small.config.model.n_embd, large.config.model.n_embd) == (8, 24)
    assert small.config.train.max_steps < large.config.train.max_steps
    assert (small.name, large.name) == ("depth=1", "depth=3")


def test_runs_share_prepared_data_of_equal_tokens(recipe):
    same = build_grid(recipe, [("train.seed", "1,2"), ("data.block_size", "8,16")])
    assert {run.config.data.dir for run in same} == {load_config(recipe).data.dir}
    differ = build_grid(recipe, [("train.seed", "1,2"), ("data.validation_fraction", "0.1,0.2")])
    assert len({run.config.data.dir for run in differ}) == 2
    assert differ[0].config.data.dir == load_config(recipe).data.dir + "-validation_fraction=0.1"
    assert all(load_config(recipe, run.overrides) == run.config for run in differ)
    stated = build_grid(recipe, [("data.split", "a,b"), ("data.dir", "d,e")])
    assert {run.config.data.dir for run in stated} == {"d", "e"}


def test_knobs_that_share_data_are_not_in_the_manifest():
    data_knobs = {key for key in KNOBS if key.startswith("data.")}
    assert data_knobs - set(_SAME_TOKENS) - {"data.sha256"} == {f"data.{name}" for name in DECIDING_KNOBS}


def test_problems_of_all_runs_are_reported_once(recipe):
    overrides = [("train.seed", "1,x"), ("model.n_head", "2,3"), ("optim.beta3", "1,2")]
    with pytest.raises(ConfigError) as raised:
        build_grid(recipe, overrides)
    assert sorted(line.partition(":")[0].lstrip("-") for line in raised.value.problems) == sorted(
        ["train.seed", "optim.beta3", recipe]
    )


def test_grid_values_have_the_type_of_their_knob(recipe):
    runs = build_grid(recipe, [("model.bias", "true,false"), ("optim.learning_rate", "1e-2,0.011")])
    for run in runs:
        for key, value in run.values.items():
            assert type(value) is type(get_value(run.config, key))
