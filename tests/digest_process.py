"""The command line as one process of a reference run of run_digests.py, with what `python cli.py`
cannot do.

FSDP2 and DeepSpeed need an accelerator; here accelerate takes the CPU with gloo for one, so that
the real sharding code runs. And a run can be stopped at a known step. Of the package it uses
only `nanogpt_hf.commands.main`, so that it works with other versions, too.
"""

import os
import signal
import sys
import traceback

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed reads it at import

from accelerate import state
from accelerate.utils import DistributedType

from nanogpt_hf.commands import main


def stop_after(checkpoint: str) -> None:
    """Send this process SIGTERM as soon as it has the checkpoint of that name, which a rename
    completes.
    """
    waiting = [checkpoint]

    def hook(event: str, arguments: tuple) -> None:
        if (
            waiting
            and event == "os.rename"
            and os.path.basename(os.fspath(arguments[1])) == waiting[0]
        ):
            waiting.clear()
            os.kill(os.getpid(), signal.SIGTERM)

    sys.addaudithook(hook)


def run(arguments: list[str], kind: str | None) -> int:
    """Run the command line; return its exit status, or 1 if accelerate did not share the work
    out as `kind` says.
    """
    if kind in ("FSDP", "DEEPSPEED"):
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        state.PartialState._prepare_backend = lambda self, *a, **k: (
            "gloo",
            DistributedType.MULTI_GPU,
        )
    status = main(arguments)
    if kind and status == 0:
        accelerator = state.AcceleratorState()
        actual = accelerator.distributed_type.value
        processes = accelerator.num_processes
        if (actual, processes) != (kind, 2):
            print(f"expected 2 processes under {kind}, got {processes} under {actual}")
            return 1
    return status


if __name__ == "__main__":
    if name := os.environ.get("DIGEST_STOP_AFTER"):
        stop_after(name)
    try:
        status = run(sys.argv[1:], os.environ.get("DIGEST_DISTRIBUTED_TYPE"))
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo sometimes aborts a process at exit, after all work is done
