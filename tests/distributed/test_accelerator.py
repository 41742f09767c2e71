"""Signals, durations, lost processes, checks of the accelerate config, DeepSpeed's config and
state.
"""

import os
import signal
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator

from nanogpt_hf.commands import main
from nanogpt_hf.config.checks import parse_duration
from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed.deepspeed import configure
from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process
from nanogpt_hf.distributed.signals import stop_on_signals
from nanogpt_hf.errors import LostProcess, UserError
from nanogpt_hf.runs.folder import RunFolder


@pytest.mark.parametrize(
    "names",
    [["SIGINT"], ["SIGINT", "SIGTERM"], ["SIGTERM", "SIGINT"], ["SIGUSR1", "SIGHUP", "SIGINT"]],
)
def test_signal_requests_stop_and_second_ctrl_c_interrupts(names, capfd):
    before = signal.getsignal(signal.SIGINT)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    accelerator = Accelerator()
    with stop_on_signals() as stop:
        assert not stop.on_any_process(accelerator)
        for name in names:
            os.kill(os.getpid(), getattr(signal, name))
            assert stop.on_any_process(accelerator)
            assert stop.reason == f"received {names[0]}"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGHUP, hangup)
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err.startswith("\nstopping after this step; a second Ctrl-C")


def test_second_ctrl_c_has_the_handler_of_the_program():
    asked = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        with stop_on_signals(message=""):
            for expected in ([], [signal.SIGINT]):
                os.kill(os.getpid(), signal.SIGINT)
                assert asked == expected
    finally:
        signal.signal(signal.SIGINT, before)


def test_ignored_sighup_stays_ignored():
    # nohup ignores this signal.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.on_any_process(Accelerator())
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("11h30m", 41400), ("45m", 2700), ("90s", 90), ("1h1m1s", 3661), ("ten", None), ("30", None)],
)
def test_parse_duration(time, seconds):
    assert parse_duration(time) == seconds


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RuntimeError(
                "[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:9"
            ),
            (
                "lost another process: Connection closed by peer [10.0.0.2]:9; --resume "
                "continues from {}"
            ),
        ),
        (
            RuntimeError(
                "[/src/gloo/transport/tcp/pair.cc:1] Timed out ... before reporting an error. "
                "GLHF! \N{BEACH WITH UMBRELLA}"
            ),
            (
                "lost another process: Timed out ... before reporting an error; --resume "
                "continues from {}"
            ),
        ),
        (
            torch.distributed.DistNetworkError("reset"),
            "lost another process: reset; --resume continues from {}",
        ),
        (torch.distributed.DistBackendError("NCCL error: invalid usage"), None),
        (RuntimeError("shapes do not fit"), None),
    ],
)
def test_lost_process_is_one_line_and_other_errors_pass(tmp_path, error, line):
    run = RunFolder(tmp_path)
    run.checkpoint(3).mkdir(parents=True)
    expected = type(error) if line is None else LostProcess
    with pytest.raises(expected) as raised, one_line_for_a_lost_process(run):
        raise error
    assert str(raised.value) == (str(error) if line is None else line.format(run.checkpoint(3)))


def test_sharding_beyond_the_machine_is_refused(capsys, monkeypatch, tmp_path, write_recipe):
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert main(["pretrain", str(write_recipe()), "--run-dir", str(tmp_path / "run")]) == 2
    assert "sets FSDP, but this machine" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_address_given_to_the_launcher_does_not_mean_several_processes():
    code = (
        "import os, subprocess, sys\n"
        "check = 'from nanogpt_hf.distributed.accelerate_config import settled; "
        "from nanogpt_hf.distributed.mesh import Mesh; settled(Mesh())'\n"
        "subprocess.run([sys.executable, '-c', check], check=True)"
    )
    environment = os.environ | {
        "ACCELERATE_MIXED_PRECISION": "no",
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "29500",
    }
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def deepspeed_config(**changes) -> dict:
    return {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": "auto", **changes}


def test_deepspeed_config_follows_the_recipe():
    config = Config()
    deepspeed = deepspeed_config()
    configure(deepspeed, config, 5)
    assert deepspeed["gradient_accumulation_steps"] == 5
    assert deepspeed["gradient_clipping"] == config.optim.max_grad_norm
    assert deepspeed["train_micro_batch_size_per_gpu"] == config.train.micro_batch_size
    assert deepspeed["communication_data_type"] == "fp32"
    assert deepspeed["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        (
            {"gradient_accumulation_steps": 4},
            "sets gradient_accumulation_steps 4, but train.tokens_per_step",
        ),
        (
            {"gradient_clipping": 0.5},
            "sets gradient_clipping 0.5, but optim.max_grad_norm of the recipe needs 1.0",
        ),
        (
            {"train_micro_batch_size_per_gpu": 7},
            "sets train_micro_batch_size_per_gpu 7, but train.micro_batch_size",
        ),
        ({"zero_optimization": {"stage": 1}}, "ZeRO stage 1, .*: only stages 2 and 3"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "nvme cannot be saved",
        ),
    ],
)
def test_conflicting_deepspeed_config_is_refused(entries, complaint):
    with pytest.raises(UserError, match=complaint):
        configure(deepspeed_config(**entries), Config(), 5)
