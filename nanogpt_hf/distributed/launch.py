"""Launch: how processes and accelerate's config divide a run, as pure data.

It is the one description of a launch. A run reads it from the environment (distributed/mesh.py),
`estimate` reads it from a config file or proposes it, and the checks of a layout, the ranks and
the estimates of memory and time follow from it. Imports no torch, so that a command can use it
before heavy imports.
"""

from dataclasses import dataclass
from typing import Literal

from nanogpt_hf.distributed.environment import ROTATIONS, SCHEDULES


@dataclass(frozen=True)
class Launch:
    """Processes of a launch, sizes of their dimensions, sharding and precision: what is equal on
    all of them. The default is one process without a config.

    The processes form a grid of four named dimensions, which multiply to their number: pipeline
    stages (pp) × data parallelism (dp) × context parallelism (cp) × tensor parallelism (tp). The
    config states pp, cp and tp; dp is what remains. For example 16 processes with pp 2 and tp 2
    have dp 4.

    The data-parallel processes are grouped again: into copies of the model that FSDP2 shards
    (HSDP), and into groups that share one copy of the experts (ep).
    """

    # Processes, one per device, as many on each machine.
    world_size: int = 1
    local_world_size: int = 1
    # Sizes of the named dimensions, by their names in the parallelism_config of accelerate.
    tp_size: int = 1  # tensor parallelism: each matrix is split
    cp_size: int = 1  # context parallelism: each sequence is split
    pp_size: int = 1  # pipeline parallelism: the layers are split
    ep_size: int = 1  # expert parallelism: data-parallel ranks that share one copy of the experts
    dp_replicate_size: int = 1  # HSDP: copies of the model that FSDP2 shards
    pp_schedule: str = SCHEDULES[0]
    cp_rotation: str = ROTATIONS[0]
    # How data-parallel processes hold the model: whole (one process, DDP), or in shards.
    sharding: Literal["none", "fsdp", "zero"] = "none"
    zero_stage: int = 2  # DeepSpeed: 2 shards gradients and optimizer state, 3 the weights, too
    reshards: bool = False  # FSDP2: frees the gathered weights after each forward pass
    sends_weights: bool = False  # FSDP2: one process reads the weights and sends them
    compression: str = "no"  # DDP: gradients are sent in bf16 or fp16
    # How each process computes.
    device: str = "cuda"
    precision: str = "no"  # or bf16, fp16, fp8
    compiler: str = ""  # what compiler.py writes; "" if the config leaves it to the program
    checkpointing: str = ""  # level of activation checkpointing (model/recompute.py)

    @property
    def dp_size(self) -> int:
        """Data-parallel size: how many groups of processes have different sequences of a step,
        sharded or not.
        """
        return self.world_size // (self.pp_size * self.cp_size * self.tp_size)

    @property
    def dp_cp_size(self) -> int:
        """Number of groups of processes with different tokens of a step: their gradients are
        averaged.
        """
        return self.dp_size * self.cp_size

    @property
    def copies(self) -> int:
        """Number of copies of a parameter's optimizer state."""
        if self.sharding == "fsdp":
            return self.dp_replicate_size
        # ZeRO shards over all processes. A model that is not sharded is whole on each.
        return 1 if self.sharding == "zero" else self.dp_cp_size

    @property
    def shards(self) -> int:
        """Number of data- and context-parallel processes that share one copy of the optimizer
        state.
        """
        return self.dp_cp_size // self.copies

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a part of the model or of the optimizer state only."""
        return self.sharding != "none" or self.tp_size * self.pp_size * self.ep_size > 1

    @property
    def kind(self) -> str:
        """Kind of data parallelism: one process, DDP, FSDP2, ZeRO-2 or ZeRO-3."""
        if self.sharding == "fsdp":
            return "FSDP2"
        if self.sharding == "zero":
            return f"ZeRO-{self.zero_stage}"
        return "DDP" if self.dp_size > 1 else "one process"

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def data_parallel(self) -> str:
        """Data-parallel size in words."""
        kind = "processes" if self.dp_size == self.world_size else "data-parallel ranks"
        return f"{self.dp_size} {kind}"

    def fills_pipeline(self, micro_batches: int) -> bool:
        """Whether the pipeline's schedule takes a step of `micro_batches` micro-batches: at least
        as many as stages.

        torch's zero bubble also divides them into equal rounds, each of at least as many as stages.
        """
        rounds = micro_batches // self.pp_size
        return rounds > 0 and (self.pp_schedule != "zero_bubble" or micro_batches % rounds == 0)

    # Precision: bytes of the values that a step computes with.

    @property
    def autocast(self) -> bool:
        """Whether float32 weights are cast when used.

        DeepSpeed stores the model in 16 bits instead, and FSDP2 gathers it so.
        """
        return self.precision != "no" and self.sharding == "none"

    @property
    def compute_bytes(self) -> int:
        """Bytes of a value in matrix products."""
        return 4 if self.precision == "no" else 2

    @property
    def residual_bytes(self) -> int:
        """Bytes of a value in the residual stream, the input of a LayerNorm."""
        return 4 if self.autocast else self.compute_bytes

    @property
    def writes_out_attention(self) -> bool:
        """Whether short sequences take the attention of model/written_out_attention.py."""
        return self.on_cpu and self.precision == "bf16"

    @property
    def compiles(self) -> bool:
        return self.compiler not in ("", "no")

    # Words for a launch.

    @property
    def sizes(self) -> dict[str, int | str]:
        """Kinds of parallelism with their sizes."""
        dimensions = {
            "PP": self.pp_size,
            "CP": self.cp_size,
            "TP": self.tp_size,
            "EP": self.ep_size,
        }
        sizes: dict[str, int | str] = {name: n for name, n in dimensions.items() if n != 1}
        if self.sharding == "fsdp" and self.copies > 1:
            sizes["HSDP"] = f"{self.copies}×{self.shards}"
        elif self.dp_cp_size > 1 or not sizes:
            sizes[self.kind] = self.dp_size
        return sizes

    @property
    def family(self) -> str:
        """Kinds of parallelism without their sizes, such as `TP × FSDP2`."""
        return " × ".join(self.sizes)

    @property
    def name(self) -> str:
        """Kinds of parallelism with their sizes in one line, such as `TP 2 × FSDP2 4`."""
        if self.world_size == 1:
            return self.family
        return " × ".join(f"{name} {size}" for name, size in self.sizes.items())

    def __str__(self) -> str:
        precision = f"{self.precision} with float32 weights"
        parts = [self.name, "float32" if self.precision == "no" else precision]
        if self.checkpointing:
            parts.append(f"activation checkpointing {self.checkpointing}".removesuffix(" true"))
        return ", ".join([*parts, "on the CPU" if self.on_cpu else "on GPUs"])
