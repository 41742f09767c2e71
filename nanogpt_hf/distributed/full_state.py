"""Weights and optimizer state of a prepared model under any kind of sharding: this rank's parts, full, and to load.

Tensors are whole on every process (one process, DDP), DTensors (FSDP2), or slices of flat buffers (deepspeed.py).
Saved tensors are float32 and have our names, so a run can be resumed under another kind of sharding. All functions
are collectives: all processes call them.
"""

import copy
import math
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nanogpt_hf.distributed import deepspeed
from nanogpt_hf.distributed.deepspeed import full_shape, is_zero
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.distributed.pipeline import pipeline_of
from nanogpt_hf.errors import UserError
from nanogpt_hf.optim.optimizer import OptimizerKind, set_learning_rate
from nanogpt_hf.optim.state import Item, state_items
from nanogpt_hf.runs.tensor_files import Box

Tensors = Iterator[tuple[str, torch.Tensor]]
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape, dtype
Fetch = Callable[[str, Box | None], torch.Tensor | None]  # the part of a saved tensor; without a box None


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
    pipeline = pipeline_of(model)
    keep = pipeline.is_main_of_stage if pipeline else accelerator.is_main_process
    # only one full tensor at a time is on the device
    tensors = ((name, _full(tensor)) for name, tensor in held_weights(accelerator, model))
    full = {name: tensor.cpu() for name, tensor in tensors if keep}
    return pipeline.gather(full) if pipeline else full


def held_weights(accelerator: Accelerator, model: torch.nn.Module) -> Tensors:
    """The weights as this process has them: whole, or DTensors; ZeRO's are gathered, one after another."""
    for name, parameter in named_parameters(accelerator, model).items():
        yield name, deepspeed.full_weight(parameter) if is_zero(accelerator) else parameter.detach()


def held_optimizer_state(accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer) -> Tensors:
    """The optimizer state as `held_weights` has the weights, as checkpoints hold it, by name."""
    check_optimizer_state(accelerator, model, optimizer)
    if is_zero(accelerator):
        yield from deepspeed.full_state_tensors(_trained(accelerator, model), optimizer)
        return
    for name, item in _state(accelerator, model, optimizer).items():
        yield name, _kind(optimizer).as_saved(item.tensor).detach()


def _kind(optimizer: AcceleratedOptimizer) -> OptimizerKind:
    return cast(Any, optimizer.optimizer).kind


def _trained(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in named_parameters(accelerator, model).items() if p.requires_grad}


def _state(accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer) -> dict[str, Item]:
    """The state that the optimizer has, as `<parameter>.<key>`; not under ZeRO."""
    return {
        f"{name}.{key}": item
        for name, parameter in _trained(accelerator, model).items()
        for key, item in state_items(optimizer.state.get(parameter, {}))
    }


def _parameter_of(name: str, parameters: Container[str]) -> str | None:
    """The parameter to which the state of this name belongs; None if it is none of `parameters`."""
    while name:
        name = name.rpartition(".")[0]
        if name in parameters:
            return name
    return None


def box_of(parameter: torch.Tensor) -> Box:
    """The part of a parameter that this process has."""
    shape = list(full_shape(parameter))
    offset = [0] * len(shape)
    if isinstance(parameter, DTensor):
        # FSDP2 shards what tensor parallelism has split, so the last dimension of the mesh is cut first
        for dim, placement in reversed(list(enumerate(parameter.placements))):
            if not placement.is_replicate():
                cut = cast(Any, placement).dim
                size = -(-shape[cut] // parameter.device_mesh.size(dim))
                start = min(size * parameter.device_mesh.get_local_rank(dim), shape[cut])
                offset[cut] += start
                shape[cut] = min(size, shape[cut] - start)
        assert tuple(shape) == parameter.to_local().shape, f"{parameter.placements} is not understood"
    return Box(tuple(offset), tuple(shape))


def owned_boxes(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer
) -> tuple[dict[str, Box], list[int]]:
    """The parts of weights and optimizer state that this process saves, and the ranks that save any.

    Of processes that have the same part the lowest rank saves it. Under ZeRO all gather each tensor,
    and each saves about as many bytes of whole ones.
    """
    parameters, mesh = named_parameters(accelerator, model), Mesh.from_environment()
    boxes = {name: box_of(parameter) for name, parameter in parameters.items()}
    owners: dict[tuple[str, Box], int] = {}
    if is_zero(accelerator):
        loads = [0] * mesh.world_size
        state = deepspeed.state_shapes(_trained(accelerator, model))
        sizes = {n: full_shape(p).numel() * (12 if p.requires_grad else 4) for n, p in parameters.items()}
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            owners[name, boxes[name]] = rank = loads.index(min(loads))
            loads[rank] += sizes[name]
        for name, shape in state.items():
            parameter = name.rpartition(".")[0]
            boxes[name] = Box((0,) * len(shape), tuple(shape))
            owners[name, boxes[name]] = owners[parameter, boxes[parameter]]
    else:
        items = _state(accelerator, model, optimizer)
        boxes |= {name: box_of(item.tensor) for name, item in items.items()}
        for rank, held in enumerate(gather_object([boxes])):
            for item in held.items():
                owners.setdefault(item, rank)
    owned = {name: box for name, box in boxes.items() if owners[name, box] == mesh.rank and not box.is_empty}
    return owned, sorted({owner for (_, box), owner in owners.items() if not box.is_empty})


def saved_bytes(accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer) -> int:
    """Bytes of the weights and optimizer state that this process saves, if they are float32."""
    make_optimizer_state(accelerator, optimizer)
    owned, _ = owned_boxes(accelerator, model, optimizer)
    reset_optimizer_state(accelerator, optimizer)
    return sum(4 * math.prod(box.shape) for box in owned.values())


def check_optimizer_state(accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer) -> None:
    """Raises UserError if the optimizer has state for some, but not all, of the trainable parameters.

    Something then replaced the others when the model was prepared; the new ones would neither train nor be saved.
    """
    if is_zero(accelerator):  # DeepSpeed has one state for all, in flat buffers
        return
    trained = _trained(accelerator, model)
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
    weights: Layout,
    optimizer_state: Layout,
) -> str | None:
    """The first name, shape or dtype in which saved weights and optimizer state differ from the model's.

    None if all are equal. A parameter without any saved optimizer state may have just been unfrozen.
    The state of other pipeline stages is compared there.
    """
    parameters = _parameters_of_all_stages(accelerator, model)
    here = _trained(accelerator, model)
    elsewhere = {n for n, p in parameters.items() if p.requires_grad} - here.keys()
    saved_state = {n: found for n, found in optimizer_state.items() if not _parameter_of(n, elsewhere)}
    with_state = {_parameter_of(name, here) for name in saved_state}
    if is_zero(accelerator):
        shapes = deepspeed.state_shapes(here)
        needed_state = {name: (shape, torch.float32) for name, shape in shapes.items()}
    else:
        as_saved, items = _kind(optimizer).as_saved, _state(accelerator, model, optimizer)
        held = ((name, as_saved(item.tensor)) for name, item in items.items())
        needed_state = {name: (tensor.shape, tensor.dtype) for name, tensor in held}
    needed_state = {n: s for n, s in needed_state.items() if _parameter_of(n, here) in with_state}
    needed_weights = {name: (full_shape(p), p.dtype) for name, p in parameters.items()}
    for kind, saved, needed in (
        ("weight", weights, needed_weights),
        ("optimizer state", saved_state, needed_state),
    ):
        if odd := sorted(saved.keys() ^ needed.keys()):
            return f"{kind} {odd[0]} is {'missing' if odd[0] in needed else 'not in this model'}"
        for name, (shape, dtype) in needed.items():
            dtypes = {dtype} | ({torch.float32} if dtype.is_floating_point else set())
            if saved[name][0] != tuple(shape) or saved[name][1] not in dtypes:
                found, wanted = (f"{tuple(s)} {d}".replace("torch.", "") for s, d in (saved[name], (shape, dtype)))
                return f"{kind} {name} is {found} instead of {wanted}"
    return None


def set_weights(accelerator: Accelerator, model: torch.nn.Module, names: Iterable[str], fetch: Fetch) -> None:
    """Load the saved weights `names`, the same on all processes, into the model."""
    parameters = named_parameters(accelerator, model)
    for name in names:
        parameter = parameters.get(name)
        value = fetch(name, None if parameter is None else box_of(parameter))
        if parameter is None or value is None:
            continue
        with torch.no_grad():
            if is_zero(accelerator):
                deepspeed.set_weight(parameter, value.to(accelerator.device, torch.float32))
            else:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                local.copy_(value)


def make_optimizer_state(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> None:
    """Make the state that the optimizer's first step makes, into which a checkpoint is then loaded.

    It takes a step with gradients of zero at learning rate 0, unless the optimizer has state already.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if is_zero(accelerator) or all(optimizer.state.get(p) for p in parameters):
        return
    rates = [copy.copy(group["lr"]) for group in optimizer.param_groups]
    set_learning_rate(optimizer.optimizer, 0.0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.optimizer.step()
    optimizer.optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def set_optimizer_state(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    names: Iterable[str],
    fetch: Fetch,
) -> None:
    """Load the saved optimizer state `names`, the same on all processes, into the optimizer's own.

    A trainable parameter that has none was just unfrozen: the optimizer makes its state when it steps.
    """
    trained = _trained(accelerator, model)
    if is_zero(accelerator):
        for name in names:
            parameter, key = trained[name.rpartition(".")[0]], name.rpartition(".")[2]
            value = cast(torch.Tensor, fetch(name, Box((), ()) if key == "step" else box_of(parameter)))
            deepspeed.set_state(optimizer, parameter, key, value.to(accelerator.device))
        return
    items = _state(accelerator, model, optimizer)
    fresh = set(trained)
    for name in names:  # in their order, since `fetch` may be a collective
        item = items.get(name)
        value = fetch(name, None if item is None else box_of(item.tensor))
        if item is None or value is None:
            continue
        fresh.discard(cast(str, _parameter_of(name, trained)))
        if torch.is_tensor(item.value):
            held = item.value.to_local() if isinstance(item.value, DTensor) else item.value
            _kind(optimizer).restore(held, value.to(held.device))
        else:
            item.set_number(value)
    for name in fresh:
        optimizer.state.pop(trained[name], None)


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
