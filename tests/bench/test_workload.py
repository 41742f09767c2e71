"""Spread and timing of a step; the workload takes the loop's steps."""

import torch

from nanogpt_hf.bench import workload
from nanogpt_hf.config.names import vocab_size_by_name
from nanogpt_hf.methods.text import TEXT
from nanogpt_hf.training import step
from nanogpt_hf.training.clock import spread, time_of


def test_spread():
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert spread([7.0]) == dict.fromkeys(("median", "low", "high"), 7.0)


def test_time_of_is_per_call(monkeypatch):
    clock = iter([10.0, 16.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    calls = []
    assert time_of(torch.device("cpu"), lambda: calls.append(1), times=3) == 2.0
    assert len(calls) == 3


def test_workload_step_is_the_loops_step(work, monkeypatch):
    assert workload.train_step is step.train_step
    assert TEXT.updates(work.run.config) == 1  # and a step on text is one of them
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
    assert work.token_source == f"synthetic tokens: {tmp_path / 'none'} is not prepared"
    assert work.run.model_config.vocab_size == vocab_size_by_name("char", None)[0]
