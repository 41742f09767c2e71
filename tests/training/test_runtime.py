"""The machine's side: signals, the clock, and the time knob."""

import os
import signal

import pytest
from accelerate import Accelerator

from nanogpt_hf.config.schema import seconds_of
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
