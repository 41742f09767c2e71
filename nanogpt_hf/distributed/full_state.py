"""Gather full weights and optimizer state of a prepared model, and load them, under any kind of sharding.

Tensors are whole on every process (one process, DDP), DTensors (FSDP2), or slices of flat buffers (deepspeed.py).
Gathered tensors are float32 and have our names, so a run can be resumed under another kind of sharding. All functions
are collectives: all processes call them.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import broadcast
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from nanogpt_hf.distributed import deepspeed
from nanogpt_hf.distributed.deepspeed import full_shape, is_zero
from nanogpt_hf.distributed.pipeline import pipeline_of
from nanogpt_hf.errors import UserError
from nanogpt_hf.optim.adamw_8bit import as_float32, held_by
from nanogpt_hf.optim.optimizer import ADAMW_STATE, state_keys


def named_parameters(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters by name, as this process has them; without a tied head.

    Under FSDP2 these are the shards, as in the optimizer: an evaluation leaves some layers gathered.
    """
    model = cast(torch.nn.Module, accelerator.unwrap_model(model))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    pipeline = pipeline_of(model)
    return pipeline.named_parameters() if pipeline else dict(model.named_parameters())


def _parameters_of_all_stages(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """As `named_parameters`, and those of other pipeline stages on the meta device; in the same order on all ranks."""
    parameters, pipeline = named_parameters(accelerator, model), pipeline_of(model)
    return pipeline.whole_parameters() if pipeline else parameters


def full_weights(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's full weights on the main process's CPU; {} on other processes."""
    parameters, full = named_parameters(accelerator, model), deepspeed.full_weight if is_zero(accelerator) else _full
    return _collect(accelerator, model, ((name, full(parameter)) for name, parameter in parameters.items()))


def full_optimizer_state(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer
) -> dict[str, torch.Tensor]:
    """The full optimizer state on the main process's CPU, as `<parameter>.<key>`; {} on other processes."""
    trained = {n: p for n, p in named_parameters(accelerator, model).items() if p.requires_grad}
    if is_zero(accelerator):
        return _collect(accelerator, model, deepspeed.full_state_tensors(trained, optimizer))
    check_optimizer_state(accelerator, model, optimizer)
    states = {name: optimizer.state[parameter] for name, parameter in trained.items()}
    tensors = ((f"{n}.{k}", _full(as_float32(v))) for n, state in states.items() for k, v in state.items())
    return _collect(accelerator, model, tensors)


def check_optimizer_state(accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer) -> None:
    """Raises UserError if the optimizer has state for some, but not all, of the trainable parameters.

    Something then replaced the others when the model was prepared; the new ones would neither train nor be saved.
    """
    if is_zero(accelerator):  # DeepSpeed has one state for all, in flat buffers
        return
    trained = {name: p for name, p in named_parameters(accelerator, model).items() if p.requires_grad}
    without = [name for name, parameter in trained.items() if not optimizer.state.get(parameter)]
    if without and len(without) < len(trained):
        raise UserError(
            f"{len(without)} of {len(trained)} parameters that should train, first {without[0]}, are unknown to the "
            "optimizer after a step: this accelerate config prepares the model in a way that is not supported"
        )


def first_mismatch(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    weights: dict[str, torch.Tensor],
    optimizer_state: dict[str, torch.Tensor],
) -> str | None:
    """The first name, shape or dtype in which saved weights and optimizer state differ from the model's; None if equal.

    A parameter without any saved optimizer state may have just been unfrozen.
    """
    parameters = _parameters_of_all_stages(accelerator, model)
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    keys = state_keys(optimizer, trained)
    sizes = {f"{n}.{k}": (full_shape(p), p) for n, p in trained.items() for k in keys[n]}
    sizes |= {f"{n}.step": (torch.Size(()), p) for n, p in trained.items() if keys[n] == ADAMW_STATE}
    with_state = {key.rpartition(".")[0] for key in optimizer_state}
    for kind, saved, needed in (
        ("weight", weights, {name: (full_shape(p), p) for name, p in parameters.items()}),
        (
            "optimizer state",
            optimizer_state,
            {key: size for key, size in sizes.items() if key.rpartition(".")[0] in with_state},
        ),
    ):
        if odd := sorted(saved.keys() ^ needed.keys()):
            return f"{kind} {odd[0]} is {'missing' if odd[0] in needed else 'not in this model'}"
        for name, (shape, parameter) in needed.items():
            dtypes = {parameter.dtype} | ({torch.float32} if parameter.is_floating_point() else set())
            if saved[name].shape != shape or saved[name].dtype not in dtypes:
                both = ((saved[name].shape, saved[name].dtype), (shape, parameter.dtype))
                found, wanted = (f"{tuple(size)} {dtype}".replace("torch.", "") for size, dtype in both)
                return f"{kind} {name} is {found} instead of {wanted}"
    return None


def set_weights(accelerator: Accelerator, model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Load the main process's full weights into the model on all processes. `weights` is {} on the others."""
    for name, parameter in _parameters_of_all_stages(accelerator, model).items():
        with torch.no_grad():
            if is_zero(accelerator):
                value = _broadcast(accelerator, weights.get(name), full_shape(parameter), torch.float32)
                deepspeed.set_weight(parameter, value)
            else:
                value = _shard(accelerator, parameter, weights.get(name), parameter.shape, parameter.dtype)
                if not parameter.is_meta:
                    parameter.copy_(value)


def set_optimizer_state(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    saved: dict[str, torch.Tensor],
    layout: dict[str, tuple[torch.Size, torch.dtype]],
) -> None:
    """Load the main process's full optimizer state into the optimizer on all processes.

    `saved` is {} on the others; `layout` has its names -> (shape, dtype) on all. A trainable parameter that is not in
    it was just unfrozen and gets the initial state.
    """
    trained = {n: p for n, p in _parameters_of_all_stages(accelerator, model).items() if p.requires_grad}
    kinds = state_keys(optimizer, trained)
    for name, parameter in trained.items():
        keys = [key for key in layout if key.rpartition(".")[0] == name]
        if not is_zero(accelerator):
            state = {
                key.rpartition(".")[2]: _shard(accelerator, parameter, saved.get(key), *layout[key]) for key in keys
            }
            if not parameter.is_meta:
                optimizer.state[parameter] = held_by(
                    optimizer.optimizer, parameter, state or _initial_state(parameter, kinds[name])
                )
            continue
        for key in keys:
            value, kind = _broadcast(accelerator, saved.get(key), *layout[key]), key.rpartition(".")[2]
            if kind in ADAMW_STATE:
                deepspeed.set_flat(parameter, value, kind)
            else:
                deepspeed.set_step_count(optimizer, value)


def _initial_state(parameter: torch.nn.Parameter, keys: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The state that the optimizer creates at a parameter's first step."""
    state = {key: torch.zeros_like(parameter) for key in keys}
    if keys == ADAMW_STATE:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return state


def scaler_state(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> dict[str, float] | None:
    """The state of fp16's loss scaler, accelerate's or DeepSpeed's; None in other precisions."""
    if accelerator.scaler is not None:
        return accelerator.scaler.state_dict()
    if is_zero(accelerator) and (scaler := deepspeed.loss_scaler(accelerator, optimizer)):
        return {key: value for key, value in scaler.items() if type(value) in (int, float)}
    return None


def set_scaler_state(accelerator: Accelerator, optimizer: AcceleratedOptimizer, state: dict[str, float]) -> None:
    """Restore the loss scaler, if it is of the same kind as the saved one; else the scale is searched again."""
    if accelerator.scaler is not None and "scale" in state:
        accelerator.scaler.load_state_dict(state)
    elif is_zero(accelerator) and "cur_scale" in state and (scaler := deepspeed.loss_scaler(accelerator, optimizer)):
        scaler.update(state)


def reset_optimizer_state(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> None:
    """Reset the optimizer to its state before the first step."""
    if is_zero(accelerator):
        deepspeed.reset_state(optimizer)
    else:
        optimizer.state.clear()


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _collect(
    accelerator: Accelerator, model: torch.nn.Module, tensors: Iterator[tuple[str, torch.Tensor | None]]
) -> dict[str, torch.Tensor]:
    pipeline = pipeline_of(model)
    keep = pipeline.is_main_of_stage if pipeline else accelerator.is_main_process
    # only one full tensor at a time is on the device
    full = {name: cast(torch.Tensor, tensor).cpu() for name, tensor in tensors if keep}
    return pipeline.gather(full) if pipeline else full


def _broadcast(
    accelerator: Accelerator, whole: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    whole = torch.empty(shape, dtype=dtype) if whole is None else whole
    return cast(torch.Tensor, broadcast(whole.to(accelerator.device, dtype), from_process=0))


def _shard(
    accelerator: Accelerator,
    parameter: torch.Tensor,
    whole: torch.Tensor | None,
    shape: torch.Size,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The main process's tensor on this process's device, sharded like the parameter."""
    device = accelerator.device if parameter.is_meta else parameter.device
    whole = (torch.empty(shape, dtype=dtype) if whole is None else whole).to(device, dtype)
    if not (isinstance(parameter, DTensor) and whole.dim()):
        return cast(torch.Tensor, broadcast(whole, from_process=0))
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.size() == dist.get_world_size() and "tp" not in (mesh.mesh_dim_names or ()):
        return distribute_tensor(whole, mesh, placements)  # rank 0's data, scattered
    # Rank 0 is in the mesh of one pipeline stage only, or, of a tensor that is not split, of one tensor-parallel rank.
    # FSDP2 shards what tensor parallelism has split, so the last dimension of the mesh is cut first; distribute_tensor
    # could do it if all parts were equal.
    part = cast(torch.Tensor, broadcast(whole, from_process=0))
    for dim in reversed(range(mesh.ndim)):
        placement: Any = placements[dim]
        if not placement.is_replicate():
            size = -(-part.shape[placement.dim] // mesh.size(dim))
            start = min(size * mesh.get_local_rank(dim), part.shape[placement.dim])
            part = part.narrow(placement.dim, start, min(size, part.shape[placement.dim] - start))
    part = part.clone(memory_format=torch.contiguous_format)  # frees the whole; fused AdamW takes no strides
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
