"""Diagnose a machine: build the accelerator that a run builds, measure, and report findings."""

import dataclasses
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HOME

from nanogpt_hf.bench.clock import small_config
from nanogpt_hf.config.schema import Config
from nanogpt_hf.cpu import share_threads
from nanogpt_hf.distributed.accelerator import actual_settings, build_accelerator
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.doctor import machine
from nanogpt_hf.doctor.machine import Place, Process
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import format_bytes, plural
from nanogpt_hf.runs.files import write_json
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.provenance import describe_host, fingerprint, versions

PATIENCE = 60  # seconds that processes wait for each other
_MIN_DISK = 5e9  # bytes, enough for caches, compiled kernels and a small run
_SAME_LAUNCH = (
    "check that all machines run it with the same num_processes, main_process_ip and "
    "main_process_port"
)
# By backend: environment variables to try on every machine, and what they mean.
SETTINGS = {
    "nccl": (
        "NCCL_DEBUG=INFO           NCCL logs which network and links it uses, and what failed",
        "NCCL_SOCKET_IFNAME=eth0   the interface to the other machines, if NCCL uses docker0 or a "
        "VPN",
        "NCCL_IB_DISABLE=1         sockets instead of InfiniBand that is not set up: slower",
        "NCCL_P2P_DISABLE=1        no peer-to-peer access between the GPUs of a machine, which an "
        "IOMMU can break",
        "GLOO_SOCKET_IFNAME=eth0   the same for gloo, with which doctor collects its findings",
    ),
    "gloo": (
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


class Report:
    """The findings, printed one by one as they are made, so that a hang shows where.

    Only the main process prints.
    """

    def __init__(self, show: Callable[[str], None], file: Path | None, mesh: Mesh):
        self.prints, self.show, self.file = mesh.is_main, show, file
        self.alone = mesh.world_size == 1
        self.backend = "nccl" if torch.cuda.is_available() else "gloo"
        self.findings: list[Finding] = []

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            self.findings.append(finding)
            if self.prints:
                first = f"{finding.level:<8} {finding.topic:<11} {finding.text}"
                self.show(f"\n{'':21}".join([first, *finding.lines]))

    def end(self) -> int:
        """Print the counts and write the JSON; return the exit status of the main process, and 0
        on the others.
        """
        if not self.prints:
            return 0
        counts = Counter(finding.level for finding in self.findings)
        faults = counts["fault"]
        self.show(
            f"{counts['ok']} ok, {plural(counts['warning'], 'warning')}, {plural(faults, 'fault')}"
        )
        if self.file:
            write_json(self.file, [dataclasses.asdict(finding) for finding in self.findings])
        return 1 if faults else 0

    def give_up(self, topic: str, text: str) -> None:
        """Report a fault and exit at once: destroying the process group could hang."""
        status = 1
        tries = "environment variables to try on every machine:"
        lines = (_SAME_LAUNCH, tries, *SETTINGS[self.backend])
        try:
            self.add(Finding("fault", topic, text, lines))
            status = self.end()
        finally:
            os._exit(status)

    @contextmanager
    def together(self, topic: str) -> Iterator[None]:
        """Around communication: a failure or a hang becomes a fault with advice, and the process
        exits.

        It has its own timer, because NCCL's timeout kills the process without a report. The
        other processes' timer is longer than the main process's: the first process that exits
        ends the job.
        """
        if self.alone:
            yield
            return
        late = f"no response from the other processes within {PATIENCE:g} s"
        limit = PATIENCE if self.prints else 2 * PATIENCE
        clock = threading.Timer(limit, self.give_up, (topic, late))
        clock.daemon = True
        clock.start()
        try:
            yield
        except RuntimeError as error:  # from gloo and NCCL
            # without source location and details
            reason = re.sub(r"^\[\S+\] |\. .*", "", " ".join(str(error).split()))
            self.give_up(topic, f"communication between the processes failed: {reason}")
        finally:
            clock.cancel()


def diagnose(recipe: Config | None, run_dir: str | None, report: Report, mesh: Mesh) -> int:
    """Report on this machine, without a recipe for a small model; return the exit status."""
    config = recipe or small_config("doctor", mesh.world_size)
    folder = RunFolder(run_dir or (Path("runs") / config.name if recipe else "runs"))

    text = ", ".join(f"{name} {version}" for name, version in versions().items())
    report.add(Finding("ok", "versions", text, figures=versions()))
    report.add(Finding("ok", "machine", describe_host()))
    try:
        with report.together("launch"):
            accelerator = build_accelerator(config, folder, mesh)
            share_threads(mesh.local_world_size)
            if mesh.world_size > 1:
                report.backend = "nccl" if "nccl" in str(accelerator.state.backend) else "gloo"
            gather = machine.build_gather(mesh.world_size)
    except UserError as error:
        report.add(Finding("fault", "launch", str(error)))
        return report.end()
    report.add(*judge_launch(actual_settings(accelerator), mesh, torch.cuda.device_count()))
    same = fingerprint(accelerator.device)
    text = ", ".join(f"{name} {value}" for name, value in same.items())
    report.add(Finding("ok", "fingerprint", text, figures=same))
    with report.together("processes"):
        folders = {
            f"run folder {folder.path}": folder.path,
            f"data folder {config.data.dir}": config.data.dir,
            "Hugging Face cache": HF_HOME,
        }
        processes = gather(machine.this_process(accelerator, folders))
    report.add(*judge_processes(processes))
    for process in {process.host: process for process in processes}.values():
        report.add(*(judge_place(process.host, place) for place in process.places))
    if len(processes) == 1:
        report.add(Finding("ok", "all-reduce", "n/a with one process"))
    else:
        with report.together("all-reduce"):
            rows, equal = machine.all_reduce_times(accelerator.device, gather)
        report.add(judge_all_reduce(rows, equal, report.backend))
    status = report.end()
    accelerator.end_training()
    return status


def judge_place(host: str, place: Place) -> Finding:
    """Judge the disk of a folder."""
    level, more = "ok", ""
    if not place.writable:
        level, more = "fault", ", which is not writable: choose another folder"
    elif place.free < _MIN_DISK:
        level, more = "warning", f", less than {format_bytes(_MIN_DISK)}"
    text = f"{place.what}: {format_bytes(place.free)} free in {place.path} of {host}{more}"
    return Finding(level, "disk", text, figures=dataclasses.asdict(place))


def judge_launch(actual: dict[str, str], mesh: Mesh, gpus: int) -> list[Finding]:
    """The settings that the launch has; this host has `gpus`, which it may not use."""
    local, facts = mesh.local_world_size, [f"{name} {value}" for name, value in actual.items()]
    text = ", ".join([plural(mesh.world_size, "process"), *facts])
    findings = [Finding("ok", "launch", text, figures=actual)]
    if actual["device"] == "cuda" and gpus > local:
        text = f"this host has {gpus} GPUs and uses {local}: set num_processes in the config"
        findings.append(Finding("warning", "launch", text))
    return findings


def judge_processes(processes: list[Process]) -> list[Finding]:
    """List the processes; find shared GPUs, and versions that differ from rank 0."""
    hosts = Counter(p.host for p in processes)
    lines = tuple(
        f"rank {p.rank}  {p.host}  pid {p.pid}  {p.device}, {format_bytes(p.free)} of "
        f"{format_bytes(p.memory)} free, {plural(p.threads, 'thread')}"
        for p in processes
    )
    text = f"{plural(len(processes), 'process')} on {plural(len(hosts), 'host')}"
    figures = {"ranks": [dataclasses.asdict(p) for p in processes]}
    findings = [Finding("ok", "processes", text, lines, figures)]
    for (host, gpu), count in Counter((p.host, p.gpu) for p in processes if p.gpu).items():
        if count > 1:
            text = f"{count} processes share one GPU of {host} ({gpu}): start one per GPU"
            findings.append(Finding("fault", "processes", text))
    first = processes[0]
    for p in processes[1:]:
        for name in first.versions | p.versions:
            here, there = (of.versions.get(name, "none") for of in (p, first))
            if here != there:
                text = (
                    f"rank {p.rank} on {p.host} has {name} {here}, rank 0 on {first.host} {there}"
                )
                findings.append(Finding("fault", "versions", f"{text}: use one environment"))
    return findings


def judge_all_reduce(rows: list[tuple[int, float, float]], equal: bool, backend: str) -> Finding:
    """Rows of (bytes, seconds, bus GB/s), whether the sums are equal, and the settings of the
    backend.
    """
    best = max(speed for *_, speed in rows)
    lines = [
        f"{size >> 10:>9,} KiB {seconds * 1e3:>10,.2f} ms {speed:>8.2f} GB/s"
        for size, seconds, speed in rows
    ]
    lines += ["if your link is much faster than this, try:", *SETTINGS[backend]]
    level, text = "ok", f"{backend}, {best:.2f} GB/s at best, sums equal on all processes"
    if not equal:
        level, text = "fault", f"{backend}: the processes get different sums"
    return Finding(level, "all-reduce", text, tuple(lines), {"rows": rows, "equal": equal})
