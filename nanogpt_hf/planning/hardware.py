"""GPUs by name: dense bf16 peak, memory and link; the network between machines; free and used
memory of this machine.
"""

import math
import re
import resource
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

# share of a device's or machine's memory; the rest is for fragmentation and network buffers
USABLE_MEMORY = 0.9


LINK_SHARE = 0.8  # share of a link's rate that collectives reach: an assumption
# Gb/s per GPU between machines, if the user names none: 8 adapters of 400 Gb/s, as in DGX H100
NETWORK = 400


class Gpu(NamedTuple):
    bf16_flops: float  # FLOP/s
    memory: float  # bytes, as the GPU is sold; the largest if there are several
    link: float  # bytes per second to the other GPUs of its machine, in one direction


# By a part of the device's name; the first match counts. The peaks are from the vendors' data
# sheets (NVIDIA's A100, H100, H200, L4, L40, L40S and HGX B200, an eighth of it; its Ada whitepaper
# for the 4090, with float32 sums; AMD's MI300X); a figure "with sparsity" counts half, and so does
# a link's of both directions. Cards for PCIe are counted without bridges. Apple publishes none for
# its chips.
GPUS = {
    "B200": Gpu(2250e12, 180e9, 900e9),
    "H200 NVL": Gpu(835e12, 141e9, 64e9),
    "H200": Gpu(989e12, 141e9, 450e9),
    "H100 PCIe": Gpu(756e12, 80e9, 64e9),
    "H100 NVL": Gpu(835e12, 94e9, 64e9),
    "H100": Gpu(989e12, 80e9, 450e9),
    "A100": Gpu(312e12, 80e9, 300e9),
    "L40S": Gpu(362e12, 48e9, 32e9),
    "L40": Gpu(181e12, 48e9, 32e9),
    "L4": Gpu(121e12, 24e9, 32e9),
    "RTX 4090": Gpu(165e12, 24e9, 32e9),
    "MI300X": Gpu(1307e12, 192e9, 448e9),
}


def peak_flops(device: torch.device) -> float | None:
    """Return the device's bf16 peak in FLOP/s; None if it is not known."""
    return bf16_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def bf16_peak(name: str) -> float | None:
    """Return the bf16 peak of a device by its name; None for a GPU that is not in the table, or its
    laptop version.
    """
    if "Laptop" in name:
        return None
    return next(
        (gpu.bf16_flops for part, gpu in GPUS.items() if re.search(rf"\b{part}\b", name)), None
    )


def free_memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes of host memory that are free, within the limits of this process's cgroups."""
    # A container sees its own cgroup as the root, that of version 1 in the folder of a controller.
    folders = [root, root / "memory"]
    with suppress(OSError, ValueError):
        # 0::/a/b of version 2, 4:memory:/a/b of version 1
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                folder = root / controller / path.lstrip("/")
                folders += [folder, *folder.parents]
    return int(min(psutil.virtual_memory().available, *map(_below_limit, folders)))


def _below_limit(cgroup: Path) -> float:
    """Bytes that a cgroup may still use; its file cache counts as free.

    Infinite without a limit.
    """
    # version 2, and version 1, whose memory.stat has the smallest limit of the cgroups above, too
    for limit_file, used_file, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        # There is no such file, or no limit, which is `max` in version 2.
        with suppress(OSError, ValueError, KeyError):
            text = (cgroup / "memory.stat").read_text()
            stat = {name: int(value) for name, value in map(str.split, text.splitlines())}
            cached = sum(stat[f"{prefix}{kind}_file"] for kind in ("active", "inactive"))
            limit = int((cgroup / limit_file).read_text())
            limit = min(limit, stat.get("hierarchical_memory_limit", limit))
            return max(0, limit - int((cgroup / used_file).read_text()) + cached)
    return math.inf


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process: tensors on a GPU, else RAM; on MPS the bytes in use now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    # A Mac has no /proc. The resource module's number, which is all that it has, also counts the
    # process that started this one.
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def gpu_of(name: str | None, memory: float | None) -> tuple[str, Gpu]:
    """A GPU of the table by name, or that with the memory nearest to `memory` bytes, the fastest of
    several.

    The memory is `memory` if it is given. Raises KeyError for an unknown name.
    """
    if name is None:
        wanted = memory if memory is not None else GPUS["H100"].memory
        name = min(GPUS, key=lambda key: (abs(GPUS[key].memory - wanted), -GPUS[key].bf16_flops))
    gpu = GPUS[name]
    return name, gpu if memory is None else gpu._replace(memory=memory)
