"""Started by tests: accelerate's launch command whose processes are forks of this one.

They inherit the imported libraries, which saves most of a short run's time. It reads a line of
JSON, the arguments of `accelerate launch` and environment variables, and answers with one: the
highest exit status and the output. Each launch runs in a fork, so that it leaves nothing behind.
"""

import json
import os
import sys
import tempfile

import imported  # noqa: F401  (first: what the forks inherit)
import torch
import torch.distributed.run
from accelerate.commands import launch
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from accelerate.utils.other import get_free_port
from launched import run


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
