"""Baselines do the same work: bare PyTorch reaches our weights, and the Trainer alternates with
our steps.
"""

import pytest
import torch

from assertions import refusal
from nanogpt_hf.bench import baselines
from nanogpt_hf.bench.baselines import (
    bare_step,
    check_comparable,
    pairs_with_bare,
)
from nanogpt_hf.bench.trainer import pairs_with_trainer
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.errors import UserError
from nanogpt_hf.optim.optimizer import build_optimizer


def test_bare_step_reaches_our_weights(work, monkeypatch):
    built = []

    def build(model, optim):
        built.append(model)
        return build_optimizer(model, optim)

    monkeypatch.setattr(baselines, "build_optimizer", build)
    monkeypatch.setattr(
        "nanogpt_hf.bench.workload.learning_rate_at", lambda *_: work.run.config.optim.learning_rate
    )
    bare = bare_step(work)
    for _ in range(3):
        work.step()
        bare()
    for ours, theirs in zip(work.run.model.parameters(), built[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_pairs_with_bare_alternates_the_order(work, monkeypatch):
    calls = []
    monkeypatch.setattr(baselines, "bare_step", lambda _: lambda: calls.append("bare"))
    monkeypatch.setattr(type(work), "step", lambda _: calls.append("ours"))

    def time_of(device, step, steps: int) -> str:
        step()
        return calls[-1]

    monkeypatch.setattr(baselines, "time_of", time_of)
    assert pairs_with_bare(work, windows=3, steps=2) == [("ours", "bare")] * 3
    assert calls[6:] == ["bare", "ours", "ours", "bare", "bare", "ours"]


def test_pairs_with_trainer_keeps_our_accumulation(work):
    calls = []
    work.run.optimizer.optimizer.register_step_post_hook(lambda *_: calls.append("ours"))
    pairs = pairs_with_trainer(work, windows=3, steps=2)
    assert len(pairs) == 3
    assert all(ours > 0 and theirs > 0 for ours, theirs in pairs)
    assert calls == ["ours"] * 6  # one optimizer step per two micro-batches
    assert work.run.accelerator.gradient_accumulation_steps == 2


@pytest.mark.parametrize(
    ("knob", "value", "baseline"),
    [("finetune.model", "gpt2", "bare"), ("optim.name", "muon", "trainer")],
)
def test_check_comparable_refuses_other_work(work, knob, value, baseline):
    check_comparable(work, [baseline])
    work.run.config = replace_knobs(work.run.config, {knob: value})
    assert knob in refusal(check_comparable, work, [baseline], error=UserError)
