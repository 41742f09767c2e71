"""CPU cores and threads of this process: cores it may use, cores that other programs leave free, spin limit."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Rounds that an idle thread of GNU OpenMP waits actively before it sleeps; its own default is 300,000, which on a busy
# machine makes a step several times slower, and 100,000 even more so: docs/log.md.
SPIN_COUNT = 1000
_SHORTEST_WINDOW = 0.5  # seconds; the kernel counts CPU time in steps of 0.01
_BUSY = 0.5  # from this share of a core on, other programs take it


def limit_spinning() -> None:
    """Limit how long OpenMP's idle threads wait actively, unless the environment does. Call before importing torch."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def allowed_cores() -> int:
    """CPU cores that this process may use, by its affinity and its cgroup's quota; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS
    return max(1, min(cores, cgroup_quota() or cores))


def cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Cores that the cgroup's quota is worth, rounded up; None without a quota. cgroup v2, then v1."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else -(-int(quota) // int(period))
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        return None if quota < 0 else -(-quota // int((root / "cpu" / "cpu.cfs_period_us").read_text()))
    return None


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds used so far on the allowed cores: by all programs, and by this process and its children."""

    clock: float
    everyone: float
    this_process: float

    @classmethod
    def now(cls) -> "CpuTimes":
        import psutil

        cores = psutil.cpu_times(percpu=True)
        if hasattr(os, "sched_getaffinity"):
            cores = [times for index, times in enumerate(cores) if index in os.sched_getaffinity(0)]
        waiting = ("idle", "iowait", "guest", "guest_nice")  # user and nice already contain the guests'
        used = sum(sum(times) - sum(getattr(times, name, 0.0) for name in waiting) for times in cores)
        own = os.times()
        return cls(time.monotonic(), used, own.user + own.system + own.children_user + own.children_system)

    def cores_of_others(self, later: "CpuTimes") -> float:
        """Cores that other programs used on average from this moment to `later`; 0.0 if that is too short to tell."""
        seconds = later.clock - self.clock
        if seconds < _SHORTEST_WINDOW:
            return 0.0
        used = (later.everyone - self.everyone) - (later.this_process - self.this_process)
        return max(0.0, used / seconds)


def stated_threads(local_world_size: int = 1) -> int | None:
    """The number of threads that the user set by OMP_NUM_THREADS; None if it was left open.

    `accelerate launch` sets the variable itself, to the machine's physical cores per process. Such a value counts as
    left open, unless OMP_DYNAMIC=false says that the number may not be adjusted.
    """
    stated = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if not stated.isdecimal():
        return None
    if "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ.get("OMP_DYNAMIC", "").lower() != "false":
        import psutil

        if int(stated) == max(1, (psutil.cpu_count(logical=False) or 1) // local_world_size):
            return None
    return int(stated)


def free_threads(busy_cores: float, default: int, local_world_size: int = 1) -> int:
    """Threads for a process whose machine has `busy_cores` in use by other programs, at most `default`.

    With several processes of a launch only the allowed cores count: each would measure the others as other programs.
    """
    if local_world_size > 1:
        return max(1, min(default, allowed_cores() // local_world_size))
    return max(1, min(default, allowed_cores() - int(busy_cores + 1 - _BUSY)))
