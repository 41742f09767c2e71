"""Runs with activation checkpointing: the numbers of the plain run, and what saves nothing."""

import logging
import shutil
from importlib.util import find_spec

import pytest

from assertions import copy_at, same_weights
from nanogpt_hf.runs.metrics import read_metrics

pytestmark = pytest.mark.long
MEASURED = ("seconds", "train/tokens_per_second", "train/data_wait", "train/memory_peak_bytes")
KNOBS = {
    "model__dropout": 0.1,
    "model__n_layer": 3,
    "train__max_steps": 4,
    "checkpoint__every": 2,
    "checkpoint__keep": 9,
    "tracking__every": 1,
    "tracking__layers": True,
}


def numbers(run) -> list[dict]:
    return [{k: v for k, v in event.items() if k not in MEASURED} for event in read_metrics(run)]


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


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2", "tp", "deepspeed_zero3"])
def test_launched_run_equals_the_plain_one(machine, launch_warm, make_recipe, tmp_path):
    if "deepspeed" in machine and (find_spec("deepspeed") is None or shutil.which("g++") is None):
        pytest.skip("DeepSpeed or g++ is not installed")
    recipe = make_recipe(tmp_path / "tiny.yaml", **KNOBS)
    runs = [
        launch_warm(
            machine,
            *("pretrain", recipe, "--run-dir", tmp_path / level),
            machine_options=[f"--fsdp_activation_checkpointing={level}"],  # for FSDP
            FSDP_ACTIVATION_CHECKPOINTING=level,
        )
        for level in ("false", "true", "selective")
    ]
    assert all(same_weights(run, runs[0]) for run in runs[1:])
    assert all(numbers(run) == numbers(runs[0]) for run in runs[1:])


def test_level_that_saves_nothing_is_said(start, monkeypatch, caplog):
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    with caplog.at_level(logging.WARNING):
        start(**KNOBS | {"model__n_layer": 1})
    assert "fsdp_activation_checkpointing true saves no memory here: the top block" in caplog.text
