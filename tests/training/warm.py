"""Started by tests: accelerate's launch command whose processes are forks of this one.

They inherit the imported libraries, which saves most of a short run's time. It reads a line of
JSON, the arguments of `accelerate launch` and environment variables, and answers with one: the
highest exit status and the output. Each launch runs in a fork, so that it leaves nothing behind.
"""

import functools
import gc
import importlib.util
import json
import os
import sys
import tempfile
from importlib import metadata

os.environ["DS_ACCELERATOR"] = "cpu"

import datasets  # noqa: F401  (with pandas: seconds of each fork)
import torch
import torch._dynamo
import torch.distributed.run
import torch.utils.cpp_extension
import transformers.models.gpt2.modeling_gpt2  # noqa: F401
from accelerate.commands import launch
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from accelerate.utils.other import get_free_port
from launched import run

from nanogpt_hf.commands import train  # noqa: F401
from nanogpt_hf.evaluation import table  # noqa: F401
from nanogpt_hf.export import card
from nanogpt_hf.reports import page
from nanogpt_hf.training import loop, start  # noqa: F401

if importlib.util.find_spec("deepspeed") is not None:
    import deepspeed.runtime.engine
    import deepspeed.runtime.zero.muon.original_muon  # imports inductor
    import deepspeed.runtime.zero.stage3
    import deepspeed.runtime.zero.stage_1_and_2  # noqa: F401
    import torch._functorch.aot_autograd

torch.set_num_threads(1)  # a thread pool does not survive a fork; a process sets its own number
os.fsync = lambda descriptor: None  # as in conftest.py
metadata.metadata = functools.cache(metadata.metadata)  # as in conftest.py
for template in (card._template, page._template):
    template()  # compiled once, and not in each fork
gc.freeze()  # a collection in a fork would copy all pages of what was imported


def start_processes(count: int, arguments: list[str], environment: dict[str, str]) -> None:
    """Start processes with torchrun's environment variables, and exit with their highest status."""
    shared = {
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": get_free_port(),
    }
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os.environ.update(environment)
            if count > 1 or "ACCELERATE_USE_FSDP" in environment:
                os.environ.update(
                    {k: str(v) for k, v in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
                )
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            run(arguments)
        children.append(child)
    statuses = [abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children]
    os._exit(max(statuses))


def torchrun(args) -> None:
    start_processes(int(args.nproc_per_node), args.training_script_args, dict(os.environ))


def simple_launcher(args) -> None:
    start_processes(1, args.training_script_args, prepare_simple_launcher_cmd_env(args)[1])


torch.distributed.run.run = torchrun
launch.simple_launcher = simple_launcher

for line in sys.stdin:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            order = json.loads(line)
            os.environ |= order["environment"]
            launch.launch_command(launch.launch_command_parser().parse_args(order["arguments"]))
            os._exit(1)  # not reached: both launchers end this process
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(
            json.dumps({"status": status, "output": output.read().decode(errors="replace")}),
            flush=True,
        )
