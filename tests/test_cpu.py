"""CPU cores and threads: cgroup quotas, settings of the user, fewer threads on a busy machine."""

import os
import subprocess
import sys
import time

import psutil
import pytest
import torch

from nanogpt_hf.cpu import (
    SPIN_COUNT,
    CpuTimes,
    allowed_cores,
    cgroup_quota,
    free_threads,
    limit_spinning,
    stated_threads,
)
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.provenance import restore_threads


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("150000 100000", 2), ("50000 100000", 1), ("x", None)]
)
def test_cgroup_quota_v2(tmp_path, text, cores):
    (tmp_path / "cpu.max").write_text(text)
    assert cgroup_quota(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("400000", 4)])
def test_cgroup_quota_v1(tmp_path, quota, cores):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cgroup_quota(tmp_path) == cores


def test_cgroup_quota_is_none_without_cgroups(tmp_path):
    assert cgroup_quota(tmp_path) is None


def test_allowed_cores_follow_affinity_and_quota(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("nanogpt_hf.cpu.cgroup_quota", lambda: None)
    assert allowed_cores() == 8
    monkeypatch.setattr("nanogpt_hf.cpu.cgroup_quota", lambda: 3)
    assert allowed_cores() == 3


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_limit_spinning_leaves_an_explicit_setting(monkeypatch, name):
    for other in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(other, raising=False)
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == str(SPIN_COUNT)
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv(name, "17")
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == ("17" if name == "GOMP_SPINCOUNT" else None)


@pytest.mark.parametrize(
    ("environment", "stated"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,2"}, 3),  # the second limits nested regions
        ({"OMP_NUM_THREADS": "4", "ACCELERATE_MIXED_PRECISION": "no"}, None),  # accelerate's own default
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
    assert stated_threads() == stated


def test_cores_of_others_exclude_this_process():
    start = CpuTimes(clock=10.0, everyone=100.0, this_process=3.0)
    assert start.cores_of_others(CpuTimes(clock=12.0, everyone=105.0, this_process=6.0)) == 1.0
    assert start.cores_of_others(CpuTimes(clock=12.0, everyone=102.0, this_process=6.0)) == 0.0
    assert start.cores_of_others(CpuTimes(clock=10.1, everyone=110.0, this_process=3.0)) == 0.0  # too short to measure


def test_cores_of_others_include_a_busy_program():
    before = CpuTimes.now()
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(1.5)
    after = CpuTimes.now()
    program.kill()
    program.wait()
    assert before.cores_of_others(after) > 0.2  # other programs may run as well


@pytest.mark.parametrize(
    ("busy", "default", "local_world_size", "threads"),
    [
        (0.0, 8, 1, 8),
        (0.4, 8, 1, 8),
        (0.6, 8, 1, 7),
        (1.4, 8, 1, 7),
        (20.0, 8, 1, 1),
        (0.0, 4, 1, 4),  # physical cores
        (0.0, 64, 1, 8),  # a container's share of a machine
        (5.0, 64, 2, 4),  # the other process belongs to this run
    ],
)
def test_free_threads(monkeypatch, busy, default, local_world_size, threads):
    monkeypatch.setattr("nanogpt_hf.cpu.allowed_cores", lambda: 8)
    assert free_threads(busy, default, local_world_size) == threads


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder whose last start had 1 thread, on a machine of 4 cores; nothing stated."""
    (tmp_path / "machine.json").write_text('{"starts": [{"threads": 2}, {"threads": 1}]}')
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("nanogpt_hf.runs.provenance.allowed_cores", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield RunFolder(tmp_path)
    torch.set_num_threads(before)


def test_resume_keeps_number_of_threads(run, caplog):
    restore_threads(run, local_world_size=1)
    assert torch.get_num_threads() == 1
    assert not caplog.records


def test_stated_threads_win_on_resume_and_are_reported(run, caplog, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    restore_threads(run, local_world_size=1)
    assert torch.get_num_threads() == 3
    assert caplog.messages[0].startswith("CPU threads: 1 until now, 3 from here on")


@pytest.mark.parametrize("text", ["", "{}", '{"starts": [{"threads": "2"}]}', '{"starts": [{"threads": 0}]}'])
def test_threads_stay_if_machine_json_does_not_record_them(run, text):
    run.machine.write_text(text)
    restore_threads(run, local_world_size=1)
    assert torch.get_num_threads() == 3
