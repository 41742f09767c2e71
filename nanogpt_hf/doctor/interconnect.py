"""Detect the interconnect of a run's GPUs and its theoretical bandwidth; None if it is unknown."""

import os
import re
import subprocess
from dataclasses import dataclass

import psutil

# GB/s per direction, from the specifications: per NVLink (2 to 4: 25, 5: 50), per PCIe lane after encoding.
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
    """The output of nvidia-smi without colours; '' if it is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout) if done.returncode == 0 else ""


def gpu_link(uuids: list[str], capability: int) -> Link:
    """The slowest connection between any two of these GPUs of one machine, by nvidia-smi."""
    query = "--query-gpu=uuid,index,pcie.link.gen.max,pcie.link.width.max"
    rows = [line.split(", ") for line in _nvidia_smi(query, "--format=csv,noheader").splitlines()]
    cards = [row[1:] for row in rows if any(row[0].endswith(uuid) for uuid in uuids)]
    matrix = [line.split() for line in _nvidia_smi("topo", "-m").splitlines() if re.match(r"GPU\d+\s", line)]
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
        count, each = min(int(connection[2:]) for connection in connections), _NVLINK.get(capability)
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
    """The network between machines; its peak is known only if an environment variable names the interface."""
    name = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "").lstrip("=")
    if backend == "nccl" and os.environ.get("NCCL_IB_DISABLE") != "1":
        return Link("network", "several hosts; NCCL_DEBUG=INFO logs whether it uses InfiniBand or Ethernet")
    speed = psutil.net_if_stats()[name].speed if name in psutil.net_if_stats() else 0  # Mbit/s, 0 where not known
    if not speed:
        return Link("network", f"several hosts; {backend.upper()}_SOCKET_IFNAME names no interface of known speed")
    return Link("network", f"several hosts, interface {name}", speed / 8000, f"{name} at {speed:,} Mbit/s / 8")
