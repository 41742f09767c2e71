"""What `doctor` measured -> what it means: ok, a warning, or a fault. Nothing here measures or prints."""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from nanogpt_hf.data.shards import NO_CHECKSUMS
from nanogpt_hf.doctor.interconnect import Link
from nanogpt_hf.doctor.machine import Place, Process
from nanogpt_hf.doctor.probes import StepTimes
from nanogpt_hf.formatting import format_bytes, plural

_LITTLE_DISK = 5e9  # bytes: caches, compiled kernels and a small run fit
_MEET = "do all machines run it, with the same num_processes, main_process_ip and main_process_port?"
ADVICE = {
    "nccl": (
        _MEET,
        "to try, in the environment of every machine:",
        "NCCL_DEBUG=INFO           NCCL says which network and links it chose, and what failed",
        "NCCL_SOCKET_IFNAME=eth0   the interface that reaches the other machines, where NCCL took docker0 or a VPN",
        "NCCL_IB_DISABLE=1         plain sockets instead of InfiniBand that is there but not set up: slower, but works",
        "NCCL_P2P_DISABLE=1        GPUs of one machine no longer read each other's memory, which an IOMMU may break",
        "GLOO_SOCKET_IFNAME=eth0   the same for gloo, over which doctor itself collects what it prints",
    ),
    "gloo": (
        _MEET,
        "to try, in the environment of every machine:",
        "GLOO_SOCKET_IFNAME=eth0   the interface that reaches the other machines; `ip addr` lists them",
    ),
}


@dataclass(frozen=True)
class Finding:
    """One line of the report, with what belongs under it and the figures that only the JSON gives."""

    level: str  # ok, warning, fault
    topic: str
    text: str
    lines: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)


def binary(size: int) -> str:
    """`4 KiB`, `64 MiB`: sizes that are powers of two."""
    return f"{size >> 10:,} KiB" if size < 1 << 20 else f"{size >> 20:,} MiB"


def judge_versions(found: dict[str, str], outside: list[str]) -> list[Finding]:
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    return [
        Finding("ok", "versions", shown, figures=found),
        *(Finding("warning", "versions", problem) for problem in outside),
    ]


def judge_places(places: list[Place], needed: int | None, host: str = "") -> list[Finding]:
    """The disk under each folder. `needed`: bytes that the run folder, the first of them, will hold at most."""
    findings = []
    for place, wanted in zip(places, [needed] + [None] * len(places), strict=False):
        text = f"{host}{place.what}: {format_bytes(place.free)} free in {place.path}"
        level = "fault"
        if not place.writable:
            text += ", where this user cannot write: choose another folder"
        elif wanted and place.free < wanted:
            text += f", but the run's checkpoints and models take {format_bytes(wanted)}"
        elif place.free < _LITTLE_DISK:
            level, text = "warning", f"{text}, less than {format_bytes(_LITTLE_DISK)}"
        else:
            level, text = "ok", text + (f"; the run takes up to {format_bytes(wanted)}" if wanted else "")
        findings.append(Finding(level, "disk", text, figures=dataclasses.asdict(place) | {"needed": wanted}))
    return findings


def judge_launch(
    asked: dict[str, str], obtained: dict[str, str], processes: int, local: int, gpus: int
) -> list[Finding]:
    """What accelerate gave against what its config asked for, by name; `local` processes and `gpus` on this host."""
    facts = ", ".join(f"{name} {value}" for name, value in obtained.items())
    findings = [Finding("ok", "launch", f"{plural(processes, 'process')}, {facts}", figures=obtained)]
    for name, want in asked.items():
        if want.lower() != obtained[name].lower():
            text = f"the accelerate config asks for {name} {want}, this machine gives {obtained[name]}"
            findings.append(Finding("warning", "launch", text))
    if obtained["device"] == "cuda" and gpus > local:
        text = f"{gpus} GPUs here, {local} in use: set num_processes in the accelerate config"
        findings.append(Finding("warning", "launch", text))
    return findings


def judge_processes(processes: list[Process]) -> list[Finding]:
    """Who runs where; two on one GPU, more threads than cores, versions that are not those of rank 0."""
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
            text = f"{count} processes share one GPU of {host} ({gpu}): start one a GPU"
            findings.append(Finding("fault", "processes", text))
    for host, count in hosts.items():
        here = [p for p in processes if p.host == host]
        threads, cores = sum(p.threads for p in here), here[0].cores
        if here[0].gpu is None and count > 1 and threads > cores:
            text = f"{host}: {threads} threads on {cores} cores: set OMP_NUM_THREADS={max(1, cores // count)}"
            findings.append(Finding("warning", "processes", text))
    first = processes[0]
    for p in processes[1:]:
        names = [n for n in first.versions | p.versions if first.versions.get(n) != p.versions.get(n)]
        if names:
            ours, theirs = (", ".join(f"{n} {q.versions.get(n, 'none')}" for n in names) for q in (first, p))
            where = f"on the same host {p.host}" if p.host == first.host else f"on {p.host}"
            text = f"rank {p.rank} {where} has {theirs}; rank 0 has {ours}: give all the same environment"
            findings.append(Finding("fault", "versions", text))
    return findings


def judge_parameters(digests: list[dict[str, str]], when: str) -> Finding:
    """Checksums of every parameter by rank: equal, or what differs where."""
    different = [(rank, name) for rank, ours in enumerate(digests) for name in ours if ours[name] != digests[0][name]]
    if different:
        rank, name = different[0]
        tensors = plural(len({name for _, name in different}), "tensor")
        return Finding("fault", "parameters", f"{when}: {tensors} not as on rank 0, first {name} on rank {rank}")
    equal = f"equal on all {len(digests)} processes" if len(digests) > 1 else "single process (nothing to compare)"
    return Finding("ok", "parameters", f"{when}: {len(digests[0])} tensors, {equal}")


def judge_data(read: list[list[str]], expected: list[str], source: str) -> Finding:
    """Whether what the processes drew, by rank, is together what a step should see, each window once."""
    drawn, wanted = Counter(window for windows in read for window in windows), Counter(expected)
    if drawn != wanted:
        missing, foreign = (wanted - drawn).total(), (drawn - wanted).total()
        text = (
            f"{source}: of the {len(expected)} windows of a step {missing} are drawn by nobody, and {foreign} twice or "
            "from elsewhere: do all machines hold the same prepared data?"
        )
        return Finding("fault", "data", text)
    each = f"once, {len(read[0])} by each of {len(read)} processes" if len(read) > 1 else "by the one process"
    return Finding("ok", "data", f"{source}: the {plural(len(expected), 'window')} of a step are drawn {each}")


def judge_bytes(folder: str, has_checksums: bool, problem: str | None) -> Finding:
    if problem:
        return Finding("fault", "data", problem)
    if not has_checksums:
        return Finding("warning", "data", f"{folder}: {NO_CHECKSUMS}")
    return Finding("ok", "data", f"{folder}: every byte is as it was written")


def judge_all_reduce(rows: list[tuple[int, float, float]], link: Link, backend: str) -> Finding:
    """Rows of (bytes, seconds, bus GB/s) against what the link can carry."""
    best = max(speed for _, _, speed in rows)
    expected = f"at most {link.peak:,.1f} GB/s ({link.peak_source})" if link.peak else "n/a"
    lines = [f"{binary(size):>9} {seconds * 1e3:>10,.2f} ms {speed:>8.2f} GB/s" for size, seconds, speed in rows]
    lines.append(f"link: {link.name} ({link.detected_by}); expected: {expected}")
    slow = bool(link.peak) and best < link.peak / 4
    if slow:
        lines += ["less than a quarter of that", *ADVICE[backend][1:]]
    text = f"{backend}, {best:.2f} GB/s at best"
    return Finding("warning" if slow else "ok", "all-reduce", text, tuple(lines), {"rows": rows})


def judge_step(
    times: list[StepTimes], size: str, of_step: float, backend: str, sharded: bool = False, inseparable: str = ""
) -> list[Finding]:
    """Where the time of a step of one micro-batch of `size` goes, by the mean over processes, and who is late.

    `of_step` such micro-batches of each process make the recipe's step, which communicates once. `inseparable` says why
    communication could not be told from compute.
    """
    step = max(t.step for t in times)
    data, compute = (sum(getattr(t, part) for t in times) / len(times) for part in ("data", "compute"))
    rest = max(0.0, step - data - compute)
    figures = {"seconds": step, "data": data, "compute": compute, "communication": rest}
    text = f"{step * 1e3:,.1f} ms with {size} a process: data {data / step:.0%}, compute {compute / step:.0%}"
    if len(times) == 1:
        said = "communication: n/a with one process"
        return [Finding("ok", "step", text, (said,), figures)]
    if inseparable:
        return [Finding("ok", "step", text, (f"communication is part of compute here: {inseparable}",), figures)]
    share = rest / step
    lines = [f"communication takes {share:.0%} of a step"]
    if of_step > 1:
        share = rest / (rest + of_step * (data + compute))
        lines = [f"communication takes {rest / step:.0%} of such a step, {share:.0%} of the recipe's (computed)"]
    if sharded:
        lines.append("weights are sharded: gathering them counts as compute here, only gradients as communication")
    slow = share > 0.5
    if slow:
        lines += ["more than half: fewer processes, a larger train.micro_batch_size, or", *ADVICE[backend][1:]]
    findings = [Finding("warning" if slow else "ok", "step", text, tuple(lines), figures)]
    fast, late = (choose(range(len(times)), key=lambda rank: times[rank].compute) for choose in (min, max))
    ratio = times[late].compute / times[fast].compute
    if ratio > 1.5:
        text = f"rank {late} computes {ratio:.1f} times as long as rank {fast}, and all wait for it"
        findings.append(Finding("warning", "step", text))
    return findings
