"""Mesh: rank and world size of this process; the only reader of WORLD_SIZE, RANK, LOCAL_RANK and LOCAL_WORLD_SIZE.

Imports no torch, so that a command can use it before heavy imports.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """Rank and size in each kind of parallelism. Without a launcher: rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # within this machine
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> "Mesh":
        """The ranks and sizes that `accelerate launch` or torchrun gave this process."""
        return cls(
            rank=int(os.environ.get("RANK") or 0),
            world_size=int(os.environ.get("WORLD_SIZE") or 1),
            local_rank=int(os.environ.get("LOCAL_RANK") or 0),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE") or 1),
        )

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    # All parallelism is data parallelism: each process gets different sequences of a step.
    @property
    def dp_rank(self) -> int:
        return self.rank

    @property
    def dp_size(self) -> int:
        return self.world_size
