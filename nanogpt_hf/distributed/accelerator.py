"""Build and describe the Accelerator, with our changes of its class and plugins.

What accelerate does otherwise than we need is changed in three places. Here: tensor parallelism on
CPUs and under FSDP2, no context parallelism of its own, FSDP2's sums of gradients. In
preparation.py: fp8 before a model is split, blocks that are compiled in place, torch's activation
checkpointing. In updates.py: clipping and stepping without the wrapper, and a dry-run step that
counts as no micro-batch.
"""

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    patch_environment,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed import deepspeed, rendezvous
from nanogpt_hf.distributed.accelerate_config import (
    CheckedLaunch,
    chooses_for_one_gpu,
    default_to_cpu,
    hide_layout,
    ignore_layout,
    lacks_bfloat16,
    settled,
)
from nanogpt_hf.distributed.mesh import Mesh, mesh_of
from nanogpt_hf.errors import UserError, one_line
from nanogpt_hf.runs.folder import RunFolder

logger = logging.getLogger(__name__)


class _Accelerator(Accelerator):
    """Accelerate's, for models that are split before `prepare`; it has the mesh of the launch, and
    the pipeline that the prepared model is a stage of.
    """

    def __init__(self, mesh: Mesh, **options: Any):
        self.mesh = mesh
        self.pipeline = None
        super().__init__(**options)

    def free_memory(self, *objects: Any) -> Any:
        self.pipeline = None
        return super().free_memory(*objects)

    @property
    def multi_device(self) -> bool:
        """Accelerate raises for tensor and context parallelism on CPU processes; the first works
        alike.
        """
        is_split = self.mesh.tp_size * self.mesh.cp_size > 1
        on_cpus = self.distributed_type == DistributedType.MULTI_CPU and is_split
        return on_cpus or super().multi_device

    def prepare_model(self, *args: Any, **options: Any) -> Any:
        """Accelerate moves no model with DTensors to its device, and on GPUs refuses those that DDP
        leaves out, such as shared experts.
        """
        with patch("accelerate.accelerator.model_has_dtensor", lambda model: False):
            return super().prepare_model(*args, **options)

    def _prepare_tp(self, *args: Any) -> Any:
        """Nothing: parameters that are not split stay plain, which FSDP2 takes.

        Accelerate 1.15 imports ReplicateParallel here, which transformers 5.23 no longer has.
        """
        return args

    # Do nothing here: context_parallel.py does it, and accelerate's hooks would drop the masks of
    # evaluations.
    _prepare_cp = _prepare_tp
    # Do nothing here: `multiply_in_fp8` does it before a model is split.
    _prepare_ao = _prepare_tp


@contextmanager
def _one_line_of_accelerate() -> Iterator[None]:
    """Raise UserError with accelerate's reason if it rejects its config."""
    try:
        yield
    # Accelerate has no class of its own for a wrong setting. `--log-level debug` prints the
    # traceback.
    except (
        ValueError,
        TypeError,
        LookupError,
        ImportError,
        AssertionError,
        NotImplementedError,
    ) as error:
        raise UserError(f"accelerate cannot start as its config asks: {one_line(error)}") from error


def _start(mesh: Mesh, **options: Any) -> Accelerator:
    """Start an Accelerator. Raises UserError if it sees other processes than the launcher
    started.
    """
    default_to_cpu(mesh)
    # of the collectives: a process that is lost ends the others after it
    timeout = InitProcessGroupKwargs(timeout=rendezvous.PEER_TIMEOUT)
    # Accelerate's own checkpointing knows no levels: preparation.py does it.
    own = patch_environment(fsdp_activation_checkpointing="false")
    with _one_line_of_accelerate(), own:
        accelerator = _Accelerator(
            mesh, mixed_precision=mesh.precision, kwargs_handlers=[timeout], **options
        )
    if accelerator.num_processes != mesh.world_size:
        raise UserError(
            f"the launcher started {mesh.world_size} processes, but accelerate sees "
            f"{accelerator.num_processes}: each would work alone; check distributed_type and "
            "use_cpu in the accelerate config"
        )
    return accelerator


def build_evaluation_accelerator(mesh: Mesh) -> Accelerator:
    """Build the Accelerator of a process that only evaluates a whole model: device, precision and
    process group. Instead of fp8 it takes bf16.

    Raises UserError if `settled` does, and if accelerate sees fewer processes than the launcher
    started.
    """
    mesh = settled(mesh)
    ignore_layout()
    whole = replace(mesh, tp_size=1, cp_size=1, pp_size=1, ep_size=1, sharding="none")
    # Without a config, evaluations are in float32 also on a GPU: their figures do not depend on it.
    precision = "no" if chooses_for_one_gpu() else whole.precision.replace("fp8", "bf16")
    return _start(replace(whole, precision=precision))


def build_accelerator(
    launch: CheckedLaunch, run: RunFolder, trackers: Sequence[GeneralTracker] = ()
) -> Accelerator:
    """Build the Accelerator of this process, with the accumulation that the recipe's tokens per
    step imply, and with `trackers` in addition to the recipe's.

    Raises UserError if this machine does not provide what the accelerate config sets.
    """
    config = launch.config
    mesh = launch.mesh
    hide_layout(mesh)
    if mesh.sharding == "zero" and not torch.accelerator.is_available():
        deepspeed.reduce_with_gloo()
    # No dataloader is prepared, so none may end an accumulation early.
    plugin = GradientAccumulationPlugin(
        num_steps=launch.accumulation,
        sync_with_dataloader=False,
        sync_each_batch=mesh.sharding == "fsdp",
    )
    accelerator = _start(
        mesh,
        gradient_accumulation_plugin=plugin,
        log_with=[*config.tracking.trackers, *trackers] or None,
        project_config=ProjectConfiguration(str(run.path), str(run.trackers)),
    )
    _report_choices(accelerator)
    _check_provided(accelerator)
    if mesh.sharding == "fsdp":
        _configure_fsdp(accelerator)
    if mesh.sharding == "zero":
        zero: Any = accelerator.deepspeed_plugin
        deepspeed.configure(zero.deepspeed_config, config, launch.accumulation)
    if accelerator.device.type == "cuda":
        # TF32 for the products that remain in float32
        torch.set_float32_matmul_precision("high")
    return accelerator


def _report_choices(accelerator: Accelerator) -> None:
    """Log what was chosen although the accelerate config does not set it."""
    if lacks_bfloat16() and accelerator.is_main_process:
        logger.warning(
            "this CPU has no instructions for bfloat16 (AVX512_BF16, AMX or Arm's BF16), so the "
            "run is in float32, which is faster here"
        )
    if chooses_for_one_gpu():
        compiles = ", compiled" if mesh_of(accelerator).compiles else ""
        logger.info(
            f"no accelerate config: {precision_of(accelerator)}{compiles}; `accelerate config`, or "
            "launch --config_file F, sets another precision and compiler"
        )


def _check_provided(accelerator: Accelerator) -> None:
    """Raises UserError if the run would not get the sharding that the accelerate config sets."""
    # Accelerate ignores FSDP on a CPU without a word. Without a process group it shards nothing.
    provided = accelerator.distributed_type.value if torch.distributed.is_initialized() else "NO"
    sharding = mesh_of(accelerator).sharding
    stated = {"fsdp": "FSDP", "zero": "DEEPSPEED"}.get(sharding, provided)
    if provided != stated:
        raise UserError(
            f"the accelerate config sets {stated}, but this machine provides {provided} on "
            f"{accelerator.device.type}; use a config without it, such as "
            "accelerate_configs/cpu_ddp.yaml"
        )


def _configure_fsdp(accelerator: Accelerator) -> None:
    """Let FSDP2 sum gradients in float32. Raises UserError if the accelerate config sets FSDP 1."""
    plugin: Any = accelerator.state.fsdp_plugin
    # Accelerate 1.15 does it with a device mesh of several dimensions.
    warnings.filterwarnings(
        "ignore", "Slicing a flattened dim from root mesh will be deprecated", UserWarning
    )
    if plugin.fsdp_version != 2:
        raise UserError("the accelerate config sets FSDP 1; set fsdp_version: 2 in its fsdp_config")
    if accelerator.mixed_precision in ("bf16", "fp8"):
        # Accelerate's own policy also sums gradients in bf16, and loses their small parts.
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )


def is_deterministic(config: Config, device: torch.device) -> bool:
    """Whether the bytes of the run's steps repeat on this machine: always on a CPU."""
    train = config.train
    return device.type == "cpu" or train.deterministic or train.gradient_groups is not None


def choose_kernels(*, deterministic: bool) -> None:
    """Use only kernels with a fixed order of sums on a GPU, or the fastest ones.

    Without a fixed order, the backward pass of attention adds by atomic operations. torch raises
    RuntimeError if an operation has no deterministic kernel.
    """
    if deterministic:
        # cuBLAS reads it with the first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # torch would also fill each new tensor, to show what reads it too early
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False


def sum_over_ranks(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all processes; replicas count once. Every process gets the sum.

    A sum of the values and of zeros for the replicas: exact for any number of them and any dtype,
    as a division by their number would not be.
    """
    mesh = mesh_of(accelerator)
    # Tensor-parallel ranks have equal values. Of pipeline stages the last has the loss.
    counts = mesh.tp_rank == 0 and mesh.pp_rank == mesh.pp_size - 1
    summand = tensor if counts else torch.zeros_like(tensor)
    return cast(torch.Tensor, accelerator.reduce(summand, "sum"))


def describe_device(device: torch.device) -> str:
    """Name a device, such as `NVIDIA H200`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU with {threads} thread{'s' * (threads > 1)}"
    return device.type.upper()


def precision_of(accelerator: Accelerator) -> str:
    """fp32, bf16 or fp16."""
    return "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision


def describe_machine(accelerator: Accelerator) -> str:
    """One line such as `8 × NVIDIA H200, MULTI_GPU, bf16`."""
    mesh = mesh_of(accelerator)
    kind = accelerator.distributed_type
    split = {
        "tensor-parallel": mesh.tp_size,
        "context-parallel": mesh.cp_size,
        "expert-parallel": mesh.ep_size,
        f"pipeline-parallel ({mesh.pp_schedule})": mesh.pp_size,
    }
    words = [
        f"{accelerator.num_processes} × {describe_device(accelerator.device)}",
        *([] if kind == DistributedType.NO else [kind.value]),
        *(f"{size}-way {name}" for name, size in split.items() if size > 1),
        precision_of(accelerator),
    ]
    return ", ".join(words)


def actual_settings(accelerator: Accelerator) -> dict[str, str]:
    """Settings of this process, by name, to compare with those that were requested."""
    return {
        "device": accelerator.device.type,
        "distributed type": accelerator.distributed_type.value,
        "precision": accelerator.mixed_precision,
        "dynamo": mesh_of(accelerator).compiler,
    }
