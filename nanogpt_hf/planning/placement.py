"""What an accelerate config asks for, as far as it decides which bytes lie on which device."""

from dataclasses import dataclass
from pathlib import Path

from nanogpt_hf.errors import UserError

_EXAMPLE = "such as accelerate_configs/ddp.yaml"


@dataclass(frozen=True)
class Placement:
    """How a launch lays a model over its processes, one a device. The default is `python cli.py` without a config."""

    processes: int = 1
    kind: str = "one process"  # or DDP, FSDP2, ZeRO-2, ZeRO-3
    shards: int = 1  # processes that hold one copy of the optimizer's state between them
    precision: str = "no"  # or bf16, fp16
    checkpointing: bool = False  # of each block's activations
    reshard: bool = True  # FSDP2: gathered weights are given back after the forward pass
    on_cpu: bool = False
    offloads_weights: bool = False  # to the machine's memory; gradients and moments with them
    offloads_optimizer: bool = False
    compiles: bool = False

    @property
    def zero(self) -> bool:
        return self.kind.startswith("ZeRO")

    @property
    def autocast(self) -> bool:
        """Weights stay float32 and are cast as they are used. DeepSpeed holds the model itself in 16 bits instead."""
        return self.precision != "no" and not self.zero

    @property
    def compute_bytes(self) -> int:
        """Of a value in a matrix product."""
        return 4 if self.precision == "no" else 2

    @property
    def residual_bytes(self) -> int:
        """Of a value in the residual stream, as LayerNorm takes it in."""
        return self.compute_bytes if self.zero else 4

    def __str__(self) -> str:
        words = [f"{self.processes} process{'es' * (self.processes > 1)}"]
        if self.kind != "one process":
            words.append(self.kind)
        if 1 < self.shards < self.processes:
            words.append(f"{self.processes // self.shards} copies over {self.shards} each")
        words.append("float32" if self.precision == "no" else f"{self.precision} with float32 weights")
        words += ["activations checkpointed"] * self.checkpointing
        words += ["offload to the machine's memory"] * (self.offloads_weights or self.offloads_optimizer)
        return ", ".join([*words, "on the CPU" if self.on_cpu else "on GPUs"])


def read_placement(path: str) -> Placement:
    """The placement that an accelerate config file asks for.

    Raises UserError where it is none, or asks for what is not estimated.
    """
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    if not Path(path).is_file():
        raise UserError(f"--config_file {path}: no such file; take one {_EXAMPLE}")
    try:
        asked = load_config_from_file(path)
        if isinstance(asked, ClusterConfig):
            return _placement(path, asked)
    except UserError:
        raise
    except Exception as error:  # of no YAML, of unknown keys, of values that are none
        reason = " ".join(str(error).split())
        raise UserError(f"--config_file {path}: not an accelerate config: {reason:.300}") from None
    raise UserError(f"--config_file {path}: is for no machine or cluster; take one {_EXAMPLE}")


def _placement(path: str, asked) -> Placement:
    kind, processes, precision = str(asked.distributed_type), int(asked.num_processes), str(asked.mixed_precision)
    fsdp, deepspeed = asked.fsdp_config or {}, asked.deepspeed_config or {}
    mesh = {key.removeprefix("parallelism_config_"): value for key, value in (asked.parallelism_config or {}).items()}
    copies = int(mesh.get("dp_replicate_size") or 1)
    if processes < 1 or copies < 1:
        raise UserError(f"--config_file {path}: num_processes {processes} and dp_replicate_size {copies} start at 1")
    for size in ("tp_size", "cp_size", "sp_size"):
        if int(mesh.get(size) or 1) > 1:
            raise UserError(f"--config_file {path}: {size} {mesh[size]} is not supported")
    if precision not in ("no", "bf16", "fp16"):
        raise UserError(f"--config_file {path}: mixed_precision {precision} is not estimated; take no, bf16 or fp16")
    place = {
        "processes": processes,
        "precision": precision,
        "on_cpu": bool(asked.use_cpu),
        "compiles": str((asked.dynamo_config or {}).get("dynamo_backend", "NO")).upper() != "NO",
    }
    if "FSDP" in kind:
        if int(fsdp.get("fsdp_version") or 1) != 2:
            raise UserError(f"--config_file {path}: asks for FSDP 1; set fsdp_version: 2 in its fsdp_config")
        if processes % copies:
            raise UserError(
                f"--config_file {path}: {processes} processes are no multiple of dp_replicate_size {copies}"
            )
        return Placement(
            kind="FSDP2",
            shards=processes // copies,
            checkpointing=_true(fsdp.get("fsdp_activation_checkpointing")),
            reshard=_true(fsdp.get("fsdp_reshard_after_forward", True)),
            offloads_weights=_true(fsdp.get("fsdp_offload_params")),
            **place,
        )
    if "DEEPSPEED" in kind:
        if deepspeed.get("deepspeed_config_file"):
            raise UserError(f"--config_file {path}: names a DeepSpeed config of its own, which is not read here")
        stage = int(deepspeed.get("zero_stage", 2))
        if stage not in (2, 3):
            raise UserError(f"--config_file {path}: ZeRO stage {stage} is not supported: take 2 or 3")
        offloads = {key: deepspeed.get(f"offload_{key}_device") not in (None, "none") for key in ("param", "optimizer")}
        return Placement(
            kind=f"ZeRO-{stage}",
            shards=processes,
            offloads_weights=offloads["param"] and stage == 3,
            offloads_optimizer=offloads["optimizer"],
            **place,
        )
    return Placement(kind="DDP" if processes > 1 else "one process", **place)


def _true(value: object) -> bool:
    return str(value).lower() == "true"
