"""Stages of a recipe: what holds at a step."""

import numpy as np
import pytest

from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.config.schema import Config, knob_values, replace_knobs
from nanogpt_hf.config.sources import read_sources, sources_of
from nanogpt_hf.config.stages import (
    comparable,
    config_at,
    largest_stage,
    next_stage,
    planned_tokens,
    stage_lines,
    stages_of,
    tokens_by_source,
)
from nanogpt_hf.config.stated import as_overrides
from nanogpt_hf.data.batches import Batches, blocks_read
from nanogpt_hf.data.blocks import TokenBlocks, TokenStream
from nanogpt_hf.data.mixture import MixedBlocks

SOURCES = [{"source": "a.txt", "weight": 3}, {"source": "b.txt", "weight": 0}]
STAGES = [
    {"at": "40", "weights": {"b": "0.5"}, "train.tokens_per_step": 512},
    {"at": 80, "data.block_size": 32, "optim.schedule": "wsd"},
]
KNOBS = {
    "data.source": SOURCES,
    "data.block_size": 16,
    "train.max_steps": 100,
    "train.tokens_per_step": 256,
    "train.micro_batch_size": 4,
    "train.stages": STAGES,
    "optim.warmup_steps": 0,
}


@pytest.fixture
def config():
    return load_config(None, KNOBS, name="staged")


def test_recipe_at_a_step_has_the_knobs_of_all_stages_before(config):
    found = {}
    for step in (0, 39, 40, 79, 80, 99):
        now = config_at(config_at(config, 90), step)  # asked of any stage
        weights = tuple(source["weight"] for source in now.data.source)
        facts = weights, now.train.tokens_per_step, now.data.block_size, now.optim.schedule
        found.setdefault(facts, []).append(step)
        assert (now.recipe, now.train.stages) == (config, config.train.stages)
    assert list(found.items()) == [
        (((3, 0), 256, 16, "cosine"), [0, 39]),
        (((3, 0.5), 512, 16, "cosine"), [40, 79]),
        (((3, 0.5), 512, 32, "wsd"), [80, 99]),
    ]
    assert [next_stage(config, step) for step in (0, 39, 40, 80)] == [40, 40, 80, None]
    assert planned_tokens(config) == 40 * 256 + 60 * 512
    later = 60 * 512 / 7
    assert tokens_by_source(config) == pytest.approx({"a": 40 * 256 + 6 * later, "b": later})
    assert largest_stage(config).first_step == 80
    assert stage_lines(config) == [
        "stage 1: steps 1 to 40, 10,240 tokens",
        "stage 2: steps 41 to 80, 20,480 tokens: train.tokens_per_step 256 -> 512, weight of b 0.5",
        "stage 3: steps 81 to 100, 10,240 tokens: data.block_size 16 -> 32, "
        "optim.schedule cosine -> wsd",
    ]


def test_stages_survive_being_written_and_read(config, tmp_path):
    (tmp_path / "recipe.yaml").write_text(config_to_yaml(config_at(config, 90)))
    assert load_config(tmp_path / "recipe.yaml").train == config.train


def test_lowest_rate_and_warmup_of_a_stage_follow_its_peak_and_the_steps():
    stages = [
        {"at": 20, "optim.learning_rate": 1e-5},
        {"at": 40, "optim.schedule": "constant"},
        {"at": 60, "optim.schedule": "linear", "optim.learning_rate": 1e-2},
        {"at": 80, "optim.min_learning_rate": 5e-5, "optim.warmup_steps": 0.5},
    ]
    knobs = {"data.source": "a.txt", "train.max_steps": 100, "optim.warmup_steps": 0.1}
    config = load_config(None, knobs | {"train.stages": stages}, name="staged")
    rates = [stage.config.optim.lowest_learning_rate for stage in stages_of(config)]
    assert rates == [6e-5, 1e-6, 1e-6, 1e-3, 5e-5]
    assert [stage.config.optim.warmup_steps for stage in stages_of(config)] == [10] * 4 + [50]
    # Only what changes is stated.
    assert config.train.stages == [
        stages[0] | {"optim.min_learning_rate": 1e-6},
        stages[1],
        stages[2] | {"optim.min_learning_rate": 1e-3},
        stages[3] | {"optim.warmup_steps": 50},
    ]
    same = load_config(None, as_overrides(knob_values(config)), name="staged")
    assert comparable(same) == comparable(config)


def test_recipe_without_stages_is_its_only_one():
    config = load_config(None, KNOBS | {"train.stages": None}, name="plain")
    assert stages_of(config) == [("stage 1", 0, 100, config, "")]
    assert (stage_lines(config), config_at(config, 50) is config) == ([], True)


def test_no_block_is_read_twice_before_its_source_is_at_its_end(config):
    """Although each stage has other weights and another batch; another length cuts other blocks."""
    stream = TokenStream([np.zeros(16 * 3000 + 1, dtype=np.uint16)])
    steps = {0: [], 1: []}
    for stage in stages_of(config)[:2]:
        now = stage.config
        size = stage.config.data.block_size
        batches = Batches(
            MixedBlocks([TokenBlocks(stream, size)] * 2, [s.weight for s in sources_of(now.data)]),
            order="shuffled",
            seed=1,
            micro_batch_size=4,
            accumulation=now.train.tokens_per_step // 4 // size,
            first_step=now.first_step,
            read=blocks_read(now, now.first_step),
        )
        for step in range(stage.first, stage.last):
            for index in batches.indices(step):
                steps[int(index) // 3000].append(int(index))
        counts = [len(steps[0]), len(steps[1])]
        assert batches.epochs(stage.last) == pytest.approx([count / 3000 for count in counts])
    assert counts == [640 + 1097, 183]
    assert [len(set(seen)) for seen in steps.values()] == counts
    assert blocks_read(config, 40) == [640, 0]
    assert blocks_read(config, 80) == [869, 92], "of twice the length"


@pytest.mark.parametrize(
    ("weights", "other", "equal"),
    [
        ({"a": 3, "b": 1}, {"a": 0.75, "b": 0.25}, True),
        ({"a": 3, "b": 1}, {"a": 3.0}, True),  # b has 1 in the recipe
        ({"a": 3, "b": 1}, {"a": 3, "b": 2}, False),
    ],
)
def test_weights_of_stages_compare_by_their_proportions(weights, other, equal, tmp_path):
    sources = [{"source": f"{name}.txt", "weight": 1} for name in "ab"]

    def value(weights):
        config = replace_knobs(
            Config(),
            {"data.source": read_sources(sources), "train.stages": [{"at": 5, "weights": weights}]},
        )
        return comparable(config)["train.stages"]

    assert (value(weights) == value(other)) is equal
