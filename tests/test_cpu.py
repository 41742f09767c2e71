"""CPU cores and threads: cgroup quotas, settings of the user, threads that a run recorded."""

import os

import psutil
import pytest
import torch

from nanogpt_hf.cpu import (
    SPIN_COUNT,
    allowed_cores,
    cgroup_quota,
    limit_spinning,
    share_threads,
    stated_threads,
)
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.provenance import add_start, continue_on, fingerprint, last_start


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", None), ("150000 100000", 2), ("50000 100000", 1), ("x", None), (None, None)],
)
def test_cgroup_quota(tmp_path, text, cores):
    file = tmp_path / "cpu.max"
    if text:
        file.write_text(text)
    assert cgroup_quota(file) == cores


def test_allowed_cores_follow_affinity_and_quota(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("nanogpt_hf.cpu.cgroup_quota", lambda: None)
    assert allowed_cores() == 8
    monkeypatch.setattr("nanogpt_hf.cpu.cgroup_quota", lambda: 3)
    assert allowed_cores() == 3


def test_limit_spinning_leaves_an_explicit_setting(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    limit_spinning()
    assert os.environ.pop("GOMP_SPINCOUNT") == str(SPIN_COUNT)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize(
    ("environment", "stated"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,2"}, 3),  # the second limits nested regions
        # accelerate's own default
        ({"OMP_NUM_THREADS": "4", "ACCELERATE_MIXED_PRECISION": "no"}, None),
        ({"OMP_NUM_THREADS": "3", "ACCELERATE_MIXED_PRECISION": "no"}, 3),
        ({"OMP_NUM_THREADS": "4", "ACCELERATE_MIXED_PRECISION": "no", "OMP_DYNAMIC": "FALSE"}, 4),
    ],
)
def test_stated_threads(monkeypatch, environment, stated):
    for name in ("OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION", "OMP_DYNAMIC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    assert stated_threads(1) == stated


@pytest.mark.parametrize(
    ("default", "processes", "threads"),
    [(4, 1, 4), (64, 1, 8), (64, 2, 4), (64, 16, 1)],
)
def test_processes_share_the_allowed_cores(monkeypatch, default, processes, threads):
    chosen = [default]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("nanogpt_hf.cpu.allowed_cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    share_threads(processes)
    assert chosen == [default, threads]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder whose last start had 1 thread, on a machine of 4 cores; nothing stated."""
    run = RunFolder(tmp_path)
    for threads in ("2", "1"):
        add_start(run, {"fingerprint": fingerprint(torch.device("cpu")) | {"threads": threads}})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("nanogpt_hf.runs.provenance.allowed_cores", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield run
    torch.set_num_threads(before)


@pytest.mark.parametrize(("stated", "threads"), [(None, 1), ("3", 3)])
def test_resume_keeps_the_number_of_threads_unless_one_is_stated(
    run, caplog, monkeypatch, stated, threads
):
    if stated:
        monkeypatch.setenv("OMP_NUM_THREADS", stated)
    continue_on(last_start(run), torch.device("cpu"), 1, "fp32", "no")
    assert torch.get_num_threads() == threads
    assert bool(caplog.messages) == bool(stated)  # another number than before is reported


def test_changed_fingerprint_is_one_line_with_its_parts(run, caplog):
    now = fingerprint(torch.device("cpu"))
    add_start(run, {"fingerprint": now | {"id": "0", "numpy": "1.0"}})
    continue_on(last_start(run), torch.device("cpu"), 1, "fp32", "no")
    (line,) = caplog.messages
    assert f"id 0 -> {now['id']}, numpy 1.0 -> {now['numpy']}: losses will agree" in line
    caplog.clear()
    add_start(run, {"fingerprint": now, "precision": "bf16"})
    continue_on(last_start(run), torch.device("cpu"), 1, "fp32", "no")
    (line,) = caplog.messages
    assert "config differs from the run's start at step 0: precision bf16 -> fp32: losses" in line
    caplog.clear()
    add_start(run, {"step": 7, "fingerprint": now, "dynamo": "inductor"})
    continue_on(last_start(run), torch.device("cpu"), 1, "fp32", "no")
    (line,) = caplog.messages
    assert "differs from the run's start at step 7: dynamo inductor -> no: losses will" in line
    caplog.clear()
    add_start(run, {"fingerprint": now, "precision": "fp32", "dynamo": "no"})
    continue_on(last_start(run), torch.device("cpu"), 1, "fp32", "no")
    assert caplog.messages == []
