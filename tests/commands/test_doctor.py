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
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.doctor import diagnose, machine

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def sound_machine(monkeypatch, tmp_path):
    """A CPU, free disk space and writable caches, on any test machine."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(diagnose, "HF_HOME", str(tmp_path))
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
    topics = ["versions", "machine", "launch", "fingerprint", "processes", *["disk"] * 3]
    assert [line.split()[1] for line in lines(out, "ok")] == [*topics, "all-reduce"]
    assert f"torch {torch.__version__}, transformers " in out
    assert f"rank 0  {socket.gethostname()}  pid {os.getpid()}  cpu" in out
    assert out.endswith("9 ok, 0 warnings, 0 faults\n")
    findings = json.loads(Path("findings.json").read_text())
    assert [finding["level"] for finding in findings] == ["ok"] * 9
    # nothing else was written
    assert [path.name for path in tmp_path.iterdir()] == ["findings.json"]


@pytest.mark.long
def test_doctor_of_two_processes(tmp_path, write_recipe, launch_warm):
    recipe, file = write_recipe(train__tokens_per_step=512), tmp_path / "findings.json"
    assert main(["prepare", str(recipe)]) == 0
    ended = []
    launch_warm(
        *("cpu_ddp", "doctor", recipe, "--json", file),
        HF_HOME=str(tmp_path),
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


def test_doctor_finds_disks_that_are_full_or_not_writable(capsys, monkeypatch, tmp_path):
    def refuse(**options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000))
    status, out = run(capsys, "--run-dir", tmp_path / "not" / "yet")
    assert status == 0
    assert len(warnings := lines(out, "warning")) == 3
    assert f"not/yet: 0.2 MB free in {tmp_path} of " in warnings[0]
    monkeypatch.setattr(machine.tempfile, "TemporaryFile", refuse)
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
    other = process(1, versions={"torch": "2.11.0"})
    (versions,) = faults(diagnose.judge_processes([process(0), other]))
    assert versions.startswith("rank 1 on a has torch 2.11.0, rank 0 on a 2.13.0")


def test_judge_launch_finds_unused_gpus():
    actual, mesh = {"device": "cuda", "precision": "no"}, Mesh(world_size=2, local_world_size=2)
    (text,) = faults(diagnose.judge_launch(actual, mesh, gpus=8))
    assert "8 GPUs and uses 2: set num_processes" in text


def test_all_reduce_names_bandwidth_settings_and_unequal_sums():
    rows = [(2**20, 0.001, 1.0), (2**26, 0.7, 100.0)]
    equal = diagnose.judge_all_reduce(rows, True, "nccl")
    assert equal.level == "ok"
    assert "100.00 GB/s at best" in equal.text
    for name in ("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE"):
        assert any(name in line for line in equal.lines)
    assert diagnose.judge_all_reduce(rows, False, "gloo").level == "fault"
