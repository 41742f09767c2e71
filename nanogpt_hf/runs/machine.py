"""Versions of the software, and the hardware of this host."""

import functools
import hashlib
import json
import socket
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

import psutil
import torch
import torch.cuda.nccl
import torch.distributed as dist

import nanogpt_hf
from nanogpt_hf import __version__
from nanogpt_hf.cpu import allowed_cores

_SHOWN = ("transformers", "accelerate", "datasets")
_DECIDING = ("torch", "accelerate", "transformers", "numpy")  # numpy draws the order of the data


def versions() -> dict[str, str]:
    """Versions of Python and the main dependencies; of CUDA and NCCL if this torch has them."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    found |= {name: metadata.version(name) for name in _SHOWN} | {"nanogpt_hf": __version__}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
        if torch.cuda.is_available() and dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def fingerprint(device: torch.device) -> dict[str, str]:
    """What decides the last bits of a sum, under a short id: the kind of CPU or GPU, the versions
    of libraries, and the threads of a process.
    """
    if device.type == "cuda":
        kind = torch.cuda.get_device_name(device)
    else:
        cpu, level = torch.cpu.get_capabilities(), torch.backends.cpu.get_cpu_capability()
        features = _short([name for name, has in sorted(cpu.items()) if has is True])
        kind = f"{cpu.get('cpu_name')}, {level}, features {features}"
    libraries = {name: metadata.version(name) for name in _DECIDING}
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
    if not (checkout / ".git").exists():  # a parent folder may be another project's checkout
        return __version__
    try:
        commit = _git(checkout, "rev-parse", "--short=12", "HEAD")
        changed = _git(checkout, "status", "--porcelain", "--", "nanogpt_hf", "cli.py")
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__} (commit {commit}{', dirty' if changed else ''})"


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    return done.stdout.strip()


def describe_host() -> str:
    """One line such as `node1: 16 CPU cores, 128.0 GB RAM, 8 × NVIDIA H200 (150.8 GB)`."""
    cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    kinds = Counter(f"{card.name} ({card.total_memory / 1e9:.1f} GB)" for card in cards)
    gpus = ", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "no CUDA GPU"
    ram = psutil.virtual_memory().total / 1e9
    return f"{socket.gethostname()}: {allowed_cores()} CPU cores, {ram:.1f} GB RAM, {gpus}"
