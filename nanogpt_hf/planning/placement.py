"""How a launch distributes a model: read from an accelerate config, and written as one."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanogpt_hf.distributed.environment import SCHEDULES, check_accelerate_config
from nanogpt_hf.errors import UserError, one_line
from nanogpt_hf.formatting import plural
from nanogpt_hf.model.recompute import level_of

_EXAMPLE = "such as accelerate_configs/ddp.yaml"
WRITTEN = "written by `estimate`"  # in the first line, so that no other file is replaced
_SHIPPED = {
    "one process": "single_gpu",
    "DDP": "ddp",
    "FSDP2": "fsdp2",
    "HSDP": "hsdp",
    "TP": "tp",
    "TP × FSDP2": "tp_fsdp2",
    "CP × FSDP2": "cp_fsdp2",
    "PP": "pp",
    "PP × DDP": "pp",
    "PP × FSDP2": "pp_fsdp2",
}


@dataclass(frozen=True)
class Placement:
    """How a launch distributes a model, one process per device.

    The default is `python cli.py` without a config.
    """

    processes: int = 1
    kind: str = "one process"  # or DDP, FSDP2, ZeRO-2, ZeRO-3
    # data- and context-parallel processes that share one copy of the optimizer state
    shards: int = 1
    tp: int = 1  # tensor-parallel size
    cp: int = 1  # context-parallel size
    pp: int = 1  # pipeline stages
    ep: int = 1  # data-parallel processes that share one copy of the experts
    per_machine: int = 8  # processes on one machine
    precision: str = "no"  # or bf16, fp16
    checkpointing: str = ""  # a level of model/recompute.py
    reshard: bool = True  # FSDP2: gathered weights are freed after the forward pass
    on_cpu: bool = False
    offloads_weights: bool = False  # to host memory, with gradients and optimizer state
    offloads_optimizer: bool = False
    compiles: bool = False
    compresses: bool = False  # DDP: gradients are sent in 16 bits

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
        """Whether float32 weights are cast when used.

        DeepSpeed stores the model in 16 bits instead.
        """
        return self.precision != "no" and not self.zero

    @property
    def writes_out_attention(self) -> bool:
        """Whether short sequences take the attention of model/written_out.py."""
        return self.on_cpu and self.precision == "bf16"

    @property
    def compute_bytes(self) -> int:
        """Bytes of a value in matrix products."""
        return 4 if self.precision == "no" else 2

    @property
    def residual_bytes(self) -> int:
        """Bytes of a value in the residual stream, the input of a LayerNorm."""
        return self.compute_bytes if self.zero else 4

    @property
    def _sizes(self) -> dict[str, int | str]:
        """The kinds of parallelism with their sizes."""
        sizes: dict[str, int | str] = {"PP": self.pp, "CP": self.cp, "TP": self.tp}
        sizes = {name: size for name, size in sizes.items() if size != 1}
        if self.kind == "FSDP2" and self.copies > 1:
            sizes["HSDP"] = f"{self.copies}×{self.shards}"
        elif self.dp * self.cp > 1 or not sizes:
            sizes[self.kind] = self.dp
        return sizes

    @property
    def family(self) -> str:
        """The kinds of parallelism without their sizes, such as `TP × FSDP2`."""
        return " × ".join(self._sizes)

    @property
    def name(self) -> str:
        """Such as `TP 2 × FSDP2 4`."""
        if self.processes == 1:
            return self.family
        return " × ".join(f"{name} {size}" for name, size in self._sizes.items())

    @property
    def complexity(self) -> tuple[int, str]:
        """A key that sorts the simplest placement first."""
        kinds = ["one process", "DDP", "FSDP2"].index(self.kind) + ("HSDP" in self._sizes)
        return 10 * len(self._sizes.keys() & {"PP", "CP", "TP"}) + kinds, self.checkpointing

    def __str__(self) -> str:
        parts = [plural(self.processes, "process")]
        if self.kind != "one process":
            parts.append(self.kind)
        sizes = {"tensor": self.tp, "context": self.cp, "pipeline": self.pp}
        parts += [f"{size}-way {name}-parallel" for name, size in sizes.items() if size > 1]
        if self.shards > 1 and self.copies > 1:
            parts.append(f"{self.copies} copies over {self.shards} processes each")
        precision = f"{self.precision} with float32 weights"
        parts.append("float32" if self.precision == "no" else precision)
        if self.checkpointing:
            parts.append(f"activation checkpointing {self.checkpointing}".removesuffix(" true"))
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
        if not isinstance(config, ClusterConfig):
            raise ValueError(f"its compute_environment is not supported; name one {_EXAMPLE}")
        return _placement(path, config)
    except UserError:
        raise
    except Exception as error:  # bad YAML, unknown keys, bad values
        raise UserError(
            f"--config_file {path}: not an accelerate config: {one_line(error)}"
        ) from None


def _placement(path: str, config: Any) -> Placement:
    kind, precision = str(config.distributed_type), str(config.mixed_precision)
    processes = int(config.num_processes)
    fsdp, deepspeed = config.fsdp_config or {}, config.deepspeed_config or {}
    parallelism = config.parallelism_config or {}
    mesh = {key.removeprefix("parallelism_config_"): value for key, value in parallelism.items()}
    names = ("dp_replicate", "tp", "cp", "pp")
    sizes: dict[str, Any] = {name: int(mesh.get(f"{name}_size") or 1) for name in names}
    shown = ", ".join(f"{name}_size {size}" for name, size in sizes.items() if size != 1)
    is_fsdp, stage = "FSDP" in kind, int(deepspeed.get("zero_stage", 2))
    level = {key: fsdp[key] for key in fsdp if key == "fsdp_activation_checkpointing"}
    check_accelerate_config(path, {"fsdp_config": level})
    for is_wrong, problem in (
        (
            processes < 1 or min(sizes.values()) < 1,
            f"num_processes {processes}, {shown}: must be at least 1",
        ),
        (
            processes % max(1, math.prod(sizes.values())),
            f"{processes} processes are not a multiple of {shown}",
        ),
        (
            mesh.get("pp_schedule") not in (None, SCHEDULES[0]),
            f"pp_schedule {mesh.get('pp_schedule')} is not estimated; set {SCHEDULES[0]}",
        ),
        (
            int(mesh.get("sp_size") or 1) > 1,
            f"sp_size {mesh.get('sp_size')} is not supported; set cp_size",
        ),
        (
            precision not in ("no", "bf16", "fp16"),
            f"mixed_precision {precision} is not estimated; use no, bf16 or fp16",
        ),
        (
            is_fsdp and int(fsdp.get("fsdp_version") or 1) != 2,
            "FSDP 1 is not supported; set fsdp_version: 2 in its fsdp_config",
        ),
        (
            deepspeed.get("deepspeed_config_file"),
            "deepspeed_config_file is not read; use the keys of deepspeed_config",
        ),
        (stage not in (2, 3), f"ZeRO stage {stage} is not supported; use 2 or 3"),
    ):
        if is_wrong:
            raise UserError(f"--config_file {path}: {problem}")
    copies = sizes.pop("dp_replicate")
    place = Placement(
        processes=processes,
        **sizes,
        ep=int(mesh.get("ep_size") or 1),
        per_machine=processes // max(1, int(config.num_machines or 1)),
        precision=precision,
        on_cpu=bool(config.use_cpu),
        compiles=str((config.dynamo_config or {}).get("dynamo_backend", "NO")).upper() != "NO",
        compresses=mesh.get("ddp_comm_hook") in ("bf16", "fp16"),
        checkpointing=level_of(fsdp.get("fsdp_activation_checkpointing")),
    )
    if is_fsdp:
        return replace(
            place,
            kind="FSDP2",
            shards=place.dp * place.cp // copies,
            reshard=_true(fsdp.get("fsdp_reshard_after_forward", True)),
            offloads_weights=_true(fsdp.get("fsdp_offload_params")),
        )
    if "DEEPSPEED" in kind:
        weights, optimizer = (
            deepspeed.get(f"offload_{name}_device") not in (None, "none")
            for name in ("param", "optimizer")
        )
        return replace(
            place,
            kind=f"ZeRO-{stage}",
            shards=processes,
            offloads_weights=weights and stage == 3,
            offloads_optimizer=optimizer,
        )
    return replace(place, kind="DDP") if place.dp > 1 else place


def _true(value: object) -> bool:
    return str(value).lower() == "true"


def shipped_config(place: Placement) -> str | None:
    """The path of the shipped config of this kind of placement, whose numbers may differ; None if
    there is none.
    """
    name = _SHIPPED.get(place.family)
    if name == "fsdp2" and place.checkpointing:
        name = "fsdp2_checkpointing"
    elif name in ("ddp", "fsdp2") and place.processes > place.per_machine:
        name = f"multi_node_{name}"
    return f"accelerate_configs/{name}.yaml" if name else None


_CONFIG = """\
# {name}: {written}
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
num_machines: {machines}
num_processes: {place.processes}
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
  parallelism_config_tp_size: {place.tp}
  parallelism_config_cp_size: {place.cp}
"""


def config_text(place: Placement) -> str:
    """The accelerate config of a placement, as YAML."""
    machines, is_fsdp = max(1, place.processes // place.per_machine), place.kind == "FSDP2"
    kind = "FSDP" if is_fsdp else "MULTI_GPU" if place.processes > 1 else "'NO'"
    copies = place.copies if is_fsdp else place.dp
    text = _CONFIG + _RECOMPUTE * (is_fsdp or bool(place.checkpointing)) + _FSDP * is_fsdp
    if place.compiles:
        text += "dynamo_config:\n  dynamo_backend: INDUCTOR\n"
    if place.tp * place.cp * place.pp > 1 or (is_fsdp and copies > 1):
        text += _SIZES
    if place.pp > 1:
        text += "  parallelism_config_pp_size: {place.pp}\n"
    return text.format(
        place=place,
        name=place.name,
        written=WRITTEN,
        kind=kind,
        precision="'no'" if place.precision == "no" else place.precision,
        on_cpu=str(place.on_cpu).lower(),
        checkpointing=place.checkpointing or "false",
        machines=machines,
        address=_ADDRESS * (machines > 1),
        copies=copies,
        shards=place.shards // place.cp,
    )
