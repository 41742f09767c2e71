"""Spread and phases: what is added up is the step, and nothing is left changed."""

import torch
from accelerate import Accelerator

from nanogpt_hf.bench.clock import PHASES, Spread, collectives, phases_of_step, profiler, spread, time_of
from nanogpt_hf.training.step import seed_dropout


def test_spread_is_the_median_and_the_quartiles():
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)


def test_time_is_that_of_one_call(monkeypatch):
    clock = iter([10.0, 16.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    calls = []
    assert time_of(torch.device("cpu"), lambda: calls.append(1), times=3) == 2.0
    assert len(calls) == 3


def test_phases_are_told_apart_and_add_up_to_the_step(work, monkeypatch):
    # a clock that moves only where the test says
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def later(seconds, call):
        def slow(*arguments, **options):
            now[0] += seconds
            return call(*arguments, **options)

        return slow

    monkeypatch.setattr(work.run.batches.blocks, "batch", later(1, work.run.batches.blocks.batch))
    monkeypatch.setattr("nanogpt_hf.training.step.seed_dropout", later(3, seed_dropout))
    monkeypatch.setattr(work.run.model.transformer, "forward", later(10, work.run.model.transformer.forward))
    monkeypatch.setattr(torch.Tensor, "backward", later(100, torch.Tensor.backward))
    monkeypatch.setattr(work.run.optimizer.optimizer, "step", later(1000, work.run.optimizer.optimizer.step))
    phases = phases_of_step(work, steps=3)
    assert work.run.batches.accumulation == 2
    assert tuple(phases) == PHASES
    assert [phases[name].median for name in PHASES] == [2, 6, 20, 200, 1000]


def test_the_clock_leaves_no_trace(work):
    phases_of_step(work, steps=1)
    assert "backward" not in vars(work.run.accelerator)
    assert "micro_batches" not in vars(work.run.batches)
    assert not work.run.model._forward_hooks
    assert not work.run.model._forward_pre_hooks
    assert isinstance(work.run.accelerator, Accelerator)


def test_one_process_has_no_collectives(work):
    with profiler(torch.device("cpu")) as profile:
        work.step()
    assert profile.events()
    assert collectives(profile) == []
