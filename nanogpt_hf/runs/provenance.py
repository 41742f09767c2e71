"""machine.json: one entry per start of a run, with host, device, versions and command."""

import json
import logging
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nanogpt_hf.cpu import allowed_cores, stated_threads
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.redact import redact

logger = logging.getLogger(__name__)
_LOWEST = {"step": 0, "processes": 1, "threads": 1}  # numbers of a start that are read again


def describe_start(*, step: int, processes: int, precision: str, device: str) -> dict[str, Any]:
    """The entry of machine.json for a start or resume at `step`, made by the main process.

    It has no environment variables, and no secrets from URLs on the command line.
    """
    # Imports that `report` does not need.
    import torch

    from nanogpt_hf.runs.machine import code_version, describe_host, versions

    return {
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_host(),
        "processes": processes,
        "precision": precision,
        "device": device,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "code": code_version(),
        "command": shlex.join(map(redact, [Path(sys.argv[0]).name, *sys.argv[1:]])),
    }


def read_starts(run: RunFolder) -> list[dict[str, Any]]:
    """The starts of a run, oldest first; none if machine.json is missing."""
    if not run.machine.is_file():
        return []
    try:
        starts = json.loads(run.machine.read_text(encoding="utf-8"))["starts"]
        for start in starts:
            for name, low in _LOWEST.items():
                if not isinstance(value := start.get(name, low), int) or value < low:
                    raise ValueError
        return list(starts)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise RunFolderError(f"{run.machine}: cannot be read; remove it") from None


def add_start(run: RunFolder, start: dict[str, Any]) -> None:
    """Add a start to machine.json, atomically."""
    starts = [*read_starts(run), start]
    with written_whole(run.machine) as partial:
        partial.write_text(json.dumps({"starts": starts}, indent=2) + "\n", encoding="utf-8")


def restore_threads(run: RunFolder, local_world_size: int) -> None:
    """Compute with as many CPU threads as the run did at its last start: their number decides the
    last bits of a sum.

    A number that the user states wins, and so does the machine if it has fewer cores; a
    difference is logged.
    """
    import torch

    if not (starts := read_starts(run)) or "threads" not in starts[-1]:
        return
    before = starts[-1]["threads"]
    if stated_threads(local_world_size) is None and before <= allowed_cores():
        torch.set_num_threads(before)
    if before != (now := torch.get_num_threads()):
        logger.warning(
            f"CPU threads: {before} until now, {now} from here on: the run continues, but its "
            f"losses will agree to rounding only, not bit for bit (OMP_NUM_THREADS={before} "
            "OMP_DYNAMIC=false keeps the number)"
        )
