"""Gather full weights and optimizer state of a prepared model, and load them, under any kind of sharding.

Tensors are whole on every process (one process, DDP), DTensors (FSDP2), or slices of DeepSpeed's flat buffers (ZeRO),
which also hold the float32 weights if the model is in bf16 or fp16. Gathered tensors are float32 and have our names, so
a run can be resumed under another kind of sharding. All functions are collectives: all processes call them.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, broadcast
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from nanogpt_hf.distributed.mesh import Mesh
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
    return dict(model.named_parameters())


def full_shape(parameter: torch.nn.Parameter) -> torch.Size:
    """The shape without sharding; ZeRO-3 replaces the parameter by an empty tensor."""
    return getattr(parameter, "ds_shape", parameter.shape)


def full_weights(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's full weights on the main process's CPU; {} on other processes."""
    parameters = named_parameters(accelerator, model)
    return _collect(accelerator, ((name, _full_weight(parameter)) for name, parameter in parameters.items()))


def full_optimizer_state(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer
) -> dict[str, torch.Tensor]:
    """The full optimizer state on the main process's CPU, as `<parameter>.<key>`; {} on other processes."""
    trained = {n: p for n, p in named_parameters(accelerator, model).items() if p.requires_grad}
    if _is_zero(accelerator):
        from deepspeed.utils import safe_get_full_optimizer_state

        steps = torch.as_tensor(next(_zero_states(optimizer))["step"], dtype=torch.float32)
        tensors = ((f"{n}.{k}", safe_get_full_optimizer_state(p, k)) for n, p in trained.items() for k in ADAMW_STATE)
        return _collect(accelerator, tensors) | ({f"{n}.step": steps.cpu().clone() for n in trained})
    check_optimizer_state(accelerator, model, optimizer)
    states = {name: optimizer.state[parameter] for name, parameter in trained.items()}
    tensors = ((f"{n}.{k}", _full(as_float32(v))) for n, state in states.items() for k, v in state.items())
    return _collect(accelerator, tensors)


def check_optimizer_state(accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer) -> None:
    """Raises UserError if the optimizer has state for some, but not all, of the trainable parameters.

    Something then replaced the others when the model was prepared; the new ones would neither train nor be saved.
    """
    if _is_zero(accelerator):  # DeepSpeed has one state for all, in flat buffers
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
    parameters = named_parameters(accelerator, model)
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
    for name, parameter in named_parameters(accelerator, model).items():
        with torch.no_grad():
            if not _is_zero(accelerator):
                value = _shard(parameter, weights.get(name), parameter.shape, parameter.dtype)
                parameter.copy_(value)
                continue
            import deepspeed

            value = _broadcast(accelerator, weights.get(name), full_shape(parameter), torch.float32)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(value)
            if parameter.requires_grad:
                _set_zero(accelerator, parameter, value)


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
    trained = {n: p for n, p in named_parameters(accelerator, model).items() if p.requires_grad}
    kinds = state_keys(optimizer, trained)
    for name, parameter in trained.items():
        keys = [key for key in layout if key.rpartition(".")[0] == name]
        if not _is_zero(accelerator):
            state = {key.rpartition(".")[2]: _shard(parameter, saved.get(key), *layout[key]) for key in keys}
            optimizer.state[parameter] = held_by(
                optimizer.optimizer, parameter, state or _initial_state(parameter, kinds[name])
            )
            continue
        for key in keys:
            value, kind = _broadcast(accelerator, saved.get(key), *layout[key]), key.rpartition(".")[2]
            if kind in ADAMW_STATE:
                _set_zero(accelerator, parameter, value, kind)
            else:
                for state in _zero_states(optimizer):
                    state["step"] = value.clone() if torch.is_tensor(state["step"]) else int(value)


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
    if _is_zero(accelerator) and accelerator.mixed_precision == "fp16":
        return {
            key: value
            for key, value in vars(cast(Any, optimizer.optimizer).loss_scaler).items()
            if type(value) in (int, float)
        }
    return None


def set_scaler_state(accelerator: Accelerator, optimizer: AcceleratedOptimizer, state: dict[str, float]) -> None:
    """Restore the loss scaler, if it is of the same kind as the saved one; else the scale is searched again."""
    if accelerator.scaler is not None and "scale" in state:
        accelerator.scaler.load_state_dict(state)
    elif accelerator.scaler is None and scaler_state(accelerator, optimizer) and "cur_scale" in state:
        vars(cast(Any, optimizer.optimizer).loss_scaler).update(state)


def reset_optimizer_state(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> None:
    """Reset the optimizer to its state before the first step."""
    if not _is_zero(accelerator):
        optimizer.state.clear()
        return
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    zero: Any = optimizer.optimizer
    for flat in _zero_flats(optimizer):  # created, not zeroed: a step that overflowed in fp16 has no state
        step = torch.zeros((), device=flat.device) if isinstance(zero.optimizer, torch.optim.AdamW) else 0
        zero.optimizer.state[flat] = {"step": step} | {key: torch.zeros_like(flat.data) for key in ADAMW_STATE}
    if hasattr(zero, "bit16_groups"):  # ZeRO-2: DeepSpeed 0.19 itself makes only the first group's moments accessible
        for group, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
            lazy_init_hp_params_optimizer_state(group, flat, zero.optimizer.state)


def _is_zero(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def _set_zero(accelerator: Accelerator, parameter: Any, value: torch.Tensor, key: str | None = None) -> None:
    """Copy this rank's part of a full float32 weight, or of its state `key`, into DeepSpeed's flat buffers."""
    if not hasattr(parameter, "ds_id"):
        parameter.set_full_hp_param(value, key)
        return
    # ZeRO-3's parts are of one size, padded at the end; DeepSpeed 0.19's own function for this forgets the padding
    size = parameter.ds_tensor.numel()
    mesh = Mesh.from_environment()
    padded = torch.nn.functional.pad(value.flatten(), (0, size * mesh.dp_size - value.numel()))
    part = padded.narrow(0, size * mesh.dp_rank, size)
    parameter._z3_optimizer.set_local_hp_param(part, parameter, key)


def _zero_flats(optimizer: AcceleratedOptimizer) -> list[torch.Tensor]:
    zero: Any = optimizer.optimizer
    by_stage = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
    return next(getattr(zero, name) for name in by_stage if hasattr(zero, name))


def _zero_states(optimizer: AcceleratedOptimizer) -> Iterator[dict]:
    return (cast(Any, optimizer.optimizer).optimizer.state[flat] for flat in _zero_flats(optimizer))


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _full_weight(parameter: torch.nn.Parameter) -> torch.Tensor:
    in_zero_3, in_zero_2 = hasattr(parameter, "ds_id"), hasattr(parameter, "_hp_mapping")
    if parameter.requires_grad and (in_zero_3 or in_zero_2):
        from deepspeed.utils import safe_get_full_fp32_param

        return cast(torch.Tensor, safe_get_full_fp32_param(parameter)).detach()
    if in_zero_3:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().float().clone()
    return _full(parameter)


def _collect(accelerator: Accelerator, tensors: Iterator[tuple[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
    # only one full tensor at a time is on the device
    return {name: cast(torch.Tensor, tensor).cpu() for name, tensor in tensors if accelerator.is_main_process}


def _broadcast(
    accelerator: Accelerator, whole: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
) -> torch.Tensor:
    whole = torch.empty(shape, dtype=dtype) if whole is None else whole
    return cast(torch.Tensor, broadcast(whole.to(accelerator.device, dtype), from_process=0))


def _shard(parameter: torch.Tensor, whole: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The main process's tensor on this process's device, sharded like the parameter."""
    whole = (torch.empty(shape, dtype=dtype) if whole is None else whole).to(parameter.device, dtype)
    if isinstance(parameter, DTensor) and whole.dim():
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)  # rank 0's data, scattered
    return cast(torch.Tensor, broadcast(whole, from_process=0))
