"""Record where a run was made: versions of the software, the hardware of this host, and
machine.json, one entry per start of the run.
"""

import functools
import hashlib
import json
import logging
import shlex
import socket
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict

import psutil
import torch
import torch.cuda.nccl
import torch.distributed as dist

import nanogpt_hf
from nanogpt_hf import __version__
from nanogpt_hf.compiler import compiler_parts
from nanogpt_hf.cpu import allowed_cores, stated_threads
from nanogpt_hf.errors import DamagedFileError
from nanogpt_hf.own_files import as_type, read_json, read_json_lines, warn_once
from nanogpt_hf.runs.files import redact, write_whole
from nanogpt_hf.runs.folder import RunFolder

logger = logging.getLogger(__name__)
_SHOWN = ("transformers", "accelerate", "datasets")
# Libraries whose version may change a number. numpy draws the order of the data.
_DECIDING = ("torch", "accelerate", "transformers", "numpy")


@functools.cache  # it reads a file of the package
def _version(name: str) -> str:
    return metadata.version(name)


def versions() -> dict[str, str]:
    """Versions of Python and the main dependencies; of CUDA and NCCL if this torch has them."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    found |= {name: _version(name) for name in _SHOWN} | {"nanogpt_hf": __version__}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
        if torch.cuda.is_available() and dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def fingerprint(device: torch.device) -> dict[str, str]:
    """Return what decides the last bits of a sum, under a short id: the kind of CPU or GPU, the
    versions of libraries, and the threads of a process.
    """
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    else:
        # oneDNN and torch choose their kernels by these, and kernels differ in the last bits.
        cpu = torch.cpu.get_capabilities()
        level = torch.backends.cpu.get_cpu_capability()
        features = _short([name for name, has in sorted(cpu.items()) if has is True])
        kind = f"{cpu.get('cpu_name')}, {level}, features {features}"
    # Another version of a library may sum in another order.
    libraries = {name: _version(name) for name in _DECIDING}
    parts = {"device": kind, **libraries, "threads": str(torch.get_num_threads())}
    return {"id": _short(parts), **parts}


def _short(tree: object) -> str:
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()[:8]


@functools.cache
def code_version() -> str:
    """`0.1.0`; from a git checkout such as `0.1.0 (commit 1a2b3c4d5e6f, dirty)`: dirty means
    uncommitted code.
    """
    checkout = Path(nanogpt_hf.__file__).resolve().parents[1]
    # git would also find a parent folder, which may be another project's checkout.
    if not (checkout / ".git").exists():
        return __version__
    describe = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=, dirty"]
    # A machine may have no git, and a checkout of another user is refused by it.
    try:
        commit = subprocess.check_output(
            describe, cwd=checkout, text=True, timeout=10, stderr=subprocess.DEVNULL
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__} (commit {commit})"


def describe_host() -> str:
    """One line such as `node1: 16 CPU cores, 128.0 GB RAM, 8 × NVIDIA H200 (150.8 GB)`."""
    # Equal cards are counted: 8 × NVIDIA H200.
    cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    kinds = Counter(f"{card.name} ({card.total_memory / 1e9:.1f} GB)" for card in cards)
    gpus = ", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "no CUDA GPU"
    ram = psutil.virtual_memory().total / 1e9
    return f"{socket.gethostname()}: {allowed_cores()} CPU cores, {ram:.1f} GB RAM, {gpus}"


def now() -> str:
    """Return the time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def describe_start(device: torch.device) -> dict[str, Any]:
    """Return the part of machine.json's entry for a start or resume that describes machine and
    command.

    It has no environment variables, and no secrets from URLs on the command line.
    """
    return {
        "time": now(),
        "machine": describe_host(),
        "fingerprint": fingerprint(device),
        "versions": versions(),
        "code": code_version(),
        "command": shlex.join(map(redact, [Path(sys.argv[0]).name, *sys.argv[1:]])),
    }


class Start(TypedDict, total=False):
    """Fields that the package reads of an entry of machine.json; a field may be unknown."""

    step: int
    processes: int
    precision: str
    dynamo: str
    fingerprint: dict[str, str]
    branch_of: str
    steps_from: str
    max_steps: int


def read_starts(run: RunFolder) -> list[dict[str, Any]]:
    """Return the starts of a run, oldest first; none if machine.json is missing.

    Damaged ones are left out with one warning: no run needs them to resume.
    """
    if not run.machine.is_file():
        return []
    try:
        entries = read_json(run.machine, dict[str, list[Any]]).get("starts")
        if entries is None:
            raise DamagedFileError(f"{run.machine}: is damaged: it has no starts")
    except DamagedFileError as error:
        warn_once(f"{error}; where and how the run was started before is not known")
        return []
    # Each start is checked alone, so that a damaged one does not hide the others.
    starts = []
    for number, entry in enumerate(entries, 1):
        try:
            starts.append(_checked(as_type(entry, Start)))
        except ValueError as error:
            warn_once(f"{run.machine}: skipped start {number:,}, which is damaged: {error}")
    return starts


def _checked(start: Any) -> dict[str, Any]:
    """A start of a run. Raises ValueError for a number or a compiler that it cannot have had."""
    # Others use the numbers as they are, so a wrong one must be caught here.
    threads = int(start.get("fingerprint", {}).get("threads", 1))
    if start.get("step", 0) < 0 or start.get("processes", 1) < 1 or threads < 1:
        raise ValueError("a number below its lowest")
    compiler_parts(start.get("dynamo", "no"))
    return start


def branched_at(run: RunFolder) -> tuple[int, str]:
    """Return the step at which the run began, and the folder of the run that it is a branch of; 0
    and "" if it is none.
    """
    # The first start of a branch names the run; later ones are its resumes.
    first = next((start for start in read_starts(run) if start.get("branch_of")), {})
    return first.get("step", 0), first.get("branch_of", "")


def steps_from(run: RunFolder, max_steps: int) -> str:
    """The knob by which a run found its train.max_steps, such as `train.budget 55m`; "" if its
    recipe stated them. No recipe of a run has that knob.
    """
    # A resume may have changed the number.
    found = [start for start in read_starts(run) if start.get("max_steps") == max_steps]
    return found[-1].get("steps_from", "") if found else ""


class Verification(TypedDict):
    """A line of verified.jsonl."""

    step: int
    result: str
    time: str
    machine: str


def read_verifications(run: RunFolder) -> list[dict[str, Any]]:
    """Return the results that `verify` has added to verified.jsonl, without damaged lines."""
    return read_json_lines(run.verified, lambda value: bool(as_type(value, Verification)))


def add_start(run: RunFolder, start: dict[str, Any]) -> None:
    """Add a start to machine.json, atomically."""
    starts = [*read_starts(run), start]
    write_whole(run.machine, json.dumps({"starts": starts}, indent=2) + "\n")


def record_verification(run: RunFolder, first: int, last: int, result: str) -> None:
    """Add to verified.jsonl that steps were repeated, with the result, when and where."""
    event = {"from": first, "step": last, "result": redact(result), "time": now()}
    # The line end comes first: a line that a kill has cut would swallow the next one.
    line = json.dumps(event | {"machine": describe_host()})
    try:
        with run.verified.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}")
    except OSError as error:
        # Such as a folder of another user, or a full disk: the result was printed already.
        logger.warning(f"{run.verified}: cannot be written: {error.strerror}")


def last_start(run: RunFolder) -> dict[str, Any]:
    """Return the run's last start; {} if it is not known."""
    return (read_starts(run) or [{}])[-1]


def continue_on(
    start: dict[str, Any],
    device: torch.device,
    local_world_size: int,
    precision: str,
    compiler: str,
) -> None:
    """Compute with as many CPU threads as the run did at a start: their number decides the last
    bits of a sum. A number that the user states wins, and so does a machine of fewer cores.

    What then differs from the start in fingerprint, precision or compiler is logged in one line.
    A start that is not known is {}.
    """
    if not start:
        return
    settings = {"precision": precision, "dynamo": compiler}
    before = {name: start.get(name, value) for name, value in settings.items()}
    before |= start.get("fingerprint", {})
    # Sums are split over threads, and added in another order if their number differs.
    stated = stated_threads(local_world_size) is not None
    # A user's number, or the start's if this machine has as many cores.
    threads = int(before.get("threads", torch.get_num_threads()))
    if device.type == "cpu" and not stated and threads <= allowed_cores():
        torch.set_num_threads(threads)
    # A fact that an older version did not record is taken as unchanged.
    parts = [
        f"{name} {before[name]} -> {value}"
        for name, value in (settings | fingerprint(device)).items()
        if before.get(name, value) != value
    ]
    if threads != torch.get_num_threads():
        parts.append(f"OMP_NUM_THREADS={threads} OMP_DYNAMIC=false keeps the threads")
    if parts:
        logger.warning(
            "this machine or its accelerate config differs from the run's start at step "
            f"{start.get('step', 0)}: "
            f"{', '.join(parts)}: losses will agree to rounding only, not bit for bit"
        )
