"""Diagnose a machine: build the accelerator that a run builds, measure, and report findings."""

import hashlib
import os
import shutil
import socket
import statistics
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from huggingface_hub.constants import HF_HOME

from nanogpt_hf.bench.workload import small_config
from nanogpt_hf.config.schema import Config
from nanogpt_hf.cpu import share_threads
from nanogpt_hf.distributed.accelerate_config import check_launch
from nanogpt_hf.distributed.accelerator import actual_settings, build_accelerator
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError, one_line
from nanogpt_hf.formatting import format_bytes, plural
from nanogpt_hf.runs.folder import RunFolder, run_folder
from nanogpt_hf.runs.provenance import describe_host, fingerprint, versions
from nanogpt_hf.training.clock import time_of

PATIENCE = 60  # seconds that processes wait for each other
_MIN_DISK = 5e9  # bytes, enough for caches, compiled kernels and a small run
# Bytes of the tensors that are summed. Small ones measure the latency of a link, large ones its
# bandwidth; the largest would take minutes over the network of CPU machines.
_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
_SIZES_ON_GPUS = (1 << 28, 1 << 30)
_SAME_LAUNCH = (
    "check that all machines run it with the same num_processes, main_process_ip and "
    "main_process_port, and try on every machine:"
)
# Environment variables that repair most faults of communication, each with its meaning.
SETTINGS = (
    "NCCL_DEBUG=INFO           NCCL logs which network and links it uses, and what failed",
    "NCCL_SOCKET_IFNAME=eth0   the interface to the other machines, if NCCL uses docker0 or a VPN",
    "NCCL_IB_DISABLE=1         sockets instead of InfiniBand that is not set up: slower",
    "NCCL_P2P_DISABLE=1        no peer-to-peer access between the GPUs of a machine, which an "
    "IOMMU can break",
    "GLOO_SOCKET_IFNAME=eth0   on CPUs: the interface to the other machines; `ip addr` lists them",
)


class Findings:
    """The findings, printed one by one as they are made: after a hang, the last line tells where.

    Only the main process prints. A finding is ok, a warning or a fault, has a topic and a text,
    and may have more lines.
    """

    def __init__(self, show: Callable[[str], None], mesh: Mesh):
        self._show = show
        self._mesh = mesh
        self._counts: Counter[str] = Counter()

    def add(self, level: str, topic: str, *lines: str) -> None:
        self._counts[level] += 1
        if self._mesh.is_main:
            self._show(f"{level:<8} {topic:<11} " + f"\n{'':21}".join(lines))

    def end(self) -> int:
        """Print the counts; return the exit status of the main process, and 0 on the others: the
        first that fails would end the job.
        """
        faults = self._counts["fault"]
        if self._mesh.is_main:
            warnings = plural(self._counts["warning"], "warning")
            self._show(f"{self._counts['ok']} ok, {warnings}, {plural(faults, 'fault')}")
        return 1 if faults and self._mesh.is_main else 0

    def _give_up(self, topic: str, text: str) -> None:
        """Report a fault and exit at once: destroying the process group could hang."""
        try:
            self.add("fault", topic, text, _SAME_LAUNCH, *SETTINGS)
            self.end()
        finally:
            os._exit(1)

    @contextmanager
    def together(self, topic: str) -> Iterator[None]:
        """Context for communication: a failure or a hang becomes a fault with advice, and the
        process exits.

        It has its own timer, because NCCL's timeout kills the process without a report. The
        other processes' timer is longer than the main process's: the first process that exits
        ends the job.
        """
        late = f"no response from the other processes within {PATIENCE:g} s"
        limit = PATIENCE if self._mesh.is_main else 2 * PATIENCE
        clock = threading.Timer(limit, self._give_up, (topic, late))
        clock.daemon = True
        clock.start()
        try:
            yield
        except RuntimeError as error:
            # gloo and NCCL raise it, without a class of their own.
            text = f"communication between the processes failed: {one_line(error)}"
            self._give_up(topic, text)
        finally:
            clock.cancel()


@dataclass(frozen=True)
class Process:
    """The facts that one process of the launch has found."""

    host: str
    line: str
    versions: dict[str, str]
    # (level, text) of each folder.
    disks: list[tuple[str, str]]


def diagnose(recipe: Config | None, run_dir: str | None, findings: Findings, mesh: Mesh) -> int:
    """Report on this machine for a recipe, or without one for a small model. Return the exit
    status.
    """
    # Everything that needs no other process comes first, since communication may hang.
    config = recipe or small_config("doctor", mesh.world_size)
    folder = run_folder(config.name, run_dir) if recipe else RunFolder(run_dir or "runs")
    findings.add("ok", "versions", _listed(versions()))
    findings.add("ok", "machine", describe_host())
    # The accelerator that a run would have: its process group, devices and precision.
    try:
        with findings.together("launch"):
            accelerator = build_accelerator(check_launch(config, mesh), folder)
            share_threads(mesh.local_world_size)
    except UserError as error:
        findings.add("fault", "launch", str(error))
        return findings.end()
    processes = plural(mesh.world_size, "process")
    findings.add("ok", "launch", f"{processes}, {_listed(actual_settings(accelerator))}")
    findings.add("ok", "fingerprint", _listed(fingerprint(accelerator.device)))
    folders = {"run folder": folder.path, "data folder": config.data.dir, "Hub cache": HF_HOME}
    with findings.together("processes"):
        found = gather_object([this_process(accelerator, folders)])
    judge_processes(findings, found)
    if mesh.world_size == 1:
        findings.add("ok", "all-reduce", "n/a with one process")
    else:
        with findings.together("all-reduce"):
            lines, equal = time_all_reduce(accelerator.device)
        level = "ok"
        text = "sums equal on all processes"
        # Faulty memory or links: the processes of a run would train different models.
        if not equal:
            level = "fault"
            text = "the processes get different sums"
        advice = "if your link is much faster than this, try:"
        findings.add(level, "all-reduce", text, *lines, advice, *SETTINGS)
    accelerator.end_training()
    return findings.end()


def _listed(facts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def this_process(accelerator: Accelerator, folders: dict[str, Path | str]) -> Process:
    """Describe this process, its device, and the disk of each folder (its meaning -> its path)."""
    device = accelerator.device
    name = str(device)
    ram = psutil.virtual_memory()
    free = ram.available
    memory = ram.total
    if device.type == "cuda":
        # Other programs may use the GPU: free is less than its memory then.
        name = f"{device} {torch.cuda.get_device_name(device)}"
        free, memory = torch.cuda.mem_get_info(device)
    host = socket.gethostname()
    line = (
        f"rank {accelerator.process_index}  {host}  pid {os.getpid()}  {name}, "
        f"{format_bytes(free)} of {format_bytes(memory)} free, "
        f"{plural(torch.get_num_threads(), 'thread')}"
    )
    disks = [judge_disk(what, Path(folder)) for what, folder in folders.items()]
    return Process(host, line, versions(), disks)


def judge_disk(what: str, folder: Path) -> tuple[str, str]:
    """Judge the place of `folder`, which need not exist: its free space, and whether a file can be
    written there. Return a level and a text.
    """
    path = Path(os.path.expanduser(folder)).absolute()
    try:
        path.stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        # Such as a name that is too long.
        return "fault", f"{what} {folder}: {error.strerror}: choose another folder"
    if os.path.lexists(path) and not path.is_dir():
        return "fault", f"{what} {folder}: is no folder: choose another"
    # A run makes the folders that are missing in the nearest one that exists.
    while not path.is_dir():
        path = path.parent
    free = shutil.disk_usage(path).free
    level = "ok"
    more = ""
    if free < _MIN_DISK:
        level = "warning"
        more = f", less than {format_bytes(_MIN_DISK)}"
    try:
        # Permissions alone do not tell: a file system may be read-only, or a quota used up.
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        level = "fault"
        more = ", which is not writable: choose another folder"
    return level, f"{what} {folder}: {format_bytes(free)} free in {path}{more}"


def judge_processes(findings: Findings, processes: list[Process]) -> None:
    """List the processes, and the disks of each host; find versions that differ from rank 0."""
    # The disks of a host are the same for all its processes, so one of them reports.
    hosts = {process.host: process for process in processes}
    text = f"{plural(len(processes), 'process')} on {plural(len(hosts), 'host')}"
    findings.add("ok", "processes", text, *(process.line for process in processes))
    # Checkpoints and collectives of other versions may differ in form.
    first = processes[0].versions
    for rank, process in enumerate(processes):
        if other := dict(process.versions.items() - first.items()):
            text = f"rank {rank} on {process.host} has {_listed(other)}, unlike rank 0"
            findings.add("fault", "versions", f"{text}: use one environment")
    for host, process in hosts.items():
        for level, text in process.disks:
            findings.add(level, "disk", f"{host}: {text}")


def time_all_reduce(device: torch.device) -> tuple[list[str], bool]:
    """Time an all-reduce of several sizes, until one takes a second. Return a line for each size,
    with time (median of 5 on the slowest process) and bus bandwidth, and whether all processes get
    the same sums.

    The bus bandwidth is defined as in nccl-tests (doc/PERFORMANCE.md): size / time × 2(n - 1) / n,
    the traffic of each process's link, to compare with the hardware for any number of processes.
    """
    lines = []
    equal = True
    processes = dist.get_world_size()
    sizes = _SIZES
    if device.type == "cuda":
        sizes += _SIZES_ON_GPUS
    for size in sizes:
        # Each process adds other numbers, so that a process that is left out shows in the sum.
        random = torch.Generator(device).manual_seed(dist.get_rank())
        tensor = torch.randn(size // 4, device=device, generator=random)
        # The first one opens connections and is not timed.
        dist.all_reduce(tensor)
        sums = hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()
        equal &= len(set(gather_object([sums]))) == 1
        times = [time_of(device, lambda tensor=tensor: dist.all_reduce(tensor)) for _ in range(5)]
        # A step ends when the slowest process has the sum.
        seconds = max(gather_object([statistics.median(times)]))
        speed = size / seconds * 2 * (processes - 1) / processes / 1e9
        lines.append(f"{size >> 10:>9,} KiB {seconds * 1e3:>10,.2f} ms {speed:>8.2f} GB/s")
        if seconds > 1:
            break
    return lines, equal
