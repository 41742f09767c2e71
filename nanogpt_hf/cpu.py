"""The CPU as this process may use it: cores, threads, spin limit, bfloat16 instructions."""

import os
from contextlib import suppress
from pathlib import Path

# Rounds that an idle thread of GNU OpenMP waits actively before it sleeps; its own default is
# 300,000, which on a busy machine makes a step several times slower, and 100,000 even more so:
# docs/log.md.
SPIN_COUNT = 1000


def limit_spinning() -> None:
    """Limit how long OpenMP's idle threads wait actively, unless the environment does.

    Call before importing torch.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def allowed_cores() -> int:
    """CPU cores that this process may use, by its affinity and its cgroup's quota; at least 1."""
    # macOS has no affinity.
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, cgroup_quota() or cores))


def cgroup_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """Cores that the quota of this process's cgroup is worth, rounded up; None without a quota."""
    # The file holds a quota and a period in microseconds; without a quota it holds `max`, which is
    # no number.
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = map(int, path.read_text().split())
        return -(-quota // period)
    return None


def stated_threads(local_world_size: int) -> int | None:
    """The number of threads that the user set by OMP_NUM_THREADS; None if it was left open.

    `accelerate launch` sets the variable itself, to the machine's physical cores per process.
    Such a value counts as left open, unless OMP_DYNAMIC=false says that the number may not be
    adjusted.
    """
    stated = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if not stated.isdecimal():
        return None
    # This variable tells a process that was started by `accelerate launch`.
    is_launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    if is_launched and os.environ.get("OMP_DYNAMIC", "").lower() != "false":
        import psutil

        if int(stated) == max(1, (psutil.cpu_count(logical=False) or 1) // local_world_size):
            return None
    return int(stated)


def share_threads(local_world_size: int) -> None:
    """Give each of a machine's processes its share of the allowed cores, at most torch's default,
    unless the user has set a number.

    torch's default counts the cores of the machine, also in a container that may use a few of them.
    """
    import torch

    if stated_threads(local_world_size) is None:
        share = allowed_cores() // local_world_size
        torch.set_num_threads(max(1, min(torch.get_num_threads(), share)))


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16 (AVX512_BF16, AMX, Arm's BF16).

    Without them such products are several times slower than those of float32.
    """
    import torch

    capabilities = torch.cpu.get_capabilities()
    return any(has for name, has in capabilities.items() if name.endswith("bf16"))
