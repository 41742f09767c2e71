"""Loss spikes and rollback, skipped steps, clipping and peak memory."""

import dataclasses
import json

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from assertions import column, replace_step
from nanogpt_hf.checkpoint.writer import CheckpointWriter
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import Config, replace_knobs
from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training import loop
from nanogpt_hf.training.monitor import Monitor
from nanogpt_hf.training.start import prepare_run
from nanogpt_hf.training.step import train_step


@pytest.fixture
def knobs():
    every = {"checkpoint__every": 3, "eval__every": 4}
    return every | {"model__dropout": 0.1, "train__rollback_ratio": 2.0, "train__max_steps": 12}


@pytest.fixture
def patched_steps(monkeypatch):
    """Lists of trained data steps, of spikes (logged losses ten times too large) and of crashes."""
    data_steps, spikes, crashes = [], set(), set()

    def spiking(run, step, learning_rate):
        if step in crashes:
            crashes.remove(step)
            raise SystemError("crash")
        result = train_step(run, step, learning_rate)
        data_steps.append(step)
        return result._replace(loss=result.loss * 10) if step in spikes else result

    replace_step(monkeypatch, spiking)
    return data_steps, spikes, crashes


@pytest.mark.long
def test_spike_rolls_back_to_checkpoint_and_skips_its_data(pretrain, patched_steps):
    data_steps, spikes, _ = patched_steps
    spikes.add(7)
    status, _, err, run = pretrain(eval__every=1, checkpoint__keep=9)
    assert status == 0
    # step 8 spiked on the data of step 7; after step 6 the data is two steps ahead
    assert data_steps == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert "step 8: the loss is above 2 times its running average; rolling back to step 6" in err
    assert list(column(run, "train/loss")) == list(range(1, 13))
    assert max(column(run, "train/loss").values()) < 5
    assert state_at(run, 12)["skipped_steps"] == 2
    assert state_at(run, 6)["best_step"] == 7  # whose model is in best/


def state_at(run: RunFolder, step: int) -> dict:
    return json.loads((run.checkpoint(step) / "state.json").read_text())


@pytest.mark.long
def test_repeated_spikes_end_the_run(pretrain, patched_steps):
    patched_steps[1].update(range(7, 100))
    ended = pretrain()
    assert ended.status == 2
    assert "again after 3 rollbacks to step 6; lower optim.learning_rate" in ended.err
    assert ended.run.newest_checkpoint() == ended.run.checkpoint(6)


@pytest.mark.long
def test_run_of_python_has_the_model_after_a_rollback(write_recipe, knobs, tmp_path, patched_steps):
    patched_steps[1].add(7)
    run = prepare_run(load_config(write_recipe(**knobs)), tmp_path / "run")
    final = load_file(loop.train(run).final / "model.safetensors")
    trained = run.model.transformer.ln_f.weight
    assert (run.state.step, run.state.skipped_steps) == (12, 2)
    assert torch.equal(trained, final["transformer.ln_f.weight"])


@pytest.fixture
def monitor(tmp_path):
    """A Monitor of a run without a checkpoint, with knobs such as tracking__every=5."""

    def build(**knobs) -> Monitor:
        config = replace_knobs(
            Config(), {key.replace("__", "."): value for key, value in knobs.items()}
        )
        return Monitor(
            Accelerator(),
            config,
            CheckpointWriter(Accelerator(), RunFolder(tmp_path / "none"), keep=1),
        )

    return build


def test_loss_average_ignores_spikes_and_nan(monitor):
    monitor, state = monitor(train__rollback_ratio=1.5), TrainState()
    assert not monitor.spiked(state, 4.0, None)
    assert state.loss_average == pytest.approx(4.0)
    assert not monitor.spiked(state, 2.0, None)
    assert state.loss_average == pytest.approx(3.8)
    assert not monitor.spiked(state, float("nan"), None)
    assert not monitor.spiked(state, 100.0, None)  # there is no checkpoint to roll back to
    assert state.loss_average == pytest.approx(3.8)


def test_ten_non_finite_steps_end_the_run(monitor):
    build, monitor = monitor, monitor(tracking__every=5)
    state = TrainState(step=5)
    for _ in range(4):
        monitor.add(torch.tensor(1.0))
    monitor.add(torch.tensor(float("inf")))
    assert monitor.report(state)["train/skipped_steps"] == 1
    for step in range(6, 15):
        state.step = step
        monitor.add(torch.tensor(float("nan")))
        if step == 8:  # a resume continues with the counts in the state
            monitor.count_steps(state)
            state, monitor = dataclasses.replace(state), build(tracking__every=5)
    with pytest.raises(UserError, match="no finite gradient in the last 10 steps"):
        monitor.report(state)


@pytest.mark.parametrize(
    ("max_norm", "norms", "share"),
    [
        (1.0, [0.5, 2.0], 0.5),
        (1.0, [2.0, 0.5, 3.0, 0.1], 0.5),
        (1.0, [float("inf"), 0.5, 0.5, 0.5], 0.0),  # skipped, not clipped
        (0.0, [2.0], None),  # nothing is clipped
    ],
)
@pytest.mark.parametrize("saved_after", [None, 0, 1])
def test_clipped_share_counts_steps_since_last_report(monitor, max_norm, norms, share, saved_after):
    build, state = monitor, TrainState(step=4, reported_step=4)
    monitor = build(optim__max_grad_norm=max_norm)
    for index, norm in enumerate(norms):
        state.step += 1
        monitor.add(torch.tensor(norm))
        if index == saved_after and len(norms) > index + 1:  # and resumed
            monitor.count_steps(state)
            monitor = build(optim__max_grad_norm=max_norm)
    values = monitor.report(state)
    assert values.get("train/clipped_share") == share
    assert values["train/grad_norm"] == pytest.approx(norms[-1])
    assert (state.reported_step, state.clipped_steps, state.not_finite_steps) == (state.step, 0, 0)
