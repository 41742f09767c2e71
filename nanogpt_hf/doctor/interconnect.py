"""Detect the interconnect of a run's GPUs and its theoretical bandwidth; None if it is unknown."""

import os
import re
import subprocess
from dataclasses import dataclass

import psutil

# GB/s each way, from the specifications. NVLink 2 to 4 carry 25 a link, NVLink 5 (Blackwell) 50; PCIe as encoded.
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
    """What nvidia-smi prints, without colours; '' where it is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout) if done.returncode == 0 else ""


def gpu_link(uuids: list[str], capability: int) -> Link:
    """The slowest way between any two of these GPUs of one machine, by nvidia-smi."""
    query = "--query-gpu=uuid,index,pcie.link.gen.max,pcie.link.width.max"
    rows = [line.split(", ") for line in _nvidia_smi(query, "--format=csv,noheader").splitlines()]
    cards = [row[1:] for row in rows if any(row[0].endswith(uuid) for uuid in uuids)]
    matrix = [line.split() for line in _nvidia_smi("topo", "-m").splitlines() if re.match(r"GPU\d+\s", line)]
    try:
        numbers = [int(number) for number, _, _ in cards]
        ways = [matrix[a][1 + b] for a in numbers for b in numbers if a < b]
        lanes = min((int(generation), int(width)) for _, generation, width in cards)
    except (ValueError, IndexError):
        ways, lanes = [], (0, 0)
    if not ways or len(cards) != len(uuids):
        return Link("not known", "nvidia-smi did not show these GPUs")
    how = f"nvidia-smi topo -m shows {', '.join(sorted(set(ways)))}"
    if all(way.startswith("NV") for way in ways):
        count, each = min(int(way[2:]) for way in ways), _NVLINK.get(capability)
        return Link("NVLink", how, each and count * each, f"{count} links × {each} GB/s each way" if each else "n/a")
    each = _PCIE_LANE.get(lanes[0])
    peak = each and lanes[1] * each
    return Link(
        "PCIe", how, peak, f"{lanes[1]} lanes of generation {lanes[0]} × {each} GB/s each way" if each else "n/a"
    )


def network_link(backend: str) -> Link:
    """The network between machines: its ceiling is known only where its interface is named and surely used."""
    name = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "").lstrip("=")
    if backend == "nccl" and os.environ.get("NCCL_IB_DISABLE") != "1":
        return Link("network", "several hosts; NCCL_DEBUG=INFO says whether it took InfiniBand or Ethernet")
    speed = psutil.net_if_stats()[name].speed if name in psutil.net_if_stats() else 0  # Mbit/s, 0 where not known
    if not speed:
        return Link("network", f"several hosts; {backend.upper()}_SOCKET_IFNAME names no interface of known speed")
    return Link("network", f"several hosts, interface {name}", speed / 8000, f"{name} at {speed:,} Mbit/s / 8")
