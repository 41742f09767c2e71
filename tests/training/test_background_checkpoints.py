"""Checkpoints are written in the background: training goes on, and whatever ends the run waits
for them.
"""

import errno
import os
import signal
import threading

import pytest

from assertions import at_step
from nanogpt_hf.checkpoint import writer
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.runs.folder import RunFolder, step_of
from nanogpt_hf.runs.metrics import read_metrics

write_tensors = writer.write_tensors

pytestmark = pytest.mark.long


@pytest.fixture
def knobs():
    every = {"checkpoint__every": 3, "eval__every": 10_000}
    return every | {"optim__schedule": "constant", "checkpoint__keep": 9}


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


def steps_of(run: RunFolder) -> list[int]:
    return [step_of(folder) for folder in run.checkpoint_folders()]


def hold_writes(monkeypatch) -> threading.Event:
    """Make the background write wait until the event is set."""
    event = threading.Event()

    def write(*arguments):
        assert event.wait(60), "training waits for the write"
        return write_tensors(*arguments)

    monkeypatch.setattr(writer, "write_tensors", write)
    return event


def fail_writes(monkeypatch) -> None:
    def write(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "write_tensors", write)


def test_training_continues_while_a_checkpoint_is_written(pretrain, run, monkeypatch):
    assert pretrain(train__max_steps=3).status == 0
    before = tensors_of(run)
    event = hold_writes(monkeypatch)
    folders = []

    def release() -> None:
        folders.extend(path.name for path in run.checkpoints.iterdir())
        event.set()

    at_step(monkeypatch, 5, release)
    assert pretrain("--overwrite", train__max_steps=7).status == 0
    assert sorted(folders) == [".no_checkpoint_yet", ".step_00000003.partial"]
    assert steps_of(run) == [3, 6, 7]
    after = tensors_of(run)  # the state of its step though training continued
    assert len(before) > 40
    assert all(before[name].equal(after[name]) for name in before.keys() | after.keys())


def tensors_of(run: RunFolder) -> dict:
    """Those of step 3."""
    files = read_checkpoint(run.checkpoint(3))[:2]
    return {name: tensor.clone() for part in files for name, tensor in part.items()}


@pytest.mark.parametrize("ending", ["signal", "error", "end"])
def test_end_of_the_run_waits_for_the_write(pretrain, run, monkeypatch, ending):
    event = hold_writes(monkeypatch)

    def end() -> None:
        threading.Timer(0.3, event.set).start()
        if ending == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        if ending == "error":
            raise ZeroDivisionError

    at_step(monkeypatch, 4, end)
    if ending == "error":
        with pytest.raises(ZeroDivisionError):
            pretrain(train__max_steps=50)
    else:
        steps, status = (5, 0) if ending == "end" else (50, 75)
        assert pretrain(train__max_steps=steps).status == status
    assert steps_of(run) == ([3] if ending == "error" else [3, 5])
    read_checkpoint(run.newest_checkpoint())
    assert not list(run.checkpoints.glob("*.partial"))


def test_write_error_stops_the_run_before_the_next_checkpoint(pretrain, run, monkeypatch):
    assert pretrain(train__max_steps=3).status == 0
    fail_writes(monkeypatch)
    ended = pretrain("--resume", train__max_steps=100_000, checkpoint__every=50)
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert ended.line.startswith(f"{run.checkpoint(50)}: ")
    assert "No space left on device; free some space, then continue with " in ended.line
    assert max(event["step"] for event in read_metrics(run)) < 100
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000003"]


def test_error_of_the_run_is_named_not_that_of_the_write(pretrain, monkeypatch):
    fail_writes(monkeypatch)

    def end() -> None:
        raise ZeroDivisionError

    at_step(monkeypatch, 3, end)
    with pytest.raises(ZeroDivisionError):
        pretrain(train__max_steps=50)


def test_second_interrupt_does_not_wait_for_the_write(pretrain, run, monkeypatch):
    event = hold_writes(monkeypatch)

    def interrupt() -> None:
        raise KeyboardInterrupt

    at_step(monkeypatch, 4, interrupt)
    with pytest.raises(KeyboardInterrupt):
        pretrain(train__max_steps=50)
    assert not run.checkpoint_folders()
    event.set()
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
