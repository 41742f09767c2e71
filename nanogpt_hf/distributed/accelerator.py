"""Build and describe the Accelerator; every workaround for it.

Workarounds: tensor parallelism on CPUs and under FSDP2; our own context parallelism; FSDP2
shards gradients after each micro-batch, and in bf16 sums them in float32; layers are converted to
fp8 before a model is split; blocks are compiled in place; activation checkpointing is that of
torch; clipping and the optimizer's step bypass the wrapper; a dry-run step counts as no
micro-batch.
"""

import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.tracking import GeneralTracker
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    patch_environment,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed import accelerate_config, deepspeed, expert_parallel, rendezvous
from nanogpt_hf.distributed.accelerate_config import (
    check_config,
    check_launch,
    chooses_for_one_gpu,
    default_to_cpu,
    hide_layout,
    ignore_layout,
    lacks_bfloat16,
    one_line_of_accelerate,
    settled,
)
from nanogpt_hf.distributed.deepspeed import is_zero
from nanogpt_hf.distributed.mesh import Mesh, mesh_of
from nanogpt_hf.distributed.pipeline import pipeline_of
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.loss_gpt import compile_loss
from nanogpt_hf.model.recompute import recompute_blocks
from nanogpt_hf.optim.optimizer import skip_step_unless_finite
from nanogpt_hf.optim.state import clip_to_norm, full_tensor, total_norm
from nanogpt_hf.runs.folder import RunFolder

logger = logging.getLogger(__name__)


class _Accelerator(Accelerator):
    """Accelerate's, for models that are split before `prepare`; it has the mesh of the launch, and
    the pipeline that the prepared model is a stage of.
    """

    def __init__(self, mesh: Mesh, **options: Any):
        self.mesh, self.pipeline = mesh, None
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

    # nothing: context_parallel.py does it; accelerate's hooks drop the masks of evaluations, too
    _prepare_cp = _prepare_tp
    _prepare_ao = _prepare_tp  # nothing: `multiply_in_fp8` does it, before a model is split


def _start(mesh: Mesh, **options: Any) -> Accelerator:
    """Start an Accelerator. Raises UserError if it sees other processes than the launcher
    started.
    """
    default_to_cpu(mesh)
    timeout = InitProcessGroupKwargs(timeout=rendezvous.PEER_TIMEOUT)
    # accelerate's own checkpointing knows no levels
    own = patch_environment(fsdp_activation_checkpointing="false")
    with one_line_of_accelerate(), own:
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

    Raises UserError if `check_config` does, and if accelerate sees fewer processes than the
    launcher started.
    """
    check_config()
    ignore_layout()
    whole = replace(settled(mesh), tp_size=1, cp_size=1, pp_size=1, ep_size=1)
    # Without a config figures are those of float32, also on a GPU.
    precision = "no" if chooses_for_one_gpu() else whole.precision.replace("fp8", "bf16")
    return _start(replace(whole, precision=precision))


def build_accelerator(
    config: Config, run: RunFolder, mesh: Mesh, trackers: Sequence[GeneralTracker] = ()
) -> Accelerator:
    """Build the Accelerator of this process, with the accumulation that the recipe's tokens per
    step imply, and with `trackers` beside those that the recipe names.

    Raises UserError if `check_launch` does, and if this machine does not provide what the
    accelerate config sets.
    """
    accumulation = check_launch(config, mesh)
    mesh = settled(mesh, config)
    hide_layout(mesh)
    if mesh.sharding == "zero" and not torch.accelerator.is_available():
        deepspeed.reduce_with_gloo()
    # No dataloader is prepared, so none may end an accumulation early.
    plugin = GradientAccumulationPlugin(
        num_steps=accumulation, sync_with_dataloader=False, sync_each_batch=mesh.sharding == "fsdp"
    )
    accelerator = _start(
        mesh,
        gradient_accumulation_plugin=plugin,
        log_with=[*config.tracking.trackers, *trackers] or None,
        project_config=ProjectConfiguration(str(run.path), str(run.trackers)),
    )
    if lacks_bfloat16() and accelerator.is_main_process:
        logger.warning(
            "this CPU has no instructions for bfloat16 (AVX512_BF16, AMX or Arm's BF16), so the "
            "run is in float32, which is faster here"
        )
    if chooses_for_one_gpu():
        compiles = ", compiled" if mesh.compiles else ""
        logger.info(
            f"no accelerate config: {precision_of(accelerator)}{compiles}; `accelerate config`, or "
            "launch --config_file F, sets another precision and compiler"
        )
    provided = accelerator.distributed_type.value if torch.distributed.is_initialized() else "NO"
    stated = {"fsdp": "FSDP", "zero": "DEEPSPEED"}.get(mesh.sharding, provided)
    if provided != stated:
        raise UserError(
            f"the accelerate config sets {stated}, but this machine provides {provided} on "
            f"{accelerator.device.type}; use a config without it, such as "
            "accelerate_configs/cpu_ddp.yaml"
        )
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None:
        # what accelerate 1.15 does with a device mesh of several dimensions
        warnings.filterwarnings(
            "ignore", "Slicing a flattened dim from root mesh will be deprecated", UserWarning
        )
        if fsdp.fsdp_version != 2:
            raise UserError(
                "the accelerate config sets FSDP 1; set fsdp_version: 2 in its fsdp_config"
            )
        if accelerator.mixed_precision in ("bf16", "fp8"):
            # accelerate's own policy also sums gradients in bf16, and loses their small parts
            fsdp.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
    if is_zero(accelerator):
        plugin: Any = accelerator.deepspeed_plugin
        deepspeed.configure(plugin.deepspeed_config, config, accumulation)
    if accelerator.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 where float32 remains
    return accelerator


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether each process holds a part of the model or of the optimizer state only."""
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    mesh = mesh_of(accelerator)
    return sharded or mesh.tp_size * mesh.pp_size * mesh.ep_size > 1


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
        # read with the first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # torch would also fill each new tensor, to show what reads it too early
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False


def sum_over_ranks(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all processes, on all of them; of those that have the same, one
    counts.

    They are tensor-parallel ranks, and pipeline stages, of which the last has the loss. Exact
    for any number of ranks and any dtype.
    """
    mesh = mesh_of(accelerator)
    counts = mesh.tp_rank == 0 and mesh.pp_rank == mesh.pp_size - 1
    return cast(
        torch.Tensor, accelerator.reduce(tensor if counts else torch.zeros_like(tensor), "sum")
    )


def describe_device(device: torch.device) -> str:
    """The name of a device, such as `NVIDIA H200`."""
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
    mesh, kind = mesh_of(accelerator), accelerator.distributed_type
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
        "dynamo": cast(Any, accelerator.state.dynamo_plugin).backend.value.lower(),
    }


def multiply_in_fp8(model: PreTrainedModel, mesh: Mesh) -> None:
    """Let torchao multiply in 8 bits in the linear layers of the blocks of a whole model, in place.
    Raises UserError if none has sizes that 16 divides, on each of the processes that split it.

    Scales are those of a tensor of a micro-batch, so there is no state. Weights stay what they are:
    checkpoints know no class of weights that FSDP2 gathers in 8 bits.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # take a second

    unit, found = 16 * mesh.tp_size, []

    def takes(layer: Any, name: str) -> bool:
        fits = layer.in_features % unit == layer.out_features % unit == 0
        found.extend([name] * fits)
        return fits

    # the inner size of a product is padded: numbers of tokens may be odd
    config = Float8LinearConfig(pad_inner_dim=True, emulate=accelerate_config.EMULATES_FP8)
    blocks = architecture_of(model).blocks(model)
    convert_to_float8_training(blocks, module_filter_fn=takes, config=config)
    if not found:
        raise UserError(
            "the accelerate config sets mixed_precision fp8, and no block of the model has a "
            f"linear layer with inputs and outputs that {unit} divides; set bf16, or other sizes"
        )


def _is_one_graph(model: PreTrainedModel, accelerator: Accelerator) -> bool:
    """Whether the base model can be compiled as one graph, whose kernels a host starts faster than
    those of its blocks: in small steps a GPU waits for the host.

    FSDP2, ZeRO and parallel layouts run code between the blocks. Recomputed activations and masks
    of packed documents are known to work block by block.
    """
    attention = model.config._attn_implementation
    mesh = mesh_of(accelerator)
    is_plain = attention in ("sdpa", "eager") and not mesh.checkpointing
    return is_plain and not is_sharded(accelerator) and mesh.cp_size == 1


@contextmanager
def prepared_blocks(
    model: PreTrainedModel, accelerator: Accelerator, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """Compile the model, loss and the optimizer's update, and checkpoint activations, if the
    accelerate config sets it. Name the blocks for FSDP2.

    A context for `accelerator.prepare`, inside which accelerate's own versions are off. Compiled
    in place, parameters keep their names. The base model is one graph where that is possible, else
    each block is compiled, and one graph serves all blocks. Accelerate's checkpointing draws new
    dropout masks in the backward pass, which makes the gradient wrong.
    """
    mesh = mesh_of(accelerator)
    if mesh.tp_size > 1:
        cast(Any, model)._tp_size = mesh.tp_size  # accelerate compares it with its config
    if mesh.checkpointing:
        recompute_blocks(model, mesh.checkpointing)
    blocks = architecture_of(model).blocks(model)
    # what FSDP2 shards as one; transformers also names parts of other models
    cast(Any, model)._no_split_modules = sorted({type(block).__name__ for block in blocks})
    plugin: Any = accelerator.state.dynamo_plugin
    backend, plugin.backend = plugin.backend, DynamoBackend.NO
    if backend != DynamoBackend.NO:
        mode = None if plugin.mode == "default" else plugin.mode
        options: Any = {"backend": backend.value.lower(), "mode": mode}
        is_whole = _is_one_graph(model, accelerator) and not plugin.use_regional_compilation
        for part in [model.base_model] if is_whole else blocks:
            part.compile(**options)
        compile_loss(model.get_output_embeddings(), **options)
        if compile_update := getattr(optimizer, "compile", None):
            compile_update(**options)
    try:
        yield
    finally:  # for the next model of this run, after unfreezing or a loss spike
        plugin.backend = backend


def compress_gradients(model: torch.nn.Module, accelerator: Accelerator) -> None:
    """Let DDP send the gradients of a prepared model in the precision that the accelerate config
    sets.
    """
    kind = mesh_of(accelerator).compression
    if isinstance(model, DistributedDataParallel) and kind != "no":
        hook = getattr(default_hooks, f"{kind}_compress_hook")
        # not the hook itself: torch refuses the name of that for bf16 on gloo, which has its sum
        model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))


@contextmanager
def accumulate(accelerator: Accelerator, model: torch.nn.Module) -> Iterator[None]:
    """Context for the forward and backward pass of a micro-batch; the last one of a step reduces
    the gradients.

    FSDP2 reduce-scatters them after each (`sync_each_batch`), since it would otherwise
    accumulate whole gradients, 4 bytes per parameter on each process. HSDP's all-reduce over the
    copies waits for the last.
    """
    with accelerator.accumulate(model):
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(accelerator.sync_gradients)
        yield


@contextmanager
def micro_batches_not_counted(accelerator: Accelerator, count: int = 1) -> Iterator[None]:
    """Context for a step of `count` micro-batches that leaves accelerate's counter of micro-batches
    at 0.

    Accelerate lets the optimizer step at multiples of the accumulation.
    """
    accumulation = accelerator.gradient_accumulation_steps
    accelerator.gradient_accumulation_steps = count
    try:
        yield
    finally:  # the step may run out of memory
        accelerator.gradient_accumulation_steps = accumulation
        accelerator.step = 0


def clip_gradients(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    max_norm: float,
) -> torch.Tensor:
    """Clip the gradients to `max_norm` (0: not) and return their norm before, a scalar on the
    device.

    If it is not finite, the next step leaves weights and state unchanged; DeepSpeed and fp16's
    scaler do the same by themselves.
    """
    if is_zero(accelerator) or accelerator.scaler is not None:
        norm: Any = accelerator.clip_grad_norm_(model.parameters(), max_norm or math.inf)
        # DeepSpeed has clipped and stepped already, and returns a number
        return torch.as_tensor(full_tensor(norm), device=accelerator.device)
    bare, mesh = _unwrap(optimizer), mesh_of(accelerator)
    parameters = [p for p in bare.in_model_order if p.grad is not None]
    if mesh.ep_size > 1:
        expert_parallel.average_copies(parameters, mesh)
    if pipeline := pipeline_of(accelerator):
        norm = pipeline.norm(parameters)
    else:
        norm = total_norm([cast(torch.Tensor, p.grad) for p in parameters])
    clip_to_norm(parameters, max_norm, norm)
    skip_step_unless_finite(bare, norm)
    return norm


def update(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Step, and clear the gradients.

    Accelerate's wrapper is bypassed if it would only forward the call: at each it searches
    Python's path twice for a package (LOMO).
    """
    if accelerator.scaler is None and not is_zero(accelerator):
        optimizer = _unwrap(optimizer)
    optimizer.step()
    optimizer.zero_grad()


def _unwrap(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer in accelerate's wrapper."""
    return cast(AcceleratedOptimizer, optimizer).optimizer
