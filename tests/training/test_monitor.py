"""Loss spikes: a run goes back, past the data that did it, and stays a pure function of recipe, seed and step."""

import json

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import Config, replace_knobs
from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training import loop
from nanogpt_hf.training.monitor import Monitor, memory_peak
from nanogpt_hf.training.tracking import read_metrics

RECIPE = {
    "model__dropout": 0.1,
    "train__rollback_ratio": 2.0,
    "train__max_steps": 12,
    "checkpoint__every": 3,
    "eval__every": 4,
}


@pytest.fixture
def data_seen(monkeypatch):
    """The data steps that were trained on, in order. Reported losses of those in `spikes` are ten times too large.

    At those in `crashes` the run dies, once.
    """
    seen, spikes, crashes, train_step = [], set(), set(), loop.train_step

    def spiking(run, step, learning_rate):
        if step in crashes:
            crashes.remove(step)
            raise SystemError("crash")
        result = train_step(run, step, learning_rate)
        seen.append(step)
        return result._replace(loss=result.loss * 10) if step in spikes else result

    monkeypatch.setattr(loop, "train_step", spiking)
    return seen, spikes, crashes


@pytest.fixture
def pretrain(tmp_path, write_recipe, forget_accelerate):
    def run(name: str, *arguments: str, **overrides) -> tuple[int, RunFolder]:
        forget_accelerate()
        recipe = write_recipe(**RECIPE | overrides)
        return main(["pretrain", str(recipe), "--run-dir", str(tmp_path / name), *arguments]), RunFolder(
            tmp_path / name
        )

    return run


def test_a_spike_goes_back_to_the_newest_checkpoint_and_past_its_data(pretrain, data_seen, capsys):
    seen, spikes, _ = data_seen
    spikes.add(7)
    status, run = pretrain("run")
    assert status == 0
    # step 8 saw data 7 and spiked; from step 6 on a step sees what is two further
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    said = capsys.readouterr().err
    assert (
        "step 8: the loss is above 2 times its running average; rolling back to step 6 and skipping the data of 2"
        in said
    )
    steps = [event["step"] for event in read_metrics(run) if "train/loss" in event]
    assert steps == list(range(1, 13))
    assert max(event.get("train/loss", 0) for event in read_metrics(run)) < 5
    assert json.loads((run.newest_checkpoint() / "state.json").read_text())["skipped_steps"] == 2


@pytest.mark.parametrize("crash_at", [7, 10, 12])  # before the spike; after it, before and after a checkpoint
def test_a_run_that_goes_back_resumes_bit_for_bit(pretrain, data_seen, crash_at):
    _, spikes, crashes = data_seen
    spikes.add(7)
    _, whole = pretrain("whole")
    crashes.add(crash_at)
    with pytest.raises(SystemError, match="crash"):
        pretrain("killed")
    status, killed = pretrain("killed", "--resume")
    assert status == 0
    weights = [load_file(run.final / "model.safetensors") for run in (whole, killed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    losses = [[event["train/loss"] for event in read_metrics(run) if "train/loss" in event] for run in (whole, killed)]
    assert losses[0] == losses[1]


def test_spikes_that_go_on_end_the_run_with_one_line(pretrain, data_seen, capsys):
    _, spikes, _ = data_seen
    spikes.update(range(7, 100))
    status, run = pretrain("run")
    assert status == 2
    assert "again after 3 rollbacks to step 6; lower optim.learning_rate" in capsys.readouterr().err
    assert run.newest_checkpoint() == run.checkpoint(6)


def test_by_default_a_spike_is_only_a_spike(pretrain, data_seen):
    seen, spikes, _ = data_seen
    spikes.add(7)
    status, _ = pretrain("run", train__rollback_ratio=None)
    assert status == 0
    assert seen == list(range(12))


@pytest.fixture
def monitor(tmp_path):
    """A Monitor of a run without a checkpoint, with knobs such as tracking__every=5."""

    def build(**knobs) -> Monitor:
        config = replace_knobs(Config(), {key.replace("__", "."): value for key, value in knobs.items()})
        return Monitor(Accelerator(), config, RunFolder(tmp_path / "none"))

    return build


def test_the_average_follows_the_loss_and_leaves_out_spikes_and_what_is_no_number(monitor):
    monitor, state = monitor(train__rollback_ratio=1.5), TrainState()
    assert not monitor.spiked(state, 4.0)
    assert state.loss_average == pytest.approx(4.0)
    assert not monitor.spiked(state, 2.0)
    assert state.loss_average == pytest.approx(3.8)
    assert not monitor.spiked(state, float("nan"))
    assert not monitor.spiked(state, 100.0)  # there is no checkpoint to go back to
    assert state.loss_average == pytest.approx(3.8)


def test_ten_bad_steps_in_a_row_name_the_checkpoint(monitor):
    monitor = monitor(tracking__every=5)
    for _ in range(4):
        monitor.add(torch.tensor(1.0))
    monitor.add(torch.tensor(float("inf")))
    assert monitor.report(TrainState())["train/skipped_steps"] == 1
    for _ in range(9):
        monitor.add(torch.tensor(float("nan")))
    with pytest.raises(UserError, match="no finite gradient in the last 10 steps"):
        monitor.report(TrainState())


@pytest.mark.parametrize(
    ("max_norm", "norms", "share"),
    [
        (1.0, [2.0, 2.0, 0.5, 3.0, 0.1, 0.2], 0.25),  # of the last four, which are those since the last report
        (1.0, [0.5, 2.0], 0.5),
        (1.0, [float("inf"), 0.5, 0.5, 0.5], 0.0),  # which was skipped, not clipped
        (0.0, [2.0], None),  # nothing is clipped
    ],
)
def test_the_share_of_clipped_steps_is_of_those_since_the_last_report(monitor, max_norm, norms, share):
    monitor = monitor(tracking__every=4, optim__max_grad_norm=max_norm)
    for norm in norms:
        monitor.add(torch.tensor(norm))
    values = monitor.report(TrainState())
    assert values.get("train/clipped_share") == share
    assert values["train/grad_norm"] == pytest.approx(norms[-1])


def test_the_memory_peak_only_rises_and_knows_what_was_taken():
    cpu = torch.device("cpu")
    before = memory_peak(cpu)
    held = torch.ones(before // 4 + 2**24)  # as much again, and 64 MiB
    after = memory_peak(cpu)
    assert after >= before + 2**24
    del held
    assert memory_peak(cpu) == after
