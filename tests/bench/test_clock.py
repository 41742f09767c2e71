"""Spread, timing and phases of a step."""

import torch
from accelerate import Accelerator

from nanogpt_hf.bench.clock import (
    PHASES,
    collectives,
    phases_of_step,
    profiler,
    spread,
    time_of,
)
from nanogpt_hf.training.step import seed_dropout


def test_spread():
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert spread([7.0]) == dict.fromkeys(("median", "low", "high"), 7.0)


def test_time_of_is_per_call(monkeypatch):
    clock = iter([10.0, 16.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    calls = []
    assert time_of(torch.device("cpu"), lambda: calls.append(1), times=3) == 2.0
    assert len(calls) == 3


def test_phases_of_step_add_up(work, monkeypatch):
    # a clock that only the patched calls advance
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def slowed(seconds, call):
        def slow(*arguments, **options):
            now[0] += seconds
            return call(*arguments, **options)

        return slow

    monkeypatch.setattr(work.run.batches.blocks, "batch", slowed(1, work.run.batches.blocks.batch))
    monkeypatch.setattr("nanogpt_hf.training.step.seed_dropout", slowed(3, seed_dropout))
    monkeypatch.setattr(
        work.run.model.transformer, "forward", slowed(10, work.run.model.transformer.forward)
    )
    monkeypatch.setattr(torch.Tensor, "backward", slowed(100, torch.Tensor.backward))
    monkeypatch.setattr(
        work.run.optimizer.optimizer, "step", slowed(1000, work.run.optimizer.optimizer.step)
    )
    phases = phases_of_step(work, steps=3)
    assert work.run.batches.accumulation == 2
    assert tuple(phases) == PHASES
    assert [phases[name]["median"] for name in PHASES] == [2, 6, 20, 200, 1000]


def test_phases_of_step_restores_the_run(work):
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
