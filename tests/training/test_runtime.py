"""The machine's side: signals, the clock, and the time knob."""

import os
import signal

import pytest
import torch
from accelerate import Accelerator

from nanogpt_hf.config.schema import seconds_of
from nanogpt_hf.errors import LostProcess
from nanogpt_hf.training.processes import one_line_for_a_lost_process
from nanogpt_hf.training.run_folder import RunFolder
from nanogpt_hf.training.runtime import stop_on_signals


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_asks_for_a_stop_and_ctrl_c_after_it_interrupts_at_once(name):
    before = signal.getsignal(signal.SIGINT)
    accelerator = Accelerator()
    with stop_on_signals() as stop:
        assert not stop.on_any_process(accelerator)
        os.kill(os.getpid(), getattr(signal, name))
        assert stop.on_any_process(accelerator)
        assert stop.reason == f"{name} came"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("time", "seconds"), [("11h30m", 41400), ("45m", 2700), ("90s", 90), ("1h1m1s", 3661), ("ten", None), ("30", None)]
)
def test_times(time, seconds):
    assert seconds_of(time) == seconds


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RuntimeError("[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:9"),
            "lost another process: Connection closed by peer [10.0.0.2]:9; --resume goes on from {}",
        ),
        (torch.distributed.DistNetworkError("reset"), "lost another process: reset; --resume goes on from {}"),
        (torch.distributed.DistBackendError("NCCL error: invalid usage"), None),
        (RuntimeError("shapes do not fit"), None),
    ],
)
def test_only_a_lost_process_becomes_the_line_that_says_so(tmp_path, error, line):
    run = RunFolder(tmp_path)
    run.checkpoint(3).mkdir(parents=True)
    expected = type(error) if line is None else LostProcess
    with pytest.raises(expected) as raised, one_line_for_a_lost_process(run):
        raise error
    assert str(raised.value) == (str(error) if line is None else line.format(run.checkpoint(3)))
