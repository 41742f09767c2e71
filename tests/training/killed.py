"""Started by test_kills.py: train in child processes that are killed, and resume until one
finishes.

Reads orders as lines of JSON: the arguments of a command that trains, and `kill`: a name of PLACES,
at which the first child kills itself; "anywhere", for kills at random times; a number n, for a kill
at the nth change to the run folder; or null. Answers with the number of kills and the last exit
status. Children are forks: torch is imported once.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import imported  # noqa: F401  (what the forks inherit)

sys.path.insert(0, str(Path(__file__).parents[1]))
import operations
from nanogpt_hf import place
from nanogpt_hf.checkpoint import writer
from nanogpt_hf.commands import main
from nanogpt_hf.evaluation import loss
from nanogpt_hf.model import gpt2
from nanogpt_hf.reports import page
from nanogpt_hf.training import budget, build, clock, reducer, start

# place -> (object, function, number of calls before the one that is killed)
PLACES = {
    "counting the steps of epochs": (start, "with_steps_of_epochs", 0),
    "the dry-run step": (build, "dry_run_step", 0),
    "timing steps": (budget, "train_step", 2),
    "timing an evaluation": (budget, "with_other_evaluations", 0),
    "training": (reducer, "accumulate", 8),
    "evaluating": (loss, "pad_batch", 12),
    "writing a checkpoint": (writer, "write_tensors", 3),
    "flushing a checkpoint": (place, "flush", 8),
    "dropping an old checkpoint": (shutil, "rmtree", 1),
    "writing best": (gpt2, "save_as_gpt2", 1),
    "replacing best": (place, "old_of", 6),
}


def time_of(device: object, work: Callable, times: int = 1) -> float:
    """In place of a measured time: a step takes 0.5 s, an evaluation 2 s."""
    for _ in range(times):
        work()
    return 0.5 if work.__name__ == "step" else 2.0


# The steps of a train.budget are then the same in each start.
clock.time_of = budget.time_of = time_of


def kill_at(where: str) -> None:
    owner, name, calls_before = PLACES[where]
    function = getattr(owner, name)
    calls = []

    def killing(*args, **options):
        calls.append(1)
        if len(calls) > calls_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)

    setattr(owner, name, killing)


def train(arguments: list[str], kill: str | int | None) -> tuple[int, int]:
    run = arguments[arguments.index("--run-dir") + 1]
    checkpoints = os.path.join(run, "checkpoints")
    kills = 0
    draw = random.Random(0)
    while True:
        saved = os.path.isdir(checkpoints) and any(
            not name.startswith(".") for name in os.listdir(checkpoints)
        )
        flag = "--auto-resume" if isinstance(kill, int) else "--resume" if saved else "--overwrite"
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)
            if not isinstance(kill, int):
                page.draw_run = lambda *_: None  # the plot takes longer than the training
            if kills == 0 and isinstance(kill, int):
                operations.kill_at(run, kill)
            elif kills == 0 and kill in PLACES:
                kill_at(kill)
            os._exit(main([*arguments, flag]))
        if kill == "anywhere" and kills < 6:
            time.sleep(draw.uniform(0.1, 0.7))
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status != -signal.SIGKILL:
            return kills, status
        kills += 1


for line in sys.stdin:
    order = json.loads(line)
    print(json.dumps(train(order["arguments"], order["kill"])), flush=True)
