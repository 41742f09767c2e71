"""Accelerate configs as files: read as a launch, and written for one that was proposed."""

import math
from typing import Any

from nanogpt_hf.compiler import BACKENDS, MODES, compiler_text
from nanogpt_hf.distributed.environment import (
    SCHEDULES,
    check_accelerate_config,
    is_true,
    level_of,
    read_accelerate_config,
)
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.errors import UserError, one_line


class NotEstimated(UserError):  # noqa: N818  (not an error of every command)
    """An accelerate config has a setting that estimates do not know; a run may have it."""


def read_launch(path: str) -> Launch:
    """Return the launch of an accelerate config file.

    Raises UserError if it is no such file, and NotEstimated for settings that are not estimated.
    """
    from accelerate.commands.config.config_args import load_config_from_file

    # What accelerate would take without a word, such as a misspelled value.
    check_accelerate_config(path, read_accelerate_config(path))
    try:
        config: Any = load_config_from_file(path)
    except Exception as error:
        # Such as unknown keys.
        raise UserError(
            f"--config_file {path}: not an accelerate config: {one_line(error)}"
        ) from None
    return _launch_of(path, config)


def _launch_of(path: str, config: Any) -> Launch:
    """Return the launch of a config that accelerate has loaded."""
    kind = str(config.distributed_type)
    is_fsdp = "FSDP" in kind
    processes = config.num_processes
    fsdp = config.fsdp_config or {}
    deepspeed = config.deepspeed_config or {}
    parallelism = config.parallelism_config or {}
    mesh = {key.removeprefix("parallelism_config_"): value for key, value in parallelism.items()}
    # accelerate's default is 2, but a file of DeepSpeed's own may state any stage.
    stage = deepspeed.get("zero_stage", 0 if "deepspeed_config_file" in deepspeed else 2)
    precision = str(config.mixed_precision or "no")
    _check_estimated(
        path,
        {
            "mixed_precision": (precision, ("no", "bf16", "fp16")),
            "sp_size": (mesh.get("sp_size") or 1, (1,)),
            "pp_schedule": (mesh.get("pp_schedule", SCHEDULES[0]), SCHEDULES[:1]),
            "fsdp_version": (fsdp.get("fsdp_version", 1) if is_fsdp else 2, (2,)),
            "zero_stage": (stage, (2, 3)),
            "fsdp_offload_params": (is_true(fsdp.get("fsdp_offload_params")), (False,)),
            "offload_optimizer_device": (
                deepspeed.get("offload_optimizer_device") or "none",
                ("none",),
            ),
            "offload_param_device": (deepspeed.get("offload_param_device") or "none", ("none",)),
        },
    )
    dynamo = config.dynamo_config or {}
    names = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    sizes = {name: mesh.get(f"{name}_size") or 1 for name in names}
    machines = config.num_machines or 1
    _check_processes(path, processes, machines, sizes)
    sharding: Any = "fsdp" if is_fsdp else "zero" if "DEEPSPEED" in kind else "none"
    return Launch(
        world_size=processes,
        local_world_size=processes // machines,
        tp_size=sizes["tp"],
        cp_size=sizes["cp"],
        pp_size=sizes["pp"],
        ep_size=mesh.get("ep_size") or 1,
        dp_replicate_size=sizes["dp_replicate"] if is_fsdp else 1,
        sharding=sharding,
        zero_stage=stage,
        reshards=is_fsdp and is_true(fsdp.get("fsdp_reshard_after_forward", True)),
        compression=mesh.get("ddp_comm_hook") or "no",
        device="cpu" if config.use_cpu else "cuda",
        precision=precision,
        compiler=compiler_text(
            dynamo.get("dynamo_backend", BACKENDS[0]),
            dynamo.get("dynamo_mode", MODES[0]),
            is_regional=is_true(dynamo.get("dynamo_use_regional_compilation")),
        ),
        checkpointing=level_of(fsdp.get("fsdp_activation_checkpointing")),
    )


def _check_estimated(path: str, settings: dict[str, tuple[Any, Any]]) -> None:
    """Raises NotEstimated for a setting whose value is none of those that estimates know."""
    for name, (value, estimated) in settings.items():
        if value not in estimated:
            accepted = " or ".join(map(str, estimated))
            raise NotEstimated(
                f"--config_file {path}: {name} {value} is not estimated; set {accepted}"
            )


def _check_processes(path: str, processes: int, machines: int, sizes: dict[str, int]) -> None:
    """Raises UserError if sizes or machines do not divide the processes, as a launch would."""
    product = math.prod(sizes.values())
    # Without a stated dp_shard_size, data parallelism takes the processes that remain.
    if processes % product or (sizes["dp_shard"] > 1 and processes != product):
        shown = " × ".join(f"{name}_size {size}" for name, size in sizes.items() if size != 1)
        raise UserError(
            f"--config_file {path}: {shown} does not give {processes} processes; set sizes whose "
            "product is num_processes"
        )
    if processes % machines:
        raise UserError(
            f"--config_file {path}: num_processes {processes} is not divided by num_machines "
            f"{machines}; set a multiple"
        )


# Parts of a config that is written. Braces are filled in by `config_text`.
_CONFIG = """\
# {name}: written by `estimate`
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
num_machines: {machines}
num_processes: {launch.world_size}
machine_rank: 0{address}
mixed_precision: {precision}
use_cpu: {on_cpu}
"""
_ADDRESS = """  # 1, 2, ... on the other machines
main_process_ip: 10.0.0.1  # edit: the address of the first machine
main_process_port: 29500"""
_FSDP = """\
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_cpu_ram_efficient_loading: false
  fsdp_offload_params: false
"""
_RECOMPUTE = """\
fsdp_config:
  fsdp_activation_checkpointing: {checkpointing}
"""
_SIZES = """\
parallelism_config:
  parallelism_config_dp_replicate_size: {copies}
  parallelism_config_dp_shard_size: {shards}
  parallelism_config_tp_size: {launch.tp_size}
  parallelism_config_cp_size: {launch.cp_size}
"""


def config_text(launch: Launch) -> str:
    """Return the accelerate config of a launch, as YAML."""
    machines = max(1, launch.world_size // launch.local_world_size)
    is_fsdp = launch.sharding == "fsdp"
    # accelerate's name of one process is NO, which YAML would read as false.
    kind = "FSDP" if is_fsdp else "MULTI_GPU" if launch.world_size > 1 else "'NO'"
    copies = launch.copies if is_fsdp else launch.dp_size
    text = _CONFIG + _RECOMPUTE * (is_fsdp or bool(launch.checkpointing)) + _FSDP * is_fsdp
    if launch.compiles:
        text += "dynamo_config:\n  dynamo_backend: INDUCTOR\n"
    # accelerate needs the sizes only where several dimensions divide the processes.
    if launch.tp_size * launch.cp_size * launch.pp_size > 1 or (is_fsdp and copies > 1):
        text += _SIZES
    if launch.pp_size > 1:
        text += "  parallelism_config_pp_size: {launch.pp_size}\n"
    if launch.ep_size > 1:
        text += "parallelism_config:\n  parallelism_config_ep_size: {launch.ep_size}\n"
    return text.format(
        launch=launch,
        name=launch.name,
        kind=kind,
        precision="'no'" if launch.precision == "no" else launch.precision,
        on_cpu=str(launch.on_cpu).lower(),
        checkpointing=launch.checkpointing or "false",
        machines=machines,
        address=_ADDRESS * (machines > 1),
        copies=copies,
        shards=launch.shards // launch.cp_size,
    )
