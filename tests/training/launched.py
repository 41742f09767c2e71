"""Started by tests through a launcher: the command line, on CPU processes that shard for real, and what they held.

FSDP2 and DeepSpeed ask for an accelerator. The shim lets accelerate believe that this machine's CPU with gloo is one,
so that the real sharding code runs. The processes write down what they held: a test that only looks at losses could
not tell sharding from plain DDP.
"""

import json
import os
import sys
import traceback
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"  # which DeepSpeed reads when it is imported

from accelerate import state
from accelerate.utils import DistributedType

from nanogpt_hf.commands import main
from nanogpt_hf.distributed import accelerator, full_state
from nanogpt_hf.model import loss_gpt
from nanogpt_hf.training import loop

save_checkpoint, hand_to_deepspeed = loop.save_checkpoint, accelerator._configure_deepspeed


def sharding_small_parameters(deepspeed_config, *rest):
    hand_to_deepspeed(deepspeed_config, *rest)
    deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # else 100,000 stay whole


def local_size(parameter) -> int:
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3's share; the parameter itself is empty, or gathered for a while
        return parameter.numel() if parameter.ds_persist else parameter.ds_tensor.numel()
    return getattr(parameter, "_local_tensor", parameter).numel()


def local_bytes(moment) -> int:
    local = getattr(moment, "_local_tensor", moment)
    return sum(part.nbytes for part in ((local.codes, local.scale) if hasattr(local, "codes") else (local,)))


def recording(accelerator, model, optimizer, state, run, keep):
    states = optimizer.optimizer.optimizer.state if hasattr(optimizer.optimizer, "optimizer") else optimizer.state
    moments = [value for state in states.values() for key, value in state.items() if key != "step"]
    held = {
        "weights": {
            name: [type(p).__name__, local_size(p), full_state.full_shape(p).numel()]
            for name, p in full_state.named_parameters(accelerator, model).items()
        },
        "moments": sum(getattr(value, "_local_tensor", value).numel() for value in moments),
        "moment_bytes": sum(map(local_bytes, moments)),
    }
    Path(f"{run.path}.held.{accelerator.process_index}.json").write_text(json.dumps(held))
    return save_checkpoint(accelerator, model, optimizer, state, run, keep)


def run(arguments: list[str]) -> None:
    """The command line, and the end of the process."""
    if "true" in (os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("ACCELERATE_USE_DEEPSPEED")):
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        state.PartialState._prepare_backend = lambda self, *a, **k: ("gloo", DistributedType.MULTI_GPU)
    loop.save_checkpoint, accelerator._configure_deepspeed = recording, sharding_small_parameters
    loss_gpt.LOGITS_PER_CHUNK = int(os.environ.get("LOGITS_PER_CHUNK", loss_gpt.LOGITS_PER_CHUNK))
    try:
        status = main(arguments)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo processes sometimes abort while they are torn down, after all work is done


if __name__ == "__main__":
    run(sys.argv[1:])
