"""Started by test_hosts.py in a network namespace: a host that runs each command it reads in a
fork.

A command is a line of JSON: the launcher's environment variables, working directory, log file,
arguments, peer timeout, and seconds to sleep before data is prepared. The answers are the id of
the process and, later, its exit status.
"""

import json
import os
import sys
import time
import traceback
from datetime import timedelta

import imported  # noqa: F401  (what the forks inherit)
from accelerate import state
from accelerate.utils import DistributedType

from nanogpt_hf.commands import main
from nanogpt_hf.distributed import rendezvous
from nanogpt_hf.methods import text
from nanogpt_hf.reports import page

prepare = text.prepare
page.draw_run = lambda *_: None  # the plot takes longer than the training
for line in sys.stdin:
    command = json.loads(line)
    child = os.fork()
    if child == 0:
        log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ |= command["environment"]
        # launched.py does the same.
        if "ACCELERATE_USE_FSDP" in os.environ:
            os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
            state.PartialState._prepare_backend = lambda self, *a, **k: (
                "gloo",
                DistributedType.MULTI_GPU,
            )
        os.chdir(command["folder"])
        rendezvous.PEER_TIMEOUT = timedelta(seconds=command["peer_timeout"])
        rendezvous.HEARTBEAT = 0.5
        if command["busy"]:
            text.prepare = lambda config, busy=command["busy"]: time.sleep(busy) or prepare(config)
        status = 1
        try:
            status = main(command["arguments"])
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print("process", child, flush=True)
    print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
