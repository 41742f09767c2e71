"""Started by a test inside a network namespace: one host. Runs the command lines it is told, each in a fork.

An order is a line of JSON: the environment that a launcher would set, the folder to be in, the arguments, how many
seconds the process is patient, and for how many it is busy before it prepares its data. The answers are the process's
id, and its exit status when it ends. Torch is imported only once.
"""

import json
import os
import sys
import time
import traceback
from datetime import timedelta

import torch

from nanogpt_hf.commands import main
from nanogpt_hf.data import summary
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.distributed import rendezvous
from nanogpt_hf.training import loop  # noqa: F401  (imported once, for all forks)

torch.set_num_threads(1)
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= order["environment"]
        os.chdir(order["folder"])
        rendezvous.PEER_TIMEOUT = timedelta(seconds=order["peer_timeout"])
        rendezvous._HEARTBEAT = 0.5
        if order["busy"]:
            summary.prepare = lambda config, busy=order["busy"]: time.sleep(busy) or prepare(config)
        status = 1
        try:
            status = main(order["arguments"])
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print("process", child, flush=True)
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
