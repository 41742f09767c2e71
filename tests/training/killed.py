"""Started by a test: train in a child that dies, again and again, until a child lives to the end.

Usage: killed.py WHERE SEED ARGUMENTS... where WHERE is a place in the code to die at once, or `anywhere` to be killed
from outside at random moments. Prints the number of kills. Each child is a fork, so that torch is imported only once.
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
where, seed, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]

# place -> (object, function, number of its calls before the one that dies)
PLACES = {
    "training": (loop, "train_step", 3),
    "evaluating": (loss, "pad_batch", 12),
    "writing a checkpoint": (checkpoint, "save_file", 3),
    "flushing a checkpoint": (replace, "flush", 8),
    "dropping an old checkpoint": (replace.shutil, "rmtree", 1),
    "writing best": (GPTForCausalLM, "save_pretrained", 1),
    "replacing best": (replace, "old_of", 6),
}


def die_at(place: str) -> None:
    home, name, calls = PLACES[place]
    function, seen = getattr(home, name), []

    def dying(*args, **options):
        seen.append(1)
        if len(seen) > calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **options)

    setattr(home, name, dying)


kills, draw = 0, random.Random(seed)
while True:
    folder = arguments[arguments.index("--run-dir") + 1]
    begun = os.path.isdir(os.path.join(folder, "checkpoints")) and bool(os.listdir(os.path.join(folder, "checkpoints")))
    child = os.fork()
    if child == 0:
        if where in PLACES and kills == 0:
            die_at(where)
        saved = begun and any(not name.startswith(".") for name in os.listdir(os.path.join(folder, "checkpoints")))
        os._exit(main([*arguments, "--resume" if saved else "--overwrite"]))
    if where == "anywhere" and kills < 12:
        time.sleep(draw.uniform(0.1, 0.7))
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGKILL:
        kills += 1
    else:
        print(f"kills: {kills}")
        sys.exit(status)
