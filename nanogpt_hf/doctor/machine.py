"""Inspect the machine: dependencies, folders and disks, processes and devices."""

import os
import shutil
import socket
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
from nanogpt_hf.distributed.mesh import Mesh
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
        return ["nanogpt_hf is not installed, so the versions it needs are unknown: pip install -e ."]
    problems = []
    for line in lines:
        needed = Requirement(line)
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            problems.append(f"{needed.name} is missing, needs {needed.specifier}: pip install {needed.name}")
            continue
        if not needed.specifier.contains(found, prereleases=True):
            problems.append(
                f"{needed.name} {found} is outside {needed.specifier}: pip install '{needed.name}{needed.specifier}'"
            )
    return problems


def inspect_folder(what: str, folder: Path | str) -> Place:
    """Free bytes at the location of `folder`, which need not exist, and whether a file can be written there."""
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
