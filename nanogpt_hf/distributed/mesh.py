"""Mesh: this process's place in a launch, its rank in each kind of parallelism.

It is read from the environment once, where a command or a run begins. The Accelerator is built for
it and has it from then on. Imports no torch, so that a command can use it before heavy imports.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from nanogpt_hf.compiler import compiler_parts, compiler_text
from nanogpt_hf.distributed.environment import (
    ROTATIONS,
    SCHEDULES,
    SIZE_VARIABLES,
    is_true,
    level_of,
    stated_compiler,
    states_cpu,
)
from nanogpt_hf.distributed.launch import Launch

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Mesh(Launch):
    """A launch as one of its processes sees it. Without a launcher: rank 0 of 1.

    Ranks are numbered as in accelerate's device mesh, pipeline stages outermost: (pp, dp, cp,
    tp), tp varies fastest. So the processes of a tensor-parallel group, which communicate most,
    are neighbors on one machine. For example pp 2 × dp 1 × tp 2: ranks 0 and 1 split the matrices
    of the first half of the layers, ranks 2 and 3 the matrices of the second half.
    """

    rank: int = 0
    # The rank within this machine.
    local_rank: int = 0

    @classmethod
    def of(cls, launch: Launch, rank: int) -> "Mesh":
        """Place of process `rank` in a launch."""
        values: dict[str, Any] = {each.name: getattr(launch, each.name) for each in fields(Launch)}
        return cls(**values, rank=rank, local_rank=rank % launch.local_world_size)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Mesh":
        """Read the launch from the variables that `accelerate launch` or torchrun set.

        `check_environment` has checked their values. Device, precision and compilation are what
        the config states; distributed/accelerate_config.py settles them with what the machine has.
        """
        # an empty variable is none
        given = {name: value for name, value in environment.items() if value}
        sizes = {name: int(given[key]) for key, name in SIZE_VARIABLES.items() if key in given}
        sharding: Any = "none"
        if is_true(given.get("ACCELERATE_USE_FSDP")):
            sharding = "fsdp"
        if is_true(given.get("ACCELERATE_USE_DEEPSPEED")):
            sharding = "zero"
        is_fsdp = sharding == "fsdp"
        return cls(
            world_size=int(given.get("WORLD_SIZE", 1)),
            local_world_size=int(given.get("LOCAL_WORLD_SIZE", 1)),
            **{name: sizes.get(name, 1) for name in ("tp_size", "cp_size", "pp_size", "ep_size")},
            dp_replicate_size=sizes.get("dp_replicate_size", 1) if is_fsdp else 1,
            pp_schedule=given.get("PARALLELISM_CONFIG_PP_SCHEDULE", SCHEDULES[0]),
            cp_rotation=given.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", ROTATIONS[0]),
            sharding=sharding,
            zero_stage=int(given.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2)),
            reshards=is_fsdp and is_true(given.get("FSDP_RESHARD_AFTER_FORWARD", "true")),
            sends_weights=is_fsdp and is_true(given.get("FSDP_CPU_RAM_EFFICIENT_LOADING")),
            compression=given.get("PARALLELISM_CONFIG_DDP_COMM_HOOK", "no"),
            device="cpu" if states_cpu(given) else "cuda",
            precision=given.get("ACCELERATE_MIXED_PRECISION", "no"),
            compiler=stated_compiler(given),
            checkpointing=level_of(given.get("FSDP_ACTIVATION_CHECKPOINTING")),
            rank=int(given.get("RANK", 0)),
            local_rank=int(given.get("LOCAL_RANK", 0)),
        )

    def environment(self) -> dict[str, str]:
        """Write the variables that a launcher would pass to this process: `from_environment` reads
        the same mesh from them.
        """
        given = {
            "ACCELERATE_MIXED_PRECISION": self.precision,
            "FSDP_ACTIVATION_CHECKPOINTING": self.checkpointing or "false",
        }
        if self.compiler:
            backend, mode, is_regional = compiler_parts(self.compiler)
            given |= {
                "ACCELERATE_DYNAMO_BACKEND": backend.upper(),
                "ACCELERATE_DYNAMO_MODE": mode,
                "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": str(is_regional).lower(),
            }
        if self.world_size == 1:
            return given | ({"ACCELERATE_USE_CPU": "true"} if self.on_cpu else {})
        if self.on_cpu:
            given["ACCELERATE_TORCH_DEVICE"] = "cpu"
        ranks = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_PORT": 29500,
        }
        given |= {name: str(value) for name, value in ranks.items()}
        given["MASTER_ADDR"] = "127.0.0.1"
        if self.compression != "no":
            given["PARALLELISM_CONFIG_DDP_COMM_HOOK"] = self.compression
        if self.sharding == "fsdp" or self.tp_size * self.pp_size * self.ep_size > 1:
            given |= self._sizes_environment()
        if self.sharding == "zero":
            given["ACCELERATE_USE_DEEPSPEED"] = "true"
            given["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(self.zero_stage)
        if self.sharding == "fsdp":
            given |= {
                "ACCELERATE_USE_FSDP": "true",
                "FSDP_VERSION": "2",
                "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
                "FSDP_RESHARD_AFTER_FORWARD": str(self.reshards).lower(),
                "FSDP_CPU_RAM_EFFICIENT_LOADING": str(self.sends_weights).lower(),
            }
        return given

    def _sizes_environment(self) -> dict[str, str]:
        """Variables of a parallelism_config that states every size."""
        copies = min(self.copies, self.dp_size)
        sizes = {
            "DP_REPLICATE": copies,
            "DP_SHARD": self.dp_size // copies,
            "TP": self.tp_size,
            "PP": self.pp_size,
            "EP": self.ep_size,
            "CP": self.cp_size,
            "SP": 1,
        }
        return {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_PP_SCHEDULE": self.pp_schedule,
            "PARALLELISM_CONFIG_CP_COMM_STRATEGY": self.cp_rotation,
        } | {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    # rank = ((pp_rank · dp_size + dp_rank) · cp_size + cp_rank) · tp_size + tp_rank

    @property
    def pp_rank(self) -> int:
        """Pipeline stage of this process."""
        return self.rank // (self.tp_size * self.cp_size * self.dp_size)

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.tp_size * self.cp_size) % self.dp_size

    @property
    def cp_rank(self) -> int:
        return self.rank // self.tp_size % self.cp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def dp_cp_rank(self) -> int:
        return self.dp_rank * self.cp_size + self.cp_rank


def mesh_of(accelerator: "Accelerator") -> Mesh:
    """Mesh that an Accelerator was built for.

    A plain Accelerator, which distributed/accelerator.py did not build, is one process on its
    device.
    """
    if (mesh := getattr(accelerator, "mesh", None)) is not None:
        return mesh
    plugin: Any = accelerator.state.dynamo_plugin
    return Mesh(
        device=accelerator.device.type,
        precision=str(accelerator.mixed_precision),
        compiler=compiler_text(
            plugin.backend.value, plugin.mode, is_regional=plugin.use_regional_compilation
        ),
    )
