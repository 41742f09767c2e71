"""Inspect the machine: dependencies, folders and disks, processes, devices and their links."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from huggingface_hub.constants import HF_HOME
from packaging.requirements import Requirement

from nanogpt_hf.cpu import allowed_cores
from nanogpt_hf.runs.machine import versions


@dataclass(frozen=True)
class Place:
    """A folder that a run writes to, or the nearest one above it that exists."""

    what: str
    path: str
    free: int  # bytes
    writable: bool


@dataclass(frozen=True)
class Process:
    """One process of the launch and its device."""

    rank: int
    host: str
    pid: int
    device: str
    gpu: str | None  # the GPU's UUID
    free: int  # bytes of the GPU's memory, or of the machine's
    memory: int
    cores: int
    threads: int
    versions: dict[str, str]
    places: list[Place]


def outside_ranges() -> list[str]:
    """Dependencies that are missing or outside the range of pyproject.toml, one line each."""
    try:
        lines = metadata.requires("nanogpt_hf") or ()
    except metadata.PackageNotFoundError:
        return [
            "nanogpt_hf is not installed, so the versions it needs are unknown: pip install -e ."
        ]
    problems = []
    for line in lines:
        needed = Requirement(line)
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            problems.append(
                f"{needed.name} is missing, needs {needed.specifier}: pip install {needed.name}"
            )
            continue
        if not needed.specifier.contains(found, prereleases=True):
            problems.append(
                f"{needed.name} {found} is outside {needed.specifier}: pip install "
                f"'{needed.name}{needed.specifier}'"
            )
    return problems


def inspect_folder(what: str, folder: Path | str) -> Place:
    """Free bytes at the location of `folder`, which need not exist, and whether a file can be
    written there.
    """
    path = Path(folder).expanduser().absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    try:
        with tempfile.TemporaryFile(dir=path):
            writable = True
    except OSError:
        writable = False
    return Place(what, str(path), shutil.disk_usage(path).free, writable)


def places_of_a_run(run_folder: Path, data_folder: str) -> list[Place]:
    """The run folder, the data folder and the caches."""
    return [
        inspect_folder(f"run folder {run_folder}", run_folder),
        inspect_folder(f"data folder {data_folder}", data_folder),
        inspect_folder("Hugging Face cache", HF_HOME),
        inspect_folder("torch cache", torch.hub.get_dir()),
    ]


def this_process(accelerator: Accelerator, places: list[Place]) -> Process:
    device, ram = accelerator.device, psutil.virtual_memory()
    on_gpu = device.type == "cuda"
    free, memory = torch.cuda.mem_get_info(device) if on_gpu else (ram.available, ram.total)
    return Process(
        rank=accelerator.process_index,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=f"{device} {torch.cuda.get_device_name(device)}" if on_gpu else str(device),
        gpu=str(getattr(torch.cuda.get_device_properties(device), "uuid", device))
        if on_gpu
        else None,
        free=free,
        memory=memory,
        cores=allowed_cores(),
        threads=torch.get_num_threads(),
        versions=versions(),
        places=places,
    )


# GB/s per direction, from the specifications: per NVLink (2 to 4: 25, 5: 50), per PCIe lane after
# encoding.
_NVLINK = {7: 25, 8: 25, 9: 25, 10: 50}  # by the major compute capability
_PCIE_LANE = {3: 0.985, 4: 1.969, 5: 3.938}  # by generation


@dataclass(frozen=True)
class Link:
    """The interconnect that an all-reduce uses."""

    name: str
    detected_by: str
    peak: float | None = None  # bus bandwidth, GB/s
    peak_source: str = "n/a"  # how `peak` was computed


def _nvidia_smi(*arguments: str) -> str:
    """The output of nvidia-smi without colors; '' if it is missing or fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout) if done.returncode == 0 else ""


def gpu_link(uuids: list[str], capability: int) -> Link:
    """The slowest connection between any two of these GPUs of one machine, by nvidia-smi."""
    query = "--query-gpu=uuid,index,pcie.link.gen.max,pcie.link.width.max"
    rows = [line.split(", ") for line in _nvidia_smi(query, "--format=csv,noheader").splitlines()]
    cards = [row[1:] for row in rows if any(row[0].endswith(uuid) for uuid in uuids)]
    matrix = [
        line.split()
        for line in _nvidia_smi("topo", "-m").splitlines()
        if re.match(r"GPU\d+\s", line)
    ]
    try:
        numbers = [int(number) for number, _, _ in cards]
        connections = [matrix[a][1 + b] for a in numbers for b in numbers if a < b]
        lanes = min((int(generation), int(width)) for _, generation, width in cards)
    except (ValueError, IndexError):
        connections, lanes = [], (0, 0)
    if not connections or len(cards) != len(uuids):
        return Link("unknown", "nvidia-smi does not list these GPUs")
    detected_by = f"nvidia-smi topo -m shows {', '.join(sorted(set(connections)))}"
    if all(connection.startswith("NV") for connection in connections):
        count, each = (
            min(int(connection[2:]) for connection in connections),
            _NVLINK.get(capability),
        )
        return Link(
            "NVLink",
            detected_by,
            each and count * each,
            f"{count} links × {each} GB/s per direction" if each else "n/a",
        )
    each = _PCIE_LANE.get(lanes[0])
    peak = each and lanes[1] * each
    return Link(
        "PCIe",
        detected_by,
        peak,
        f"{lanes[1]} lanes of generation {lanes[0]} × {each} GB/s per direction" if each else "n/a",
    )


def network_link(backend: str) -> Link:
    """The network between machines; its peak is known only if an environment variable names the
    interface.
    """
    name = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "").lstrip("=")
    if backend == "nccl" and os.environ.get("NCCL_IB_DISABLE") != "1":
        return Link(
            "network",
            "several hosts; NCCL_DEBUG=INFO logs whether it uses InfiniBand or Ethernet",
        )
    # Mbit/s, 0 where not known
    speed = psutil.net_if_stats()[name].speed if name in psutil.net_if_stats() else 0
    if not speed:
        return Link(
            "network",
            f"several hosts; {backend.upper()}_SOCKET_IFNAME names no interface of known speed",
        )
    return Link(
        "network",
        f"several hosts, interface {name}",
        speed / 8000,
        f"{name} at {speed:,} Mbit/s / 8",
    )
