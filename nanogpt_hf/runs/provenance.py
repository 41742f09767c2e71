"""machine.json: one entry per start of a run, with host, device, versions and command."""

import json
import logging
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_hf.cpu import allowed_cores, stated_threads
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.redact import redact

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def describe_start(
    *, step: int, processes: int, precision: str, name: str, device: "torch.device"
) -> dict[str, Any]:
    """The entry of machine.json for a start or resume at `step`, made by the main process.

    It has no environment variables, and no secrets from URLs on the command line.
    """
    # Imports that `report` does not need.
    import torch

    from nanogpt_hf.runs.machine import code_version, describe_host, fingerprint, versions

    return {
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_host(),
        "processes": processes,
        "precision": precision,
        "device": name,
        "threads": torch.get_num_threads(),
        "fingerprint": fingerprint(device),
        "versions": versions(),
        "code": code_version(),
        "command": shlex.join(map(redact, [Path(sys.argv[0]).name, *sys.argv[1:]])),
    }


def read_starts(run: RunFolder) -> list[dict[str, Any]]:
    """The starts of a run, oldest first; none if machine.json is missing."""
    if not run.machine.is_file():
        return []
    try:
        return json.loads(run.machine.read_text(encoding="utf-8"))["starts"]
    except (ValueError, TypeError, LookupError):
        raise RunFolderError(f"{run.machine}: cannot be read; remove it") from None


def branched_at(run: RunFolder) -> tuple[int, str]:
    """The step at which the run began, and the folder of the run that it is a branch of; 0 and ""
    if it is none.
    """
    starts = reversed(read_starts(run))
    return next(((s.get("step", 0), s["branch_of"]) for s in starts if "branch_of" in s), (0, ""))


def add_start(run: RunFolder, start: dict[str, Any]) -> None:
    """Add a start to machine.json, atomically."""
    starts = [*read_starts(run), start]
    with written_whole(run.machine) as partial:
        partial.write_text(json.dumps({"starts": starts}, indent=2) + "\n", encoding="utf-8")


def record_verification(run: RunFolder, first: int, last: int, result: str) -> None:
    """Add to verified.jsonl that steps were repeated, with the result, when and where."""
    from nanogpt_hf.runs.machine import describe_host

    time = datetime.now(UTC).isoformat(timespec="seconds")
    event = {"from": first, "step": last, "result": redact(result), "time": time}
    line = json.dumps(event | {"machine": describe_host()})
    try:
        with run.verified.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}")
    except OSError as error:  # a folder of another user, a full disk
        logger.warning(f"{run.verified}: cannot be written: {error.strerror}")


def continue_on(run: RunFolder, device: "torch.device", local_world_size: int) -> None:
    """Compute with as many CPU threads as the run did at its last start: their number decides the
    last bits of a sum. A number that the user states wins, and so does a machine of fewer cores.

    What then differs from the fingerprint of that start is logged in one line.
    """
    import torch

    from nanogpt_hf.runs.machine import fingerprint

    if not (starts := read_starts(run)):
        return
    before, threads = starts[-1].get("fingerprint", {}), starts[-1]["threads"]
    stated = stated_threads(local_world_size) is not None
    if device.type == "cpu" and not stated and threads <= allowed_cores():
        torch.set_num_threads(threads)
    before = before | {"threads": str(threads)}
    parts = [
        f"{name} {before[name]} -> {value}"
        for name, value in fingerprint(device).items()
        if before.get(name, value) != value
    ]
    if threads != torch.get_num_threads():
        parts.append(f"OMP_NUM_THREADS={threads} OMP_DYNAMIC=false keeps the threads")
    if parts:
        logger.warning(
            f"the fingerprint of this machine is not that of the run's last start: "
            f"{', '.join(parts)}: losses will agree to rounding only, not bit for bit"
        )
