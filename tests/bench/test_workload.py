"""The workload takes the loop's steps; strong and weak scaling."""

import dataclasses

import pytest

from nanogpt_hf.bench import workload
from nanogpt_hf.bench.workload import strong_scaling, weak_scaling
from nanogpt_hf.config.schema import Config, DataSection, TrainSection
from nanogpt_hf.config.vocabulary import vocab_size_by_name
from nanogpt_hf.errors import UserError
from nanogpt_hf.training import methods


def test_workload_step_is_the_loops_step(work, monkeypatch):
    assert workload.train_step is methods.TEXT.step
    taken = []
    monkeypatch.setattr(
        workload, "train_step", lambda run, step, learning_rate: taken.append((step, learning_rate))
    )
    work.step()
    work.step()
    optim = work.run.config.optim
    assert [number for number, _ in taken] == [0, 1]
    assert taken[0][1] == optim.learning_rate > taken[1][1]  # the recipe's schedule


def test_workload_names_synthetic_tokens(work, tmp_path):
    assert work.token_source == f"synthetic tokens ({tmp_path / 'none'} is not prepared yet)"
    assert work.run.model_config.vocab_size == vocab_size_by_name("char", None)[0]


def config(tokens: int, micro: int | str) -> Config:
    return Config(
        data=DataSection(block_size=8),
        train=TrainSection(tokens_per_step=tokens, micro_batch_size=micro),
    )


def sizes(config: Config) -> tuple:
    return config.train.tokens_per_step, config.train.micro_batch_size


def test_strong_scaling():
    recipe = config(tokens=12 * 8, micro=12)
    assert [sizes(strong_scaling(recipe, n)) for n in (1, 2, 3, 4)] == [
        (96, 12),
        (96, 6),
        (96, 4),
        (96, 3),
    ]
    assert sizes(strong_scaling(config(96, 4), 2)) == (96, 3)  # 4 · 2 does not divide 12
    assert sizes(strong_scaling(config(96, "auto"), 1)) == (96, 12)
    with pytest.raises(
        UserError, match="5 does not divide a step of 12 sequences; try --scaling weak"
    ):
        strong_scaling(recipe, 5)


def test_weak_scaling():
    recipe = config(tokens=96, micro=12)
    assert sizes(weak_scaling(recipe, 3)) == (288, 12)
    assert dataclasses.asdict(recipe) == dataclasses.asdict(config(96, 12))  # unchanged
