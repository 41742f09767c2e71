"""What is measured is the loop's own step on a run's own model; and how it is shared out to scale."""

import dataclasses

import pytest

from nanogpt_hf.bench import workload
from nanogpt_hf.bench.workload import strong_scaling, weak_scaling
from nanogpt_hf.config.schema import Config, DataSection, TrainSection
from nanogpt_hf.errors import UserError
from nanogpt_hf.training import loop


def test_the_step_is_the_loops_own(work, monkeypatch):
    assert workload.train_step is loop.train_step
    taken = []
    monkeypatch.setattr(workload, "train_step", lambda run, step, learning_rate: taken.append((step, learning_rate)))
    work.step()
    work.step()
    optim = work.run.config.optim
    assert [number for number, _ in taken] == [0, 1]
    assert taken[0][1] == optim.learning_rate > taken[1][1]  # the recipe's schedule


def test_made_up_tokens_are_said_to_be(work, tmp_path):
    assert work.token_source == f"made-up tokens ({tmp_path / 'none'} is not prepared yet)"
    assert work.run.model_config.vocab_size == 256


def config(tokens: int, micro: int | str) -> Config:
    return Config(data=DataSection(block_size=8), train=TrainSection(tokens_per_step=tokens, micro_batch_size=micro))


def sizes(shared: Config) -> tuple:
    return shared.train.tokens_per_step, shared.train.micro_batch_size


def test_strong_scaling_shares_the_step():
    recipe = config(tokens=12 * 8, micro=12)
    assert [sizes(strong_scaling(recipe, n)) for n in (1, 2, 3, 4)] == [(96, 12), (96, 6), (96, 4), (96, 3)]
    assert sizes(strong_scaling(config(96, 4), 2)) == (96, 3)  # 4 · 2 does not divide 12
    assert sizes(strong_scaling(config(96, "auto"), 1)) == (96, 12)
    with pytest.raises(UserError, match="5 do not divide a step of 12 sequences; try --scaling weak"):
        strong_scaling(recipe, 5)


def test_weak_scaling_gives_each_process_the_same():
    recipe = config(tokens=96, micro=12)
    assert sizes(weak_scaling(recipe, 3)) == (288, 12)
    assert dataclasses.asdict(recipe) == dataclasses.asdict(config(96, 12))  # as it was
