"""The `doctor` command: no finding on a sound machine, and each fault when it is provoked."""

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forked import Forked
from nanogpt_hf.commands import main
from nanogpt_hf.doctor import diagnose, machine

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def sound_machine(monkeypatch, tmp_path):
    """A CPU, free disk space and writable caches, on any test machine."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))


def run(capsys, *arguments: object) -> tuple[int, str]:
    status = main(["doctor", *map(str, arguments)])
    return status, capsys.readouterr().out


def lines(out: str, level: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith(level)]


def test_doctor_on_a_sound_machine(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out = run(capsys, "--json", "findings.json")
    assert status == 0
    assert lines(out, "fault") == []
    topics = ["versions", "machine", "disk", "launch", "fingerprint", "processes", "all-reduce"]
    assert [line.split()[1] for line in lines(out, "ok")] == [
        t for t in topics for _ in range(4 if t == "disk" else 1)
    ]
    assert f"torch {torch.__version__}, transformers " in out
    assert f"rank 0  {socket.gethostname()}  pid {os.getpid()}  cpu" in out
    assert out.count("n/a with one process") == 1
    assert out.endswith("10 ok, 0 warnings, 0 faults\n")
    assert [finding["level"] for finding in json.loads(Path("findings.json").read_text())] == [
        "ok"
    ] * 10
    # nothing else was written
    assert [path.name for path in tmp_path.iterdir()] == ["findings.json"]


@pytest.mark.long
def test_doctor_of_two_processes(tmp_path, write_recipe, launch_warm):
    recipe, file = write_recipe(train__tokens_per_step=512), tmp_path / "findings.json"
    assert main(["prepare", str(recipe)]) == 0
    ended = []
    caches = {"HF_HOME": str(tmp_path), "TORCH_HOME": str(tmp_path)}
    launch_warm(
        *("cpu_ddp", "doctor", recipe, "--json", file),
        **caches,
        ends_with=lambda *end: ended.append(end),
    )
    ((status, out),) = ended
    assert status == 0, out
    assert "2 processes, device cpu, distributed type MULTI_CPU" in out
    assert "sums equal on all processes" in out
    assert lines(out, "fault") == []
    findings = json.loads(file.read_text())
    figures = {finding["topic"]: finding["figures"] for finding in findings if finding["figures"]}
    ranks = figures["processes"]["ranks"]
    assert [p["rank"] for p in ranks] == [0, 1]
    assert len({p["pid"] for p in ranks}) == 2
    rows = figures["all-reduce"]["rows"]
    assert [size for size, _, _ in rows][:3] == [2**12, 2**16, 2**20]
    for size, seconds, speed in rows:
        assert speed == pytest.approx(size / seconds / 1e9)  # 2(n - 1)/n is 1 for two processes
    assert figures["all-reduce"]["equal"]


def test_doctor_finds_full_disk(capsys, monkeypatch, tmp_path, write_recipe):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000))
    status, out = run(capsys, write_recipe())
    assert status == 1
    (fault,) = lines(out, "fault")
    # 10,576 parameters × (12 × 3 + 4 × 3) bytes
    assert "run folder runs/tiny: 0.2 MB free" in fault
    assert "the run's checkpoints and models need 0.4 MB" in fault
    assert len(lines(out, "warning")) == 3
    status, out = run(capsys)
    assert status == 0
    assert len(lines(out, "warning")) == 4


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (
            {"WORLD_SIZE": "2", "ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_CPU": "false"},
            "the launcher started 2 processes, but accelerate sees 1",
        ),
        (
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            "the accelerate config sets FSDP, but this machine provides NO on cpu",
        ),
        ({"WORLD_SIZE": "3"}, "is not a multiple of"),  # tokens_per_step
    ],
)
def test_doctor_finds_launches_that_fail(
    capsys, monkeypatch, tmp_path, write_recipe, environment, reason
):
    monkeypatch.chdir(tmp_path)
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
    rendezvous = {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    for name, value in rendezvous.items():
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


def process(rank: int, **facts) -> machine.Process:
    base = {
        "host": "a",
        "device": "cuda:0",
        "gpu": f"uuid-{rank}",
        "versions": {"torch": "2.13.0"},
        "threads": 1,
    }
    return machine.Process(rank=rank, pid=1, free=10**9, memory=10**9, places=[], **(base | facts))


def faults(findings: list) -> list[str]:
    return [finding.text for finding in findings if finding.level != "ok"]


def test_judge_processes_finds_shared_gpu_and_versions():
    assert faults(diagnose.judge_processes([process(0), process(1)])) == []
    (shared,) = faults(diagnose.judge_processes([process(0, gpu="one"), process(1, gpu="one")]))
    assert shared == "2 processes share one GPU of a (one): start one per GPU"
    assert (
        faults(diagnose.judge_processes([process(0, gpu="one"), process(1, gpu="one", host="b")]))
        == []
    )
    (versions,) = faults(
        diagnose.judge_processes([process(0), process(1, versions={"torch": "2.11.0"})])
    )
    assert versions.startswith(
        "rank 1 on the same host a has torch 2.11.0, rank 0 has torch 2.13.0"
    )
