"""Mesh: rank and size of this process in each kind of parallelism.

The only reader of WORLD_SIZE, RANK, LOCAL_RANK, LOCAL_WORLD_SIZE and PARALLELISM_CONFIG_*. Imports no torch, so that a
command can use it before heavy imports.
"""

import os
from dataclasses import dataclass

from nanogpt_hf.distributed.environment import ROTATIONS, SCHEDULES

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # a process without them is alone


@dataclass(frozen=True)
class Mesh:
    """Rank and size in each kind of parallelism. Without a launcher: rank 0 of 1.

    Ranks are numbered as in accelerate's device mesh, pipeline stages outermost: (pp, dp, cp, tp), tp varies fastest.
    So the processes of a tensor-parallel group, which communicate most, are neighbours on one machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # within this machine
    local_world_size: int = 1
    tp_size: int = 1  # tensor parallelism: each matrix is split
    cp_size: int = 1  # context parallelism: each sequence is split
    pp_size: int = 1  # pipeline parallelism: the layers are split
    pp_schedule: str = SCHEDULES[0]
    cp_rotation: str = ROTATIONS[0]

    @classmethod
    def from_environment(cls) -> "Mesh":
        """The ranks and sizes that `accelerate launch` or torchrun gave this process.

        `check_environment` has checked that they are numbers.
        """
        return cls(
            rank=int(os.environ.get("RANK") or 0),
            world_size=int(os.environ.get("WORLD_SIZE") or 1),
            local_rank=int(os.environ.get("LOCAL_RANK") or 0),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE") or 1),
            tp_size=_size("PARALLELISM_CONFIG_TP_SIZE"),
            cp_size=_size("PARALLELISM_CONFIG_CP_SIZE"),
            pp_size=_size("PARALLELISM_CONFIG_PP_SIZE"),
            pp_schedule=os.environ.get("PARALLELISM_CONFIG_PP_SCHEDULE") or SCHEDULES[0],
            cp_rotation=os.environ.get("PARALLELISM_CONFIG_CP_COMM_STRATEGY") or ROTATIONS[0],
        )

    @staticmethod
    def variables() -> dict[str, str]:
        """The environment variables of the accelerate config's parallelism_config, with the names of sizes there."""
        names = ("pp_size", "dp_replicate_size", "dp_shard_size", "cp_size", "sp_size", "tp_size")
        return {f"PARALLELISM_CONFIG_{name.upper()}": name for name in names}

    @classmethod
    def stated_sizes(cls) -> dict[str, int]:
        """The sizes that the accelerate config's parallelism_config states, by their names there; {} if it has none.

        The launcher passes on all but pp_size, which only `cli.py launch` does, as it does pp_schedule.
        """
        return {name: _size(variable) for variable, name in cls.variables().items() if os.environ.get(variable)}

    @classmethod
    def is_launched(cls) -> bool:
        """Whether a launcher started several processes; WORLD_SIZE alone may be that of a pod of a cluster."""
        return "LOCAL_RANK" in os.environ and cls.from_environment().world_size > 1

    @staticmethod
    def is_first_of_machine() -> bool:
        """Whether this process is the first one of its machine."""
        return not int(os.environ.get("LOCAL_RANK") or 0)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def dp_size(self) -> int:
        """Data-parallel size: how many groups of processes have different sequences of a step, sharded or not."""
        return self.world_size // (self.pp_size * self.cp_size * self.tp_size)

    @property
    def data_parallel(self) -> str:
        """The data-parallel size in words."""
        return f"{self.dp_size} {'processes' if self.dp_size == self.world_size else 'data-parallel ranks'}"

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.cp_size * self.tp_size) % self.dp_size

    @property
    def dp_cp_size(self) -> int:
        """How many groups of processes have different tokens of a step: their gradients are averaged."""
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
        return self.rank // (self.dp_size * self.cp_size * self.tp_size)

    def fills_pipeline(self, micro_batches: int) -> bool:
        """Whether the pipeline's schedule takes a step of so many micro-batches: at least as many as stages.

        torch's zero bubble also divides them into equal rounds, each of at least as many as stages.
        """
        rounds = micro_batches // self.pp_size
        return rounds > 0 and (self.pp_schedule != "zero_bubble" or micro_batches % rounds == 0)


def _size(variable: str) -> int:
    return int(os.environ.get(variable) or 1)
