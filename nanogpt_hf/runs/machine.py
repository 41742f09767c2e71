"""What this machine is to a run: versions, folders and their disks, and how each process sees its device."""

import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from huggingface_hub.constants import HF_HOME
from packaging.requirements import Requirement

import nanogpt_hf
from nanogpt_hf import __version__
from nanogpt_hf.cpu import allowed_cores
from nanogpt_hf.distributed.mesh import Mesh

_SHOWN = ("transformers", "accelerate", "datasets")


@dataclass(frozen=True)
class Place:
    """A folder that a run writes to, or the nearest one above it that exists."""

    what: str
    path: str
    free: int  # bytes
    writable: bool


@dataclass(frozen=True)
class Process:
    """One process of the launch, as it sees itself."""

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


def versions() -> dict[str, str]:
    """Of Python and what a run depends on most; CUDA and NCCL where this torch has them."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__}  # which says what it was built for
    found |= {name: metadata.version(name) for name in _SHOWN} | {"nanogpt_hf": __version__}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
        if torch.cuda.is_available() and dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


@functools.cache
def code_version() -> str:
    """`0.1.0`; from a git checkout such as `0.1.0 (commit 1a2b3c4d5e6f, dirty)`: dirty is code that is in no commit."""
    checkout = Path(nanogpt_hf.__file__).resolve().parents[1]
    if not (checkout / ".git").exists():  # a folder above may be another project's checkout
        return __version__
    try:
        commit = _git(checkout, "rev-parse", "--short=12", "HEAD")
        changed = _git(checkout, "status", "--porcelain", "--", "nanogpt_hf", "cli.py")
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__} (commit {commit}{', dirty' if changed else ''})"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()


def outside_ranges() -> list[str]:
    """Dependencies that are missing, or not of a version that pyproject.toml allows, a line each."""
    try:
        lines = metadata.requires("nanogpt_hf") or ()
    except metadata.PackageNotFoundError:
        return ["nanogpt_hf is not installed, so nothing says which versions it needs: pip install -e ."]
    wrong = []
    for line in lines:
        needed = Requirement(line)
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{needed.name} is missing, wanted {needed.specifier}: pip install {needed.name}")
            continue
        if not needed.specifier.contains(found, prereleases=True):
            wrong.append(
                f"{needed.name} {found} is outside {needed.specifier}: pip install '{needed.name}{needed.specifier}'"
            )
    return wrong


def look_at(what: str, folder: Path | str) -> Place:
    """Free bytes where `folder` is or would be made, and whether a file can be written there (none stays)."""
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
    """The run folder first, then the data and the caches."""
    return [
        look_at(f"run folder {run_folder}", run_folder),
        look_at(f"data folder {data_folder}", data_folder),
        look_at("Hugging Face cache", HF_HOME),
        look_at("torch cache", torch.hub.get_dir()),
    ]


def describe_host() -> str:
    """One line such as `node1: 16 CPU cores, 128.0 GB RAM, 8 × NVIDIA H200 (150.8 GB)`."""
    cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    kinds = Counter(f"{card.name} ({card.total_memory / 1e9:.1f} GB)" for card in cards)
    gpus = ", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "no CUDA GPU"
    ram = psutil.virtual_memory().total / 1e9
    return f"{socket.gethostname()}: {allowed_cores()} CPU cores, {ram:.1f} GB RAM, {gpus}"


def requested_and_actual(accelerator: Accelerator) -> tuple[dict[str, str], dict[str, str]]:
    """What the accelerate config asks for by name, as far as it tells us, and what there is."""
    obtained = {
        "device": accelerator.device.type,
        "distributed type": accelerator.distributed_type.value,
        "precision": accelerator.mixed_precision,
        "dynamo": accelerator.state.dynamo_plugin.backend.value.lower(),
    }
    told = {"precision": "ACCELERATE_MIXED_PRECISION", "dynamo": "ACCELERATE_DYNAMO_BACKEND"}
    return {name: os.environ[key] for name, key in told.items() if os.environ.get(key)}, obtained


def this_process(accelerator: Accelerator, places: list[Place]) -> Process:
    device, ram = accelerator.device, psutil.virtual_memory()
    on_gpu = device.type == "cuda"
    free, memory = torch.cuda.mem_get_info(device) if on_gpu else (ram.available, ram.total)
    return Process(
        rank=Mesh.from_environment().rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=f"{device} {torch.cuda.get_device_name(device)}" if on_gpu else str(device),
        gpu=str(getattr(torch.cuda.get_device_properties(device), "uuid", device)) if on_gpu else None,
        free=free,
        memory=memory,
        cores=allowed_cores(),
        threads=torch.get_num_threads(),
        versions=versions(),
        places=places,
    )
