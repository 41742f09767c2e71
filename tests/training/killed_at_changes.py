"""Started by test_kills.py: train in a child that is killed at a change to its run folder, and resume in another.

Usage: killed_at_changes.py FIRST STRIDE FOLDER ARGUMENTS... The changes are FIRST, FIRST + STRIDE, ... until a child
ends before it is killed; FOLDER/<change> is the run folder of each.
"""

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from operations import kill_at

from nanogpt_hf.commands import main
from nanogpt_hf.training import loop  # noqa: F401  (imported once, not in each child)

torch.set_num_threads(1)
point, stride, folder, arguments = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]


def train(run: Path, point: int | None) -> int:
    child = os.fork()
    if child == 0:
        if point is not None:
            kill_at(run, point)
        os._exit(main([*arguments, "--run-dir", str(run), "--auto-resume"]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


while (status := train(folder / str(point), point)) == -signal.SIGKILL:
    if status := train(folder / str(point), None):
        break
    point += stride
sys.exit(status)
