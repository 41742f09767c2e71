"""Mesh: rank and size of this process in each kind of parallelism.

It is read from the environment once, where a command or a run begins, and passed on. Imports no
torch, so that a command can use it before heavy imports.
"""

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanogpt_hf.distributed.environment import ROTATIONS, SCHEDULES

if TYPE_CHECKING:
    from accelerate import Accelerator

# sizes in the accelerate config's parallelism_config, as accelerate names them
_SIZES = ("pp_size", "dp_replicate_size", "dp_shard_size", "ep_size", "cp_size", "sp_size")
_SIZES += ("tp_size",)
SIZE_VARIABLES = {f"PARALLELISM_CONFIG_{name.upper()}": name for name in _SIZES}


@dataclass(frozen=True)
class Mesh:
    """Rank and size in each kind of parallelism. Without a launcher: rank 0 of 1.

    Ranks are numbered as in accelerate's device mesh, pipeline stages outermost: (pp, dp, cp,
    tp), tp varies fastest. So the processes of a tensor-parallel group, which communicate most,
    are neighbors on one machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # within this machine
    local_world_size: int = 1
    tp_size: int = 1  # tensor parallelism: each matrix is split
    cp_size: int = 1  # context parallelism: each sequence is split
    pp_size: int = 1  # pipeline parallelism: the layers are split
    ep_size: int = 1  # expert parallelism: data-parallel ranks that share one copy of the experts
    pp_schedule: str = SCHEDULES[0]
    cp_rotation: str = ROTATIONS[0]
    # what the accelerate config states, by the names of SIZE_VARIABLES. The launcher passes on all
    # but pp_size and ep_size, which only `nanogpt-hf launch` does, as it does pp_schedule.
    stated_sizes: dict[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def from_environment(cls) -> "Mesh":
        """The ranks and sizes that `accelerate launch` or torchrun gave this process.

        `check_environment` has checked that they are numbers.
        """
        # an empty variable is none
        given = {name: value for name, value in os.environ.items() if value}
        stated = {name: int(given[key]) for key, name in SIZE_VARIABLES.items() if key in given}
        return cls(
            rank=int(given.get("RANK", 0)),
            world_size=int(given.get("WORLD_SIZE", 1)),
            local_rank=int(given.get("LOCAL_RANK", 0)),
            local_world_size=int(given.get("LOCAL_WORLD_SIZE", 1)),
            **{name: stated.get(name, 1) for name in ("tp_size", "cp_size", "pp_size", "ep_size")},
            pp_schedule=given.get("PARALLELISM_CONFIG_PP_SCHEDULE", SCHEDULES[0]),
            cp_rotation=given.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY", ROTATIONS[0]),
            stated_sizes=stated,
        )

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def dp_size(self) -> int:
        """Data-parallel size: how many groups of processes have different sequences of a step,
        sharded or not.
        """
        return self.world_size // (self.pp_size * self.cp_size * self.tp_size)

    @property
    def data_parallel(self) -> str:
        """The data-parallel size in words."""
        kind = "processes" if self.dp_size == self.world_size else "data-parallel ranks"
        return f"{self.dp_size} {kind}"

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.tp_size * self.cp_size) % self.dp_size

    @property
    def dp_cp_size(self) -> int:
        """How many groups of processes have different tokens of a step: their gradients are
        averaged.
        """
        return self.dp_size * self.cp_size

    @property
    def dp_cp_rank(self) -> int:
        return self.dp_rank * self.cp_size + self.cp_rank

    @property
    def cp_rank(self) -> int:
        return self.rank // self.tp_size % self.cp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        """The pipeline stage of this process."""
        return self.rank // (self.tp_size * self.cp_size * self.dp_size)

    def fills_pipeline(self, micro_batches: int) -> bool:
        """Whether the pipeline's schedule takes a step of so many micro-batches: at least as many
        as stages.

        torch's zero bubble also divides them into equal rounds, each of at least as many as stages.
        """
        rounds = micro_batches // self.pp_size
        return rounds > 0 and (self.pp_schedule != "zero_bubble" or micro_batches % rounds == 0)


def mesh_of(accelerator: "Accelerator") -> Mesh:
    """The mesh of the launch that an Accelerator was built for: its only place once there is one.

    A plain Accelerator, which `build_accelerator` did not build, is that of one process.
    """
    return getattr(accelerator, "mesh", None) or Mesh()
