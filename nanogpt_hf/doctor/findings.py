"""Judge the measurements of `doctor`: each finding is ok, a warning or a fault.

Nothing here measures or prints.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nanogpt_hf.doctor.machine import Link, Place, Process
from nanogpt_hf.formatting import format_bytes, plural

_MIN_DISK = 5e9  # bytes, enough for caches, compiled kernels and a small run
_SAME_LAUNCH = (
    "check that all machines run it with the same num_processes, main_process_ip and "
    "main_process_port"
)
ADVICE = {
    "nccl": (
        _SAME_LAUNCH,
        "environment variables to try on every machine:",
        "NCCL_DEBUG=INFO           NCCL logs which network and links it uses, and what failed",
        (
            "NCCL_SOCKET_IFNAME=eth0   the interface to the other machines, if NCCL uses docker0 "
            "or a VPN"
        ),
        "NCCL_IB_DISABLE=1         sockets instead of InfiniBand that is not set up: slower",
        (
            "NCCL_P2P_DISABLE=1        no peer-to-peer access between the GPUs of a machine, which "
            "an IOMMU can break"
        ),
        "GLOO_SOCKET_IFNAME=eth0   the same for gloo, with which doctor collects its findings",
    ),
    "gloo": (
        _SAME_LAUNCH,
        "environment variables to try on every machine:",
        "GLOO_SOCKET_IFNAME=eth0   the interface to the other machines; `ip addr` lists them",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report, with details below it and figures for the JSON."""

    level: str  # ok, warning, fault
    topic: str
    text: str
    lines: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)


def format_binary(size: int) -> str:
    """4096 -> 4 KiB, 2**26 -> 64 MiB"""
    return f"{size >> 10:,} KiB" if size < 1 << 20 else f"{size >> 20:,} MiB"


def judge_versions(versions: dict[str, str], problems: list[str]) -> list[Finding]:
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [
        Finding("ok", "versions", text, figures=versions),
        *(Finding("warning", "versions", problem) for problem in problems),
    ]


def judge_places(places: list[Place], needed: int | None, host: str = "") -> list[Finding]:
    """Judge the disk of each folder.

    `needed`: the largest size of the run folder, the first of them.
    """
    findings = []
    for index, place in enumerate(places):
        required = needed if index == 0 else None
        text = f"{host}{place.what}: {format_bytes(place.free)} free in {place.path}"
        level = "fault"
        if not place.writable:
            text += ", which is not writable: choose another folder"
        elif required and place.free < required:
            text += f", but the run's checkpoints and models need {format_bytes(required)}"
        elif place.free < _MIN_DISK:
            level, text = "warning", f"{text}, less than {format_bytes(_MIN_DISK)}"
        else:
            level, text = (
                "ok",
                text + ((f"; the run needs up to {format_bytes(required)}") if required else ""),
            )
        findings.append(
            Finding(level, "disk", text, figures=dataclasses.asdict(place) | {"needed": required})
        )
    return findings


def judge_launch(
    requested: dict[str, str], actual: dict[str, str], processes: int, local: int, gpus: int
) -> list[Finding]:
    """Compare settings of the accelerate config with the actual ones; `local` processes and
    `gpus` are on this host.
    """
    facts = ", ".join(f"{name} {value}" for name, value in actual.items())
    findings = [Finding("ok", "launch", f"{plural(processes, 'process')}, {facts}", figures=actual)]
    for name, value in requested.items():
        if value.lower() != actual[name].lower():
            text = f"the accelerate config requests {name} {value}, the launch has {actual[name]}"
            findings.append(Finding("warning", "launch", text))
    if actual["device"] == "cuda" and gpus > local:
        text = (
            f"this host has {gpus} GPUs and uses {local}: set num_processes in the "
            "accelerate config"
        )
        findings.append(Finding("warning", "launch", text))
    return findings


def judge_processes(processes: list[Process]) -> list[Finding]:
    """List the processes; find shared GPUs, more threads than cores, and versions that differ
    from rank 0.
    """
    hosts = Counter(p.host for p in processes)
    lines = [
        f"rank {p.rank}  {p.host}  pid {p.pid}  {p.device}, {format_bytes(p.free)} of "
        f"{format_bytes(p.memory)} free, {plural(p.threads, 'thread')}"
        for p in processes
    ]
    text = f"{plural(len(processes), 'process')} on {plural(len(hosts), 'host')}"
    findings = [
        Finding(
            "ok",
            "processes",
            text,
            tuple(lines),
            {"ranks": [dataclasses.asdict(p) for p in processes]},
        )
    ]
    for (host, gpu), count in Counter((p.host, p.gpu) for p in processes if p.gpu).items():
        if count > 1:
            text = f"{count} processes share one GPU of {host} ({gpu}): start one per GPU"
            findings.append(Finding("fault", "processes", text))
    for host, count in hosts.items():
        here = [p for p in processes if p.host == host]
        threads, cores = sum(p.threads for p in here), here[0].cores
        if here[0].gpu is None and count > 1 and threads > cores:
            text = (
                f"{host}: {threads} threads on {cores} cores: set "
                f"OMP_NUM_THREADS={max(1, cores // count)}"
            )
            findings.append(Finding("warning", "processes", text))
    first = processes[0]
    for p in processes[1:]:
        differing = [
            n for n in first.versions | p.versions if first.versions.get(n) != p.versions.get(n)
        ]
        if differing:
            versions_0, versions = (
                ", ".join(f"{n} {q.versions.get(n, 'none')}" for n in differing) for q in (first, p)
            )
            where = f"on the same host {p.host}" if p.host == first.host else f"on {p.host}"
            text = (
                f"rank {p.rank} {where} has {versions}, rank 0 has {versions_0}: use one "
                "environment for all"
            )
            findings.append(Finding("fault", "versions", text))
    return findings


def judge_all_reduce(
    rows: list[tuple[int, float, float]], equal: bool, link: Link, backend: str
) -> Finding:
    """Judge rows of (bytes, seconds, bus GB/s) against the peak of the interconnect."""
    best = max(speed for _, _, speed in rows)
    peak = f"{link.peak:,.1f} GB/s ({link.peak_source})" if link.peak else "n/a"
    lines = [
        f"{format_binary(size):>9} {seconds * 1e3:>10,.2f} ms {speed:>8.2f} GB/s"
        for size, seconds, speed in rows
    ]
    lines.append(f"link: {link.name} ({link.detected_by}); peak: {peak}")
    level, text = "ok", f"{backend}, {best:.2f} GB/s at best, sums equal on all processes"
    if not equal:
        level, text = "fault", f"{backend}: the processes get different sums"
    elif link.peak and best < link.peak / 4:
        level = "warning"
        lines += ["less than a quarter of the peak", *ADVICE[backend][1:]]
    return Finding(level, "all-reduce", text, tuple(lines), {"rows": rows, "equal": equal})
