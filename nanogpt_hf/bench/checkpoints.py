"""Time a checkpoint: how long training waits for it, and how long the background write takes."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from nanogpt_hf.bench.clock import spread, time_of
from nanogpt_hf.bench.workload import Workload
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training.checkpoint_writer import CheckpointWriter


def checkpoint_times(work: Workload, windows: int) -> dict[str, Any]:
    """Bytes of a checkpoint; seconds that training waits for it, of the next step, and until it is
    on the disk: saved into a temporary folder in the current one.

    The first is not counted: it allocates the memory for the copy. Raises RunFolderError if it
    cannot be written.
    """
    run, device = work.run, work.run.accelerator.device
    waits, steps, writes = [], [], []
    with _temporary_folder(work) as folder:
        writer = CheckpointWriter(run.accelerator, folder, keep=1)
        for number in range(1, windows + 2):
            writer.wait()  # else the one before would count
            state, start = TrainState(step=number, last_finite_step=number), time.perf_counter()
            waits.append(
                time_of(device, lambda state=state: writer.save(run.model, run.optimizer, state))
            )
            # every other one is timed alone: a step would share the machine with the write
            if number % 2:
                writer.wait()
                writes.append(time.perf_counter() - start)
            else:
                steps.append(time_of(device, work.step))
        writer.wait()
        newest = folder.newest_checkpoint()
        size = sum(file.stat().st_size for file in newest.iterdir()) if newest else 0
    return {
        "bytes": size,
        "wait_seconds": spread(waits[1:]),
        "next_step_seconds": spread(steps),
        "write_seconds": spread(writes),
    }


@contextmanager
def _temporary_folder(work: Workload) -> Iterator[RunFolder]:
    """A folder of the main process, for all processes."""
    is_main = work.run.mesh.is_main
    made = (
        tempfile.TemporaryDirectory(prefix=".bench_", dir="." if os.access(".", os.W_OK) else None)
        if is_main
        else None
    )
    path = [made.name if made else ""]
    try:
        broadcast_object_list(path, from_process=0)
        yield RunFolder(Path(path[0]))
    finally:
        work.run.accelerator.wait_for_everyone()
        if made:
            made.cleanup()
