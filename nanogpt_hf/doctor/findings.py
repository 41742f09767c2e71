"""Judge the measurements of `doctor`: each finding is ok, a warning or a fault. Nothing here measures or prints."""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nanogpt_hf.data.shards import NO_CHECKSUMS
from nanogpt_hf.doctor.interconnect import Link
from nanogpt_hf.doctor.machine import Place, Process
from nanogpt_hf.doctor.probes import StepTimes
from nanogpt_hf.formatting import format_bytes, plural

_MIN_DISK = 5e9  # bytes, enough for caches, compiled kernels and a small run
_SAME_LAUNCH = "check that all machines run it with the same num_processes, main_process_ip and main_process_port"
ADVICE = {
    "nccl": (
        _SAME_LAUNCH,
        "environment variables to try on every machine:",
        "NCCL_DEBUG=INFO           NCCL logs which network and links it uses, and what failed",
        "NCCL_SOCKET_IFNAME=eth0   the interface to the other machines, if NCCL uses docker0 or a VPN",
        "NCCL_IB_DISABLE=1         sockets instead of InfiniBand that is not set up: slower",
        "NCCL_P2P_DISABLE=1        no peer-to-peer access between the GPUs of a machine, which an IOMMU can break",
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
    """Judge the disk of each folder. `needed`: the largest size of the run folder, the first of them."""
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
            level, text = "ok", text + (f"; the run needs up to {format_bytes(required)}" if required else "")
        findings.append(Finding(level, "disk", text, figures=dataclasses.asdict(place) | {"needed": required}))
    return findings


def judge_launch(
    requested: dict[str, str], actual: dict[str, str], processes: int, local: int, gpus: int
) -> list[Finding]:
    """Compare settings of the accelerate config with the actual ones; `local` processes and `gpus` are on this host."""
    facts = ", ".join(f"{name} {value}" for name, value in actual.items())
    findings = [Finding("ok", "launch", f"{plural(processes, 'process')}, {facts}", figures=actual)]
    for name, value in requested.items():
        if value.lower() != actual[name].lower():
            text = f"the accelerate config requests {name} {value}, the launch has {actual[name]}"
            findings.append(Finding("warning", "launch", text))
    if actual["device"] == "cuda" and gpus > local:
        text = f"this host has {gpus} GPUs and uses {local}: set num_processes in the accelerate config"
        findings.append(Finding("warning", "launch", text))
    return findings


def judge_processes(processes: list[Process]) -> list[Finding]:
    """List the processes; find shared GPUs, more threads than cores, and versions that differ from rank 0."""
    hosts = Counter(p.host for p in processes)
    lines = [
        f"rank {p.rank}  {p.host}  pid {p.pid}  {p.device}, {format_bytes(p.free)} of {format_bytes(p.memory)} free, "
        f"{plural(p.threads, 'thread')}"
        for p in processes
    ]
    text = f"{plural(len(processes), 'process')} on {plural(len(hosts), 'host')}"
    findings = [Finding("ok", "processes", text, tuple(lines), {"ranks": [dataclasses.asdict(p) for p in processes]})]
    for (host, gpu), count in Counter((p.host, p.gpu) for p in processes if p.gpu).items():
        if count > 1:
            text = f"{count} processes share one GPU of {host} ({gpu}): start one per GPU"
            findings.append(Finding("fault", "processes", text))
    for host, count in hosts.items():
        here = [p for p in processes if p.host == host]
        threads, cores = sum(p.threads for p in here), here[0].cores
        if here[0].gpu is None and count > 1 and threads > cores:
            text = f"{host}: {threads} threads on {cores} cores: set OMP_NUM_THREADS={max(1, cores // count)}"
            findings.append(Finding("warning", "processes", text))
    first = processes[0]
    for p in processes[1:]:
        differing = [n for n in first.versions | p.versions if first.versions.get(n) != p.versions.get(n)]
        if differing:
            versions_0, versions = (
                ", ".join(f"{n} {q.versions.get(n, 'none')}" for n in differing) for q in (first, p)
            )
            where = f"on the same host {p.host}" if p.host == first.host else f"on {p.host}"
            text = f"rank {p.rank} {where} has {versions}, rank 0 has {versions_0}: use one environment for all"
            findings.append(Finding("fault", "versions", text))
    return findings


def judge_parameters(digests: list[dict[str, str]], when: str) -> Finding:
    """Compare the checksums of all parameters between ranks."""
    different = [(rank, name) for rank, ours in enumerate(digests) for name in ours if ours[name] != digests[0][name]]
    if different:
        rank, name = different[0]
        tensors = plural(len({name for _, name in different}), "tensor")
        return Finding("fault", "parameters", f"{when}: {tensors} unlike rank 0, first {name} on rank {rank}")
    equal = f"equal on all {len(digests)} processes" if len(digests) > 1 else "single process (nothing to compare)"
    return Finding("ok", "parameters", f"{when}: {len(digests[0])} tensors, {equal}")


def judge_data(read: list[list[str]], expected: list[str], source: str) -> Finding:
    """Compare the windows that the ranks read with those of a step: each one once."""
    actual, required = Counter(window for windows in read for window in windows), Counter(expected)
    if actual != required:
        missing, foreign = (required - actual).total(), (actual - required).total()
        text = (
            f"{source}: of the {len(expected)} windows of a step {missing} are read by no process, "
            f"and {foreign} twice or from other data: check that all machines have the same prepared data"
        )
        return Finding("fault", "data", text)
    each = f", {len(read[0])} by each of {len(read)} data-parallel ranks" if len(read) > 1 else ""
    return Finding("ok", "data", f"{source}: the {plural(len(expected), 'window')} of a step are read once{each}")


def judge_checksums(folder: str, has_checksums: bool, problem: str | None) -> Finding:
    if problem:
        return Finding("fault", "data", problem)
    if not has_checksums:
        return Finding("warning", "data", f"{folder}: {NO_CHECKSUMS}")
    return Finding("ok", "data", f"{folder}: all checksums match")


def judge_all_reduce(rows: list[tuple[int, float, float]], link: Link, backend: str) -> Finding:
    """Judge rows of (bytes, seconds, bus GB/s) against the peak of the interconnect."""
    best = max(speed for _, _, speed in rows)
    peak = f"{link.peak:,.1f} GB/s ({link.peak_source})" if link.peak else "n/a"
    lines = [f"{format_binary(size):>9} {seconds * 1e3:>10,.2f} ms {speed:>8.2f} GB/s" for size, seconds, speed in rows]
    lines.append(f"link: {link.name} ({link.detected_by}); peak: {peak}")
    slow = bool(link.peak) and best < link.peak / 4
    if slow:
        lines += ["less than a quarter of the peak", *ADVICE[backend][1:]]
    text = f"{backend}, {best:.2f} GB/s at best"
    return Finding("warning" if slow else "ok", "all-reduce", text, tuple(lines), {"rows": rows})


def judge_step(
    times: list[StepTimes], size: str, micro_batches: float, backend: str, sharded: bool = False, inseparable: str = ""
) -> list[Finding]:
    """Split the time of a step of one micro-batch of `size`, by the mean over processes; find slow processes.

    `micro_batches` of them per process make the recipe's step, which communicates once. `inseparable` is the reason why
    communication could not be separated from compute.
    """
    step = max(t.step for t in times)
    data, compute = (sum(getattr(t, part) for t in times) / len(times) for part in ("data", "compute"))
    communication = max(0.0, step - data - compute)
    figures = {"seconds": step, "data": data, "compute": compute, "communication": communication}
    text = f"{step * 1e3:,.1f} ms with {size} per process: data {data / step:.0%}, compute {compute / step:.0%}"
    if len(times) == 1:
        return [Finding("ok", "step", text, ("communication: n/a with one process",), figures)]
    if inseparable:
        return [Finding("ok", "step", text, (f"communication is part of compute here: {inseparable}",), figures)]
    share = communication / step
    lines = [f"communication takes {share:.0%} of a step"]
    if micro_batches > 1:
        share = communication / (communication + micro_batches * (data + compute))
        lines = [
            f"communication takes {communication / step:.0%} of such a step, {share:.0%} of the recipe's (computed)"
        ]
    if sharded:
        lines.append("weights are sharded: gathering them counts as compute here, only gradients as communication")
    slow = share > 0.5
    if slow:
        lines += ["more than half: fewer processes, a larger train.micro_batch_size, or", *ADVICE[backend][1:]]
    findings = [Finding("warning" if slow else "ok", "step", text, tuple(lines), figures)]
    fast, slowest = (choose(range(len(times)), key=lambda rank: times[rank].compute) for choose in (min, max))
    ratio = times[slowest].compute / times[fast].compute
    if ratio > 1.5:
        text = f"rank {slowest} computes {ratio:.1f} times as long as rank {fast}, and the others wait for it"
        findings.append(Finding("warning", "step", text))
    return findings
