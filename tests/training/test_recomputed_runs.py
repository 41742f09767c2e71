"""Runs with activation checkpointing: the numbers of the plain run, and what saves nothing."""

import logging

import pytest

from assertions import copy_at, numbers, same_weights

pytestmark = pytest.mark.long
KNOBS = {
    "model__dropout": 0.1,
    "model__n_layer": 3,
    "train__max_steps": 4,
    "checkpoint__every": 2,
    "checkpoint__keep": 9,
    "tracking__every": 1,
    "tracking__layers": True,
}


def test_run_equals_the_plain_one_also_resumed_with_another_level(
    start, train, tmp_path, monkeypatch, caplog
):
    plain = start("plain", **KNOBS)
    for level in ("true", "2", "selective"):
        monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", level)
        run = start(level, **KNOBS)
        assert same_weights(run, plain)
        assert numbers(run) == numbers(plain)
    assert "saves no memory" not in caplog.text
    resumed = copy_at(run, 2, tmp_path / "resumed")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "TRUE")
    train(resumed.path, resume=True, **KNOBS)
    assert same_weights(resumed, plain)
    assert numbers(resumed) == numbers(plain)


def test_level_that_saves_nothing_is_said(start, monkeypatch, caplog):
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    with caplog.at_level(logging.WARNING):
        start(**KNOBS | {"model__n_layer": 1})
    assert "fsdp_activation_checkpointing true saves no memory here: the top block" in caplog.text
