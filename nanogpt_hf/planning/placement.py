"""Read from an accelerate config how a model is sharded, cast and offloaded, for memory estimates."""

import math
from dataclasses import dataclass
from pathlib import Path

from nanogpt_hf.distributed.environment import SCHEDULES
from nanogpt_hf.errors import UserError, one_line
from nanogpt_hf.formatting import plural

_EXAMPLE = "such as accelerate_configs/ddp.yaml"


@dataclass(frozen=True)
class Placement:
    """How a launch distributes a model, one process per device. The default is `python cli.py` without a config."""

    processes: int = 1
    kind: str = "one process"  # or DDP, FSDP2, ZeRO-2, ZeRO-3
    shards: int = 1  # data- and context-parallel processes that share one copy of the optimizer state
    tp: int = 1  # tensor-parallel size
    cp: int = 1  # context-parallel size
    pp: int = 1  # pipeline stages
    per_machine: int = 8  # processes on one machine
    precision: str = "no"  # or bf16, fp16
    checkpointing: bool = False  # of activations, per block
    reshard: bool = True  # FSDP2: gathered weights are freed after the forward pass
    on_cpu: bool = False
    offloads_weights: bool = False  # to host memory, with gradients and optimizer state
    offloads_optimizer: bool = False
    compiles: bool = False

    @property
    def dp(self) -> int:
        """Data-parallel size, as Mesh.dp_size."""
        return self.processes // (self.tp * self.cp * self.pp)

    @property
    def copies(self) -> int:
        """How many times the optimizer state of a parameter is held."""
        return self.dp * self.cp // self.shards

    @property
    def zero(self) -> bool:
        return self.kind.startswith("ZeRO")

    @property
    def autocast(self) -> bool:
        """Whether float32 weights are cast when used. DeepSpeed stores the model in 16 bits instead."""
        return self.precision != "no" and not self.zero

    @property
    def compute_bytes(self) -> int:
        """Bytes of a value in matrix products."""
        return 4 if self.precision == "no" else 2

    @property
    def residual_bytes(self) -> int:
        """Bytes of a value in the residual stream, the input of a LayerNorm."""
        return self.compute_bytes if self.zero else 4

    @property
    def model_parallel(self) -> dict[str, int]:
        return {"tensor": self.tp, "context": self.cp, "pipeline": self.pp}

    def __str__(self) -> str:
        parts = [plural(self.processes, "process")]
        if self.kind != "one process":
            parts.append(self.kind)
        parts += [f"{size}-way {name}-parallel" for name, size in self.model_parallel.items() if size > 1]
        if self.shards > 1 and self.copies > 1:
            parts.append(f"{self.copies} copies over {self.shards} processes each")
        parts.append("float32" if self.precision == "no" else f"{self.precision} with float32 weights")
        if self.checkpointing:
            parts.append("activation checkpointing")
        if self.offloads_weights or self.offloads_optimizer:
            parts.append("offload to host memory")
        parts.append("on the CPU" if self.on_cpu else "on GPUs")
        return ", ".join(parts)


def read_placement(path: str) -> Placement:
    """The placement of an accelerate config file.

    Raises UserError if it is no such file, or has settings that are not estimated.
    """
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    if not Path(path).is_file():
        raise UserError(f"--config_file {path}: no such file; name one {_EXAMPLE}")
    try:
        config = load_config_from_file(path)
        if isinstance(config, ClusterConfig):
            return _placement(path, config)
    except UserError:
        raise
    except Exception as error:  # bad YAML, unknown keys, bad values
        raise UserError(f"--config_file {path}: not an accelerate config: {one_line(error)}") from None
    raise UserError(f"--config_file {path}: its compute_environment is not supported; name one {_EXAMPLE}")


def _placement(path: str, config) -> Placement:
    kind, processes, precision = str(config.distributed_type), int(config.num_processes), str(config.mixed_precision)
    fsdp, deepspeed = config.fsdp_config or {}, config.deepspeed_config or {}
    mesh = {key.removeprefix("parallelism_config_"): value for key, value in (config.parallelism_config or {}).items()}
    sizes = {name: int(mesh.get(f"{name}_size") or 1) for name in ("dp_replicate", "tp", "cp", "pp")}
    shown = ", ".join(f"{name}_size {size}" for name, size in sizes.items() if size != 1) or "dp_replicate_size 1"
    if processes < 1 or min(sizes.values()) < 1:
        raise UserError(f"--config_file {path}: num_processes {processes}, {shown}: must be at least 1")
    if processes % math.prod(sizes.values()):
        raise UserError(f"--config_file {path}: {processes} processes are not a multiple of {shown}")
    if mesh.get("pp_schedule") not in (None, SCHEDULES[0]):
        raise UserError(f"--config_file {path}: pp_schedule {mesh['pp_schedule']} is not estimated; set {SCHEDULES[0]}")
    if int(mesh.get("sp_size") or 1) > 1:
        raise UserError(f"--config_file {path}: sp_size {mesh['sp_size']} is not supported; set cp_size")
    if precision not in ("no", "bf16", "fp16"):
        raise UserError(f"--config_file {path}: mixed_precision {precision} is not estimated; use no, bf16 or fp16")
    tp, cp, pp = sizes["tp"], sizes["cp"], sizes["pp"]
    place = {
        "processes": processes,
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "per_machine": processes // max(1, int(config.num_machines or 1)),
        "precision": precision,
        "on_cpu": bool(config.use_cpu),
        "compiles": str((config.dynamo_config or {}).get("dynamo_backend", "NO")).upper() != "NO",
    }
    if "FSDP" in kind:
        if int(fsdp.get("fsdp_version") or 1) != 2:
            raise UserError(f"--config_file {path}: FSDP 1 is not supported; set fsdp_version: 2 in its fsdp_config")
        return Placement(
            kind="FSDP2",
            shards=processes // (tp * pp * sizes["dp_replicate"]),
            checkpointing=_true(fsdp.get("fsdp_activation_checkpointing")),
            reshard=_true(fsdp.get("fsdp_reshard_after_forward", True)),
            offloads_weights=_true(fsdp.get("fsdp_offload_params")),
            **place,
        )
    if "DEEPSPEED" in kind:
        if deepspeed.get("deepspeed_config_file"):
            raise UserError(
                f"--config_file {path}: deepspeed_config_file is not read; use the keys of deepspeed_config"
            )
        stage = int(deepspeed.get("zero_stage", 2))
        if stage not in (2, 3):
            raise UserError(f"--config_file {path}: ZeRO stage {stage} is not supported; use 2 or 3")
        offloads = {key: deepspeed.get(f"offload_{key}_device") not in (None, "none") for key in ("param", "optimizer")}
        return Placement(
            kind=f"ZeRO-{stage}",
            shards=processes,
            offloads_weights=offloads["param"] and stage == 3,
            offloads_optimizer=offloads["optimizer"],
            **place,
        )
    return Placement(kind="DDP" if processes > tp * cp * pp else "one process", **place)


def _true(value: object) -> bool:
    return str(value).lower() == "true"
