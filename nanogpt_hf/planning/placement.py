"""How a launch distributes a model: read from an accelerate config, and written as one."""

import math
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from nanogpt_hf.config.checks import accumulation_steps
from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed.environment import (
    SCHEDULES,
    check_accelerate_config,
    read_accelerate_config,
)
from nanogpt_hf.distributed.layout import Machine, check_layout
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError, one_line
from nanogpt_hf.model.recompute import level_of


class NotEstimated(UserError):  # noqa: N818  (not an error of every command)
    """An accelerate config has a setting that estimates do not know; a run may have it."""


@dataclass(frozen=True)
class Placement:
    """How a launch distributes a model, one process per device.

    The default is a start without a config.
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

        DeepSpeed stores the model in 16 bits instead, and FSDP2 gathers it so.
        """
        return self.precision != "no" and not self.zero and self.kind != "FSDP2"

    @property
    def writes_out_attention(self) -> bool:
        """Whether short sequences take the attention of model/attention.py."""
        return self.on_cpu and self.precision == "bf16"

    @property
    def compute_bytes(self) -> int:
        """Bytes of a value in matrix products."""
        return 4 if self.precision == "no" else 2

    @property
    def residual_bytes(self) -> int:
        """Bytes of a value in the residual stream, the input of a LayerNorm."""
        return 4 if self.autocast else self.compute_bytes

    @property
    def _sizes(self) -> dict[str, int | str]:
        """The kinds of parallelism with their sizes."""
        sizes: dict[str, int | str] = {"PP": self.pp, "CP": self.cp, "TP": self.tp, "EP": self.ep}
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
        several = self._sizes.keys() & {"PP", "CP", "TP", "EP"}
        return 10 * len(several) + kinds, self.checkpointing

    def __str__(self) -> str:
        precision = f"{self.precision} with float32 weights"
        parts = [self.name, "float32" if self.precision == "no" else precision]
        if self.checkpointing:
            parts.append(f"activation checkpointing {self.checkpointing}".removesuffix(" true"))
        return ", ".join([*parts, "on the CPU" if self.on_cpu else "on GPUs"])

    def check(self, config: Config, model: PreTrainedModel | None = None) -> None:
        """Raises UserError if the recipe cannot be trained so, or its tokens per step do not
        divide; `model` is the recipe's, if there is one already.
        """
        sharding = "zero" if self.zero else "fsdp" if self.kind == "FSDP2" else "none"
        sizes: dict[str, Any] = {
            f"{name}_size": getattr(self, name) for name in ("tp", "cp", "pp", "ep")
        }
        copies = min(self.copies, self.dp)
        data_parallel = {"dp_replicate_size": copies, "dp_shard_size": self.dp // copies}
        mesh = Mesh(world_size=self.processes, **sizes, stated_sizes=sizes | data_parallel)
        machine = Machine(
            sharding,
            self.precision,
            self.compiles,
            device="cpu" if self.on_cpu else "cuda",
            checkpoints=self.checkpointing,
            reshards=sharding == "fsdp" and self.reshard,
        )
        check_layout(config, mesh, machine, model)
        accumulation_steps(config, self.dp)


def read_placement(path: str) -> Placement:
    """The placement of an accelerate config file.

    Raises UserError if it is no such file, and NotEstimated for settings that are not estimated.
    """
    from accelerate.commands.config.config_args import load_config_from_file

    check_accelerate_config(path, read_accelerate_config(path))
    try:
        config: Any = load_config_from_file(path)
    except Exception as error:  # unknown keys
        raise UserError(
            f"--config_file {path}: not an accelerate config: {one_line(error)}"
        ) from None
    return _placement(path, config)


def _placement(path: str, config: Any) -> Placement:
    kind, processes = str(config.distributed_type), config.num_processes
    fsdp, deepspeed = config.fsdp_config or {}, config.deepspeed_config or {}
    parallelism = config.parallelism_config or {}
    mesh = {key.removeprefix("parallelism_config_"): value for key, value in parallelism.items()}
    names = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    sizes: dict[str, Any] = {name: mesh.get(f"{name}_size") or 1 for name in names}
    is_fsdp, precision = "FSDP" in kind, str(config.mixed_precision or "no")
    offloads = "offload_optimizer_device", "offload_param_device"
    stage = deepspeed.get("zero_stage", 0 if "deepspeed_config_file" in deepspeed else 2)
    for name, value, estimated in (
        ("mixed_precision", precision, ("no", "bf16", "fp16")),
        ("sp_size", mesh.get("sp_size") or 1, (1,)),
        ("pp_schedule", mesh.get("pp_schedule", SCHEDULES[0]), SCHEDULES[:1]),
        ("fsdp_version", fsdp.get("fsdp_version", 1) if is_fsdp else 2, (2,)),
        ("zero_stage", stage, (2, 3)),
        ("fsdp_offload_params", _true(fsdp.get("fsdp_offload_params")), (False,)),
        *((name, deepspeed.get(name) or "none", ("none",)) for name in offloads),
    ):
        if value not in estimated:
            accepted = " or ".join(map(str, estimated))
            raise NotEstimated(
                f"--config_file {path}: {name} {value} is not estimated; set {accepted}"
            )
    product = math.prod(sizes.values())
    if processes % product or (sizes["dp_shard"] > 1 and processes != product):
        shown = " × ".join(f"{name}_size {size}" for name, size in sizes.items() if size != 1)
        raise UserError(
            f"--config_file {path}: {shown} does not give {processes} processes; set sizes whose "
            "product is num_processes"
        )
    machines = config.num_machines or 1
    if processes % machines:
        raise UserError(
            f"--config_file {path}: num_processes {processes} is not divided by num_machines "
            f"{machines}; set a multiple"
        )
    copies, _ = sizes.pop("dp_replicate"), sizes.pop("dp_shard")
    place = Placement(
        processes=processes,
        **sizes,
        ep=mesh.get("ep_size") or 1,
        per_machine=processes // machines,
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
        )
    if "DEEPSPEED" in kind:
        return replace(place, kind=f"ZeRO-{stage}", shards=processes)
    return replace(place, kind="DDP") if place.dp > 1 else place


def _true(value: object) -> bool:
    return str(value).lower() == "true"


_CONFIG = """\
# {name}: written by `estimate`
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
    if place.ep > 1:
        text += "parallelism_config:\n  parallelism_config_ep_size: {place.ep}\n"
    return text.format(
        place=place,
        name=place.name,
        kind=kind,
        precision="'no'" if place.precision == "no" else place.precision,
        on_cpu=str(place.on_cpu).lower(),
        checkpointing=place.checkpointing or "false",
        machines=machines,
        address=_ADDRESS * (machines > 1),
        copies=copies,
        shards=place.shards // place.cp,
    )
