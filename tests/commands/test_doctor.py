"""The `doctor` command: no finding on a sound machine, and each fault when it is provoked."""

import os
import socket
from types import SimpleNamespace

import pytest
import torch

from forked import Forked
from nanogpt_hf.commands import main
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.doctor import diagnose


@pytest.fixture(autouse=True)
def sound_machine(monkeypatch, tmp_path):
    """A CPU, free disk space and writable caches, on any test machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(diagnose, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(diagnose.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))


def run(capsys, *arguments: object) -> tuple[int, str]:
    status = main(["doctor", *map(str, arguments)])
    return status, capsys.readouterr().out


def lines(out: str, level: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith(level)]


def test_doctor_on_a_sound_machine(capsys, tmp_path):
    status, out = run(capsys)
    assert status == 0
    topics = ["versions", "machine", "launch", "fingerprint", "processes", *["disk"] * 3]
    assert [line.split()[1] for line in lines(out, "ok")] == [*topics, "all-reduce"]
    assert f"torch {torch.__version__}, transformers " in out
    assert f"rank 0  {socket.gethostname()}  pid {os.getpid()}  cpu" in out
    assert out.endswith("9 ok, 0 warnings, 0 faults\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_doctor_of_two_processes(tmp_path, write_recipe, launch_warm):
    recipe = write_recipe(train__tokens_per_step=512)
    assert main(["prepare", str(recipe)]) == 0
    ended = []
    launch_warm(
        *("cpu_ddp", "doctor", recipe),
        HF_HOME=str(tmp_path),
        ends_with=lambda *end: ended.append(end),
    )
    ((status, out),) = ended
    assert status == 0, out
    assert "2 processes, device cpu, distributed type MULTI_CPU" in out
    assert "sums equal on all processes" in out
    assert lines(out, "fault") == []
    ranks = [line.split() for line in out.splitlines() if line.strip().startswith("rank ")]
    assert [words[1] for words in ranks] == ["0", "1"]
    assert len({words[4] for words in ranks}) == 2  # pids
    times = [line.split() for line in out.splitlines() if line.endswith("GB/s")]
    assert [words[0] for words in times][:3] == ["4", "64", "1,024"]
    _, _, milliseconds, _, speed, _ = times[2]
    # 2(n - 1)/n is 1 for two processes
    assert float(speed) == pytest.approx(2**20 / float(milliseconds) / 1e6, rel=0.1)


def test_doctor_finds_a_launch_that_a_run_would_refuse(capsys, monkeypatch, write_recipe):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    status, out = run(capsys, write_recipe())
    assert status == 1
    (fault,) = lines(out, "fault")
    assert "launch" in fault
    assert "gradient_accumulation_steps 3" in fault


def test_doctor_finds_disks_that_are_full_or_not_writable(capsys, monkeypatch, tmp_path):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(diagnose.shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000))
    status, out = run(capsys, "--run-dir", tmp_path / "not" / "yet")
    assert status == 0
    assert len(warnings := lines(out, "warning")) == 3
    assert f"not/yet: 0.2 MB free in {tmp_path}" in warnings[0]
    monkeypatch.setattr(diagnose.tempfile, "TemporaryFile", refuse)
    status, out = run(capsys)
    assert status == 1
    assert "not writable" in lines(out, "fault")[0]


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (
            {"WORLD_SIZE": "2", "ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_CPU": "false"},
            "the launcher started 2 processes, but accelerate sees 1",
        ),
        ({"WORLD_SIZE": "3"}, "is not a multiple of"),  # tokens_per_step
    ],
)
def test_doctor_finds_launches_that_fail(capsys, monkeypatch, write_recipe, environment, reason):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    status, out = run(capsys, write_recipe())
    assert status == 1
    (fault,) = lines(out, "fault")
    assert reason in fault


@pytest.mark.long
def test_doctor_reports_processes_that_do_not_respond(tmp_path, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in (ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(diagnose, "PATIENCE", 1)
    with (tmp_path / "output").open("w") as file:
        streams = dict.fromkeys((1, 2), file.fileno())
        assert Forked(["doctor"], streams=streams, folder=tmp_path).wait(60) == 1
    output = (tmp_path / "output").read_text()
    assert "fault    launch      no response from the other processes within 1 s" in output
    assert "GLOO_SOCKET_IFNAME" in output
    assert output.endswith(" 1 fault\n")
    assert "Traceback" not in output


@pytest.mark.parametrize("name", ["a" * 300, "loop", "file", "broken"])
def test_folder_that_cannot_be_made_is_a_fault(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broken").symlink_to("missing")
    (tmp_path / "file").touch()
    level, text = diagnose.judge_disk("run folder", tmp_path / name)
    assert level == "fault"
    assert text.startswith(f"run folder {tmp_path / name}: ")


def test_other_versions_than_rank_0s_are_a_fault():
    shown = []
    ranks = [
        diagnose.Process("a", "rank 0", {"torch": "2.13.0", "python": "3.11"}, []),
        diagnose.Process("b", "rank 1", {"torch": "2.11.0", "python": "3.11"}, []),
    ]
    findings = diagnose.Findings(shown.append, Mesh())
    diagnose.judge_processes(findings, ranks)
    assert findings.end() == 1
    assert "rank 1 on b has torch 2.11.0, unlike rank 0" in shown[1]
