"""Started by tests through a launcher: the command line, on CPU processes that shard for real, and what they held.

FSDP2 asks for an accelerator. The shim lets accelerate believe that this machine's CPU with gloo is one, so that
the real sharding code runs. The processes write down what they held: a test that only looks at losses could not tell
sharding from plain DDP.
"""

import json
import os
import sys
from pathlib import Path

if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    from accelerate import state
    from accelerate.utils import DistributedType

    state.PartialState._prepare_backend = lambda self, *a, **k: ("gloo", DistributedType.MULTI_GPU)

from nanogpt_hf.commands import main
from nanogpt_hf.training import checkpoint, loop

save_checkpoint = loop.save_checkpoint


def recording(accelerator, model, optimizer, state, run, keep):
    held = {
        name: [type(p).__name__, getattr(p, "_local_tensor", p).numel(), p.numel()]
        for name, p in checkpoint._named_parameters(accelerator.unwrap_model(model)).items()
    }
    Path(f"{run.path}.held.{accelerator.process_index}.json").write_text(json.dumps(held))
    return save_checkpoint(accelerator, model, optimizer, state, run, keep)


loop.save_checkpoint = recording
status = main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)  # gloo processes sometimes abort while they are torn down, after all work is done
