"""Settings of the accelerate config as its launcher passes them on, and their checks against the
recipe.

The only reader of ACCELERATE_* and FSDP_*.
"""

import math
import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, cast

import psutil
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import LoggerType

from nanogpt_hf import cpu
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.stages import naming, stages_of
from nanogpt_hf.distributed import deepspeed
from nanogpt_hf.distributed.environment import (
    SIZE_VARIABLES,
    check_environment,
    is_true,
    stated_compiler,
    states_cpu,
)
from nanogpt_hf.distributed.layout import check_layout
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError, did_you_mean
from nanogpt_hf.formatting import plural
from nanogpt_hf.optim.optimizer import kind_of
from nanogpt_hf.program import program

# Without an accelerate config, a run of at least this many steps is compiled on a GPU. The number
# is an assumption: how many steps pay for compilation there is not yet measured.
STEPS_WORTH_COMPILING = 500
# Whether fp8 products are computed in float32: tests set it, since a CPU has none.
EMULATES_FP8 = False


@dataclass(frozen=True)
class CheckedLaunch:
    """A recipe and a launch that can train it. `check_launch` makes it, and the Accelerator of a
    run is built for no other.
    """

    config: Config
    # With the device, the precision and the compilation that this machine gives it.
    mesh: Mesh
    # Gradient accumulation steps of each process.
    accumulation: int


def check_launch(config: Config, mesh: Mesh) -> CheckedLaunch:
    """Check that the processes of a launch can train a recipe, in all its stages.

    Raises UserError if the accelerate config sets another accumulation, if DeepSpeed is needed but
    not installed, and if `settled`, `check_sizes`, `check_recipe` or `check_layout` does.
    """
    mesh = settled(mesh, config)
    if mesh.sharding == "zero":
        deepspeed.check_available()
    check_sizes(mesh)
    check_recipe(config)
    accumulations = []
    for stage in stages_of(config):
        # A stage may change a knob that does not combine with the layout.
        with naming(stage):
            accumulation = check_layout(stage.config, mesh)
            _check_accumulation(accumulation)
        accumulations.append(accumulation)
    return CheckedLaunch(config, mesh, accumulations[0])


def _check_accumulation(accumulation: int) -> None:
    """Raises UserError if the accelerate config sets another one."""
    stated = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if stated not in ("auto", str(accumulation)):
        raise UserError(
            deepspeed.conflict(
                "gradient_accumulation_steps", stated, accumulation, "train.tokens_per_step"
            )
        )


def settled(mesh: Mesh, config: Config | None = None) -> Mesh:
    """Complete the mesh by what the accelerate config leaves to this machine: its device, the
    precision, and whether a run of `config` is compiled.

    Raises UserError if the config sets what a run would not get: a precision, a device, processes.
    """
    check_environment()
    check_device()
    device = "cpu"
    if not _on_the_cpu():
        device = cast(torch.device, torch.accelerator.current_accelerator()).type
    precision = requested_precision()
    _check_precision(precision, device)
    if _started_alone():
        raise UserError(
            "the accelerate config sets several processes, but accelerate started one: its "
            "MULTI_CPU and NO never start more; set distributed_type MULTI_GPU with use_cpu: true, "
            "as accelerate_configs/cpu_ddp.yaml does, or num_processes: 1"
        )
    compiler = mesh.compiler or "no"
    if not mesh.compiler and config is not None and chooses_for_one_gpu():
        is_long = config.train.max_steps >= STEPS_WORTH_COMPILING
        # A compiled block does not combine with selective checkpointing, which the user has set.
        if is_long and mesh.checkpointing != "selective":
            compiler = stated_compiler(os.environ, "inductor")
    return replace(mesh, device=device, precision=precision, compiler=compiler)


def keep_compiler(mesh: Mesh, start: dict[str, Any]) -> Mesh:
    """Return the mesh with the compiler of a start in machine.json, if no accelerate config states
    one: each compiler has kernels of its own, so a run that is resumed or repeated keeps its own.

    The mesh is returned as it is if the compiler is not known; then `settled` chooses as for a new
    run.
    """
    if mesh.compiler or not chooses_for_one_gpu():
        return mesh
    return replace(mesh, compiler=start.get("dynamo", ""))


def check_sizes(mesh: Mesh) -> None:
    """Raises UserError if the sizes that the accelerate config states do not multiply to the number
    of processes.
    """
    # An empty variable counts as none.
    given = {name: value for name, value in os.environ.items() if value}
    stated = {name: int(given[key]) for key, name in SIZE_VARIABLES.items() if key in given}
    # ep_size is no factor: it divides the data-parallel size again, which need not be stated.
    sizes = {name: size for name, size in stated.items() if name != "ep_size"}
    product = math.prod(sizes.values())
    shown = (
        " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "every size 1"
    )
    # Accelerate takes sizes that are all 1 for plain data parallelism, and leaves out pp_size,
    # which it does not know.
    only_stages = sizes.keys() == {"pp_size"} and mesh.world_size % product == 0
    unstated = product == 1 and "ep_size" in stated
    if sizes and product != mesh.world_size and not (only_stages or unstated):
        lost = f"; parallelism_config_pp_size reaches a run only by `{program()} launch`"
        raise UserError(
            f"parallelism_config: {shown} = {plural(product, 'process')}, but {mesh.world_size} "
            "were started: set sizes whose product is num_processes"
            f"{'' if 'pp_size' in sizes else lost}"
        )


def check_recipe(config: Config) -> None:
    """Raises UserError if the recipe needs an optimizer, a tracker or a package that is not
    here.
    """
    kind_of(config.optim).check()
    if config.lora.quantize and find_spec("bitsandbytes") is None:
        raise UserError(
            f"lora.quantize {config.lora.quantize}: bitsandbytes is not installed; run `pip "
            "install bitsandbytes`"
        )
    # Classes of the program's own that were registered with accelerate.
    own = LOGGER_TYPE_TO_CLASS.keys() - set(LoggerType.list())
    installed = own | set(map(str, get_available_trackers()))
    for tracker in config.tracking.trackers:
        if tracker not in installed:
            near = did_you_mean(tracker, installed)
            raise UserError(
                f"tracking.trackers: {tracker!r}: accelerate has no such tracker, or it is not "
                f"installed{near}"
            )


def requested_precision() -> str:
    """Mixed precision of the accelerate config: no, bf16, fp16 or fp8; no instead of bf16 on a
    CPU without instructions for it, where it would be slower. Without a config, on one GPU, bf16 if
    it has that, else fp16.
    """
    if chooses_for_one_gpu():
        return "bf16" if multiplies_bfloat16() else "fp16"
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return "no" if lacks_bfloat16() else precision


def chooses_for_one_gpu() -> bool:
    """Whether one process was started on a CUDA GPU without an accelerate config or a launcher."""
    stated = {"ACCELERATE_MIXED_PRECISION", "WORLD_SIZE"} & os.environ.keys()
    return not stated and not _on_the_cpu() and torch.cuda.is_available()


def multiplies_bfloat16() -> bool:
    """Whether the GPU has instructions for bfloat16; torch also emulates it on older ones."""
    return torch.cuda.get_device_capability() >= (8, 0)


def lacks_bfloat16() -> bool:
    """Whether the accelerate config sets bf16 for a CPU without instructions for it."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    return precision == "bf16" and _on_the_cpu() and not cpu.multiplies_bfloat16()


def _check_precision(precision: str, device: str) -> None:
    """Raises UserError for a precision that the device has not."""
    stated = f"the accelerate config sets mixed_precision {precision}"
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    if precision == "fp8":
        if find_spec("torchao") is None:
            raise UserError(f"{stated}, and torchao is not installed; run `pip install torchao`")
        if not (EMULATES_FP8 or (capability and capability >= (8, 9))):
            raise UserError(
                f"{stated}, which needs a GPU of compute capability 8.9 or higher (Ada, Hopper or "
                "newer); set bf16"
            )
    if precision == "bf16" and capability and not multiplies_bfloat16():
        major, minor = capability
        raise UserError(
            f"{stated}, which this GPU of compute capability {major}.{minor} only emulates: it "
            "needs 8.0 (Ampere or newer); set fp16"
        )
    is_zero = is_true(os.environ.get("ACCELERATE_USE_DEEPSPEED"))
    if precision == "fp16" and device == "cpu" and not is_zero:
        raise UserError(f"{stated}, which accelerate ignores on a CPU; set bf16 or 'no'")


def check_device() -> None:
    """Raises UserError if the device that the environment states is not on this machine."""
    stated = os.environ.get("ACCELERATE_TORCH_DEVICE", "cpu")
    kind, _, index = stated.partition(":")
    current = torch.accelerator.current_accelerator()
    if kind != "cpu" and (
        current is None
        or kind != current.type
        or int(index or 0) >= torch.accelerator.device_count()
    ):
        raise UserError(
            f"ACCELERATE_TORCH_DEVICE is {stated}, which this machine does not have; "
            "set cpu, or unset it"
        )


def _on_the_cpu() -> bool:
    return states_cpu(os.environ) or not torch.accelerator.is_available()


def _started_alone() -> bool:
    """Whether accelerate should have started several processes but started only this one.

    Its launcher for one process sets MASTER_PORT if the config has several, but no WORLD_SIZE. A
    MASTER_PORT that the launcher itself got from its environment, as on clusters, proves
    nothing.
    """
    if (
        "MASTER_PORT" not in os.environ
        or "WORLD_SIZE" in os.environ
        or "ACCELERATE_MIXED_PRECISION" not in os.environ
    ):
        return False
    try:
        return "MASTER_PORT" not in psutil.Process(os.getppid()).environ()
    except psutil.Error:
        return False


def default_to_cpu(mesh: Mesh) -> None:
    """Use the CPU for several processes on a machine without an accelerator.

    The launcher does not pass `use_cpu` on; without it each process would start as the only one.
    """
    if mesh.world_size > 1 and not (
        torch.accelerator.is_available() or "ACCELERATE_TORCH_DEVICE" in os.environ
    ):
        os.environ["ACCELERATE_USE_CPU"] = "true"


def hide_layout(mesh: Mesh) -> None:
    """Keep parallelism_config from accelerate if it has pipeline stages or shares of experts, which
    no device mesh of accelerate has.
    """
    if mesh.pp_size * mesh.ep_size > 1:
        os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"


def ignore_layout() -> None:
    """Let every process hold a whole model and be a data-parallel rank: only training splits
    models.
    """
    for name in os.environ.keys() & {"ACCELERATE_USE_PARALLELISM_CONFIG", *SIZE_VARIABLES}:
        del os.environ[name]
