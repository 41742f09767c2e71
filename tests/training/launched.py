"""Started by tests through a launcher: the command line on CPU processes with real sharding.

FSDP2 and DeepSpeed need an accelerator: accelerate is made to accept the CPU with gloo as one,
so that the real sharding code runs. Each process records the sizes of what it held at its last
checkpoint, since losses alone do not distinguish sharding from DDP.
"""

import errno
import itertools
import json
import os
import sys
import traceback
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # read by DeepSpeed when it is imported
sys.path.insert(0, str(Path(__file__).parents[1]))

from accelerate import state
from accelerate.utils import DistributedType

import cpu_ring
import more_optimizers
import operations
from nanogpt_hf.checkpoint import reader, writer
from nanogpt_hf.checkpoint.writer import CheckpointWriter
from nanogpt_hf.commands import main
from nanogpt_hf.distributed import accelerate_config, deepspeed, full_state, rendezvous
from nanogpt_hf.export import model_folder
from nanogpt_hf.model import loss_gpt
from nanogpt_hf.reports import page
from nanogpt_hf.training import budget, clock

save = CheckpointWriter.save
configure_deepspeed = deepspeed.configure
file_sha256 = reader.file_sha256
flush = os.fsync
ending: list = []  # functions to call at the end
verified: list[str] = []  # files of loaded checkpoints whose checksums this process computed


def recording_digest(path: Path) -> str:
    verified.append(f"{path.parent.name}/{path.name}")
    return file_sha256(path)


def sharding_small_parameters(deepspeed_config, *rest):
    configure_deepspeed(deepspeed_config, *rest)
    deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = (
        0  # otherwise up to 100,000 values stay whole
    )


def local_size(parameter) -> int:
    # ZeRO-3's shard; the parameter itself is empty or temporarily gathered
    if hasattr(parameter, "ds_tensor"):
        return parameter.numel() if parameter.ds_persist else parameter.ds_tensor.numel()
    return getattr(parameter, "_local_tensor", parameter).numel()


def local_bytes(tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return sum(
        part.nbytes
        for part in ((local.codes, local.scale) if hasattr(local, "codes") else (local,))
    )


def recording(writer, model, optimizer, state):
    accelerator = writer.accelerator
    states = (
        optimizer.optimizer.optimizer.state
        if hasattr(optimizer.optimizer, "optimizer")
        else optimizer.state
    )
    optimizer_state = [
        value for state in states.values() for key, value in state.items() if key != "step"
    ]
    parameters = full_state.named_tensors(accelerator, model)
    sizes = {
        "weights": {
            name: [type(p).__name__, local_size(p), full_state.full_shape(p).numel()]
            for name, p in parameters.items()
        },
        "verified": verified,
        "optimizer_state": sum(
            getattr(value, "_local_tensor", value).numel() for value in optimizer_state
        ),
        "optimizer_state_bytes": sum(map(local_bytes, optimizer_state)),
    }
    save(writer, model, optimizer, state)
    sizes["copied"] = sum(buffer.numel() for buffer in writer.buffers.values())
    Path(f"{writer.run.path}.held.{accelerator.process_index}.json").write_text(json.dumps(sizes))


def prepare_fault(rank: str, kind: str, number: str, arguments: list[str]) -> None:
    """Make a rank kill itself at its nth change to the run folder, fail once in its nth operation
    on files beside it (`kind` is the error's name), or find the disk full in its nth checkpoint.
    """
    if os.environ.get("RANK", "0") != rank:
        return
    run = Path(arguments[arguments.index("--run-dir") + 1])
    if kind == "killed":
        operations.kill_at(run, int(number))
        return
    if kind.startswith("E"):
        os.fsync = flush
        # a third of the time of such a run
        model_folder.model_card = lambda *_: "a card"
        page.render = lambda *_: "a report"
        report = os.open(f"{run.parent}.fault", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        count = operations.fail_at(run.parent, int(number), getattr(errno, kind), report)
        ending.append(lambda: os.write(report, f"\n{count()}".encode()))
        return
    calls = itertools.count(1)
    write = writer.write_tensors

    def write_tensors(*parts):
        if next(calls) > 2 * (int(number) - 1):  # two files per checkpoint
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*parts)

    writer.write_tensors = write_tensors


def run(arguments: list[str]) -> None:
    """Run the command line and end the process."""
    if "true" in (
        os.environ.get("ACCELERATE_USE_FSDP"),
        os.environ.get("ACCELERATE_USE_DEEPSPEED"),
    ):
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        state.PartialState._prepare_backend = lambda self, *a, **k: (
            "gloo",
            DistributedType.MULTI_GPU,
        )
    if os.environ.get("CPU_RING"):
        cpu_ring.allow_cpu_ring()
    if fault := os.environ.get("FAULT"):
        prepare_fault(*fault.split(":"), arguments)
    if os.environ.get("MORE_OPTIMIZERS"):
        more_optimizers.add_rows()
    elif "--run-dir" in arguments and not ending:
        CheckpointWriter.save = recording
    if seconds := os.environ.get("SECONDS_PER_STEP"):
        # Each process is slower than the one before; an evaluation takes 2 s.
        slower = float(seconds) * (1 + int(os.environ.get("RANK", "0")))

        def time_of(device, work, times=1):
            for _ in range(times):
                work()
            return slower if work.__name__ == "step" else 2.0

        clock.time_of = budget.time_of = time_of
    accelerate_config.EMULATES_FP8 = "EMULATE_FP8" in os.environ
    deepspeed.configure = sharding_small_parameters
    reader.file_sha256 = recording_digest
    page.draw_run = lambda *_: None  # the plot takes longer than the training
    rendezvous.HEARTBEAT = 1.0  # how long a process waits for one that is lost
    loss_gpt.LOGITS_PER_CHUNK = int(os.environ.get("LOGITS_PER_CHUNK", loss_gpt.LOGITS_PER_CHUNK))
    try:
        status = main(arguments)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    for finish in ending:
        finish()
    os._exit(status)  # gloo processes sometimes abort during teardown, after all work is done


if __name__ == "__main__":
    run(sys.argv[1:])
