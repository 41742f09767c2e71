"""Parallel layouts: which recipes run on which, and the split of a model. docs/machines.md has the table."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from nanogpt_hf.config.checks import divisors
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.sources import has_conversations
from nanogpt_hf.distributed.context_parallel import RING_MACHINES, heads_of, needs_ring, share_positions
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.distributed.tensor_parallel import split_matrices
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import plural
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import build_config
from nanogpt_hf.model.stages import check_stages
from nanogpt_hf.optim.optimizer import kind_of

_NO_FP16 = "fp16's loss scaler looks for overflows on each process alone; set mixed_precision bf16"
_FSDP2 = "set distributed_type FSDP with fsdp_version 2, as accelerate_configs/"


@dataclass(frozen=True)
class Machine:
    """Settings of the accelerate config that a layout has to fit."""

    sharding: Literal["none", "fsdp", "zero"] = "none"
    precision: str = "no"
    compiles: bool = False
    device: str = "cpu"
    checkpoints: bool = False  # activations
    reshards: bool = False  # FSDP2: weights after each forward pass


def split_model(model: PreTrainedModel, accelerator: Accelerator, mesh: Mesh) -> None:
    """Split a model for tensor and context parallelism, in place, before it is prepared."""
    device_mesh: Any = accelerator.torch_device_mesh
    if mesh.tp_size > 1:
        split_matrices(model, device_mesh["tp"])
    if mesh.cp_size > 1:
        ring = needs_ring(model.config, mesh.tp_size * mesh.cp_size)
        share_positions(model, device_mesh["cp"], ring=ring, rotation=mesh.cp_rotation)


def check_layout(config: Config, mesh: Mesh, machine: Machine, sizes: dict[str, int]) -> None:
    """Raises UserError if the recipe cannot be trained with this tensor, context or pipeline parallelism.

    Checks that the sizes which the accelerate config states multiply to the number of processes, too.
    """
    _check_sizes(mesh, machine, sizes)
    for size, kind, problem in (
        (mesh.tp_size, "tensor parallelism", _without_tensor_parallelism),
        (mesh.cp_size, "context parallelism", _without_context_parallelism),
    ):
        if size > 1 and (reason := problem(config, mesh, machine)):
            raise UserError(f"{kind} ({size} processes): {reason}")
    if mesh.pp_size > 1 and (reason := _without_pipeline(config, mesh, machine, sizes)):
        raise UserError(f"pipeline parallelism ({mesh.pp_size} stages): {reason}")


def _check_sizes(mesh: Mesh, machine: Machine, sizes: dict[str, int]) -> None:
    product = math.prod(sizes.values())
    shown = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "every size 1"
    # accelerate takes sizes that are all 1 for plain data parallelism, and leaves out pp_size, which it does not know
    only_stages = sizes.keys() == {"pp_size"} and mesh.world_size % product == 0
    if sizes and product != mesh.world_size and not only_stages:
        lost = "" if "pp_size" in sizes else "; parallelism_config_pp_size reaches a run only by `python cli.py launch`"
        raise UserError(
            f"parallelism_config: {shown} = {plural(product, 'process')}, but {mesh.world_size} were started: set "
            f"sizes whose product is num_processes{lost}"
        )
    if sizes.get("sp_size", 1) > 1:
        raise UserError("parallelism_config: sp_size is not supported; set cp_size, which exchanges heads the same way")
    if mesh.tp_size * mesh.cp_size == 1:
        return
    if mesh.pp_size > 1:
        raise UserError(f"parallelism_config: {shown}: pipeline stages do not combine with the others; set pp_size 1")
    if machine.sharding == "zero":
        raise UserError(
            f"parallelism_config: {shown} does not combine with DeepSpeed, which shards over all processes; "
            f"{_FSDP2}tp_fsdp2.yaml"
        )
    if machine.sharding == "fsdp" and mesh.dp_cp_size == 1:
        raise UserError(
            f"parallelism_config: {shown} leaves FSDP no processes to shard over; set distributed_type MULTI_GPU, as "
            "accelerate_configs/tp.yaml, or dp_shard_size"
        )
    if machine.sharding == "none" and mesh.cp_size > 1:
        raise UserError(f"parallelism_config: {shown} needs FSDP2; {_FSDP2}cp_fsdp2.yaml")
    if machine.sharding == "none" and mesh.dp_size > 1:
        raise UserError(
            f"parallelism_config: {shown} does not combine with plain data parallelism; {_FSDP2}tp_fsdp2.yaml, with "
            "dp_shard_size in place of dp_replicate_size"
        )


def _without_tensor_parallelism(config: Config, mesh: Mesh, machine: Machine) -> str | None:
    """The reason why a recipe cannot be trained with tensor parallelism; None if it can."""
    if machine.precision == "fp16":
        return _NO_FP16
    if config.lora.rank:
        return "lora.rank: adapters of matrices that are split are not supported; use accelerate_configs/fsdp2.yaml"
    refuses = kind_of(config.optim).refuses
    if reason := refuses.get("tp") or (machine.sharding == "fsdp" and refuses.get("tp_fsdp2")):
        return reason
    model: Any = _meta_model(config)
    architecture = architecture_of(model)
    block = architecture.blocks(model)[0]
    try:
        plan = architecture.tensor_parallel(block)
    except ValueError as error:
        return f"model.architecture: {error}"
    if machine.compiles and "heads" in plan.values():
        return f"norms of heads, as of {config.model.architecture}, cannot be compiled; set dynamo_backend 'NO'"
    heads, kv_heads = heads_of(model.config)
    widths = {"model.n_head": heads, "model.n_kv_head": kv_heads}
    layers: dict[str, Any] = {name: block.get_submodule(name) for name in plan}
    widths |= {f"the width of {name}": layers[name].out_features for name in plan if plan[name] == "outputs"}
    return next(
        (
            f"{name} is {width}, which {mesh.tp_size} processes do not divide"
            for name, width in widths.items()
            if width % mesh.tp_size
        ),
        None,
    )


def _without_context_parallelism(config: Config, mesh: Mesh, machine: Machine) -> str | None:
    """The reason why a recipe cannot be trained with context parallelism; None if it can."""
    if machine.precision == "fp16":
        return _NO_FP16
    if has_conversations(config.data):
        return "conversations are packed into blocks, and their masks cannot be cut; use accelerate_configs/fsdp2.yaml"
    block_size = config.data.block_size
    if block_size % mesh.cp_size:
        return f"data.block_size is {block_size}, which {mesh.cp_size} processes do not divide"
    model: Any = _meta_model(config)
    attention = model.config._attn_implementation
    rotary = getattr(model.config, "rope_parameters", None) is not None
    if attention != "sdpa" or not (rotary or config.model.architecture == "gpt2"):
        return f"model.architecture: the attention of {config.model.architecture} is of another kind than is supported"
    window = getattr(model.config, "sliding_window", None)
    if window is not None and window < block_size:
        return f"model.architecture: {config.model.architecture} attends to a window of {window} tokens of {block_size}"
    each = mesh.tp_size * mesh.cp_size
    return _without_ring(config, model, mesh, machine) if needs_ring(model.config, each) else None


def _without_ring(config: Config, model: Any, mesh: Mesh, machine: Machine) -> str | None:
    """The reason why a recipe whose heads cannot be exchanged cannot be trained by ring attention; None if it can."""
    if (machine.device, machine.precision) not in RING_MACHINES:
        names = zip(("model.n_head", "model.n_kv_head"), heads_of(model.config), strict=True)
        each = mesh.tp_size * mesh.cp_size
        name, heads = next((name, heads) for name, heads in names if heads % each)
        product = f"{mesh.tp_size} × {mesh.cp_size}" if mesh.tp_size > 1 else str(each)
        return (
            f"{name} is {heads}, which {product} processes do not divide, and ring attention, which needs no such "
            "sizes, runs only on CUDA GPUs (Ampere or newer) with mixed_precision bf16; set other sizes, or use them"
        )
    if config.data.block_size % (2 * mesh.cp_size):
        return (
            f"data.block_size is {config.data.block_size}, which does not divide into the 2 × {mesh.cp_size} equal "
            "parts of ring attention; set a multiple"
        )
    if any("drop" in name and value for name, value in model.config.to_dict().items()):
        return "ring attention has no dropout: its backward pass would draw other masks; set model.dropout 0"
    return None


def _without_pipeline(config: Config, mesh: Mesh, machine: Machine, sizes: dict[str, int]) -> str | None:
    """The reason why a recipe cannot be trained in pipeline stages; None if it can."""
    if machine.sharding == "zero":
        return f"DeepSpeed shards over all processes; {_FSDP2}pp_fsdp2.yaml"
    if machine.sharding == "fsdp" and sizes.get("dp_replicate_size", 1) > 1:
        return "a stage is not both sharded and copied; set dp_replicate_size 1"
    if machine.precision == "fp16":
        return _NO_FP16
    if config.lora.rank:
        return "lora.rank: adapters are not supported; use accelerate_configs/fsdp2.yaml"
    if reason := kind_of(config.optim).refuses.get("pp"):
        return reason
    if config.finetune.freeze_layers is not None or config.finetune.layer_decay != 1:
        knob = "layer_decay" if config.finetune.freeze_layers is None else "freeze_layers"
        return f"finetune.{knob} is not supported; leave it out, or use accelerate_configs/fsdp2.yaml"
    if config.model.n_layer < mesh.pp_size:
        return f"model.n_layer is {config.model.n_layer}, fewer than the stages"
    if mesh.pp_schedule == "zero_bubble" and (reason := _without_zero_bubble(machine)):
        return f"pp_schedule zero_bubble: {reason}, or pp_schedule 1f1b"
    train, block_size = config.train, config.data.block_size
    sequences = train.tokens_per_step // (block_size * mesh.dp_size)
    micro_batches = sequences // train.min_micro_batch_size
    if not mesh.fills_pipeline(micro_batches):
        problem, remedy = "fewer micro-batches than stages", "raise train.tokens_per_step"
        if rounds := micro_batches // mesh.pp_size:
            problem = f"pp_schedule zero_bubble cannot divide {micro_batches} micro-batches into {rounds} equal rounds"
            remedy = "set pp_schedule 1f1b"
        fitting = [size for size in divisors(sequences) if mesh.fills_pipeline(sequences // size)]
        smaller = f"set train.micro_batch_size to {max(fitting)} or " if fitting else ""
        return (
            f"a step has {plural(sequences, 'sequence')} per pipeline, in micro-batches of "
            f"{train.min_micro_batch_size}: {problem}; {smaller}{remedy}"
        )
    try:
        check_stages(config.model)
    except ValueError as error:
        return f"model.architecture: {error}"
    return None


def _without_zero_bubble(machine: Machine) -> str | None:
    """The reason why the machine cannot run the backward pass in two parts, for inputs and for weights."""
    if machine.compiles:
        return "a compiled block runs its backward pass as a whole; set dynamo_backend 'NO'"
    if machine.checkpoints:
        return (
            "the gradient of each weight would repeat its block's forward pass; set fsdp_activation_checkpointing false"
        )
    if machine.reshards:
        return "the weights of a stage stay gathered until the end of a step; set fsdp_reshard_after_forward false"
    return None


def _meta_model(config: Config) -> PreTrainedModel:
    """A model of the recipe's sizes on the meta device; its vocabulary does not matter here."""
    model_config = build_config(config.model, vocab_size=256)
    with torch.device("meta"):
        return architecture_of(model_config).model_class(model_config)
