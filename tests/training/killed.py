"""Started by test_kills.py: train in child processes that are killed, and resume until one finishes.

Usage: killed.py PLACE SEED ARGUMENTS... PLACE is a name of PLACES, at which the first child kills itself; `anywhere`,
to be killed at random times; or another word for no kill. Prints the number of kills. Children are forks: torch is
imported once.
"""

import os
import random
import signal
import sys
import time

import torch

from nanogpt_hf.commands import main
from nanogpt_hf.evaluation import loss
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM
from nanogpt_hf.runs import replace
from nanogpt_hf.training import checkpoint, loop

torch.set_num_threads(1)
place_of_kill, seed, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]

# place -> (object, function, number of calls before the one that is killed)
PLACES = {
    "training": (loop, "train_step", 3),
    "evaluating": (loss, "pad_batch", 12),
    "writing a checkpoint": (checkpoint, "save_file", 3),
    "flushing a checkpoint": (replace, "flush", 8),
    "dropping an old checkpoint": (replace.shutil, "rmtree", 1),
    "writing best": (GPTForCausalLM, "save_pretrained", 1),
    "replacing best": (replace, "old_of", 6),
}


def kill_at(place: str) -> None:
    owner, name, calls_before = PLACES[place]
    function, calls = getattr(owner, name), []

    def killing(*args, **options):
        calls.append(1)
        if len(calls) > calls_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)

    setattr(owner, name, killing)


kills, draw = 0, random.Random(seed)
while True:
    checkpoints = os.path.join(arguments[arguments.index("--run-dir") + 1], "checkpoints")
    saved = os.path.isdir(checkpoints) and any(not name.startswith(".") for name in os.listdir(checkpoints))
    child = os.fork()
    if child == 0:
        if place_of_kill in PLACES and kills == 0:
            kill_at(place_of_kill)
        os._exit(main([*arguments, "--resume" if saved else "--overwrite"]))
    if place_of_kill == "anywhere" and kills < 12:
        time.sleep(draw.uniform(0.1, 0.7))
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGKILL:
        kills += 1
    else:
        print(f"kills: {kills}")
        sys.exit(status)
