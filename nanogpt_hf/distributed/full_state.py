"""Weights and optimizer state of a prepared model under any kind of sharding.

Tensors are whole on every process (one process, DDP), DTensors (FSDP2), or slices of flat
buffers (deepspeed.py). Saved tensors are float32 and have our names, so a run can be resumed
under another kind of sharding. All functions are collectives: all processes call them.
"""

import copy
import math
from collections.abc import Container, Iterator
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from nanogpt_hf.distributed import deepspeed
from nanogpt_hf.distributed.deepspeed import full_shape, is_zero
from nanogpt_hf.distributed.pipeline import pipeline_of
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.architecture import saved_buffers
from nanogpt_hf.optim.optimizer import set_learning_rate
from nanogpt_hf.optim.state import Item, full_tensor, local_part, state_items
from nanogpt_hf.runs.tensor_files import Box, Layout

Tensors = Iterator[tuple[str, Tensor]]


class SavedTensors(Protocol):
    """Tensors of a checkpoint. `read` may be a collective: all processes read in the same order."""

    layout: Layout

    def read(self, name: str, box: Box) -> Tensor:
        """A part of a tensor; all of it if the layout of processes splits none."""
        ...


def named_tensors(accelerator: Accelerator, model: Any) -> dict[str, Any]:
    """Parameters and saved buffers by name, as this process has them; without a tied head.

    Under FSDP2 these are the shards, as in the optimizer: evaluations leave some layers gathered.
    """
    model = cast(torch.nn.Module, accelerator.unwrap_model(model))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    if pipeline := pipeline_of(accelerator):
        return pipeline.named_tensors()
    return dict(model.named_parameters()) | saved_buffers(model)


def own_weights(accelerator: Accelerator, model: torch.nn.Module) -> Tensors:
    """The weights as this process has them: whole, or DTensors; ZeRO's gathered one by one."""
    for name, parameter in named_tensors(accelerator, model).items():
        yield name, deepspeed.full_weight(parameter) if is_zero(accelerator) else parameter.detach()


def full_weights(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's full weights on the main process's CPU; {} on other processes."""
    pipeline, full = pipeline_of(accelerator), {}
    for name, tensor in own_weights(accelerator, model):  # one whole tensor is on the device
        whole = full_tensor(tensor)
        if pipeline.is_main_of_stage if pipeline else accelerator.is_main_process:
            full[name] = whole.cpu()
    return pipeline.gather(full) if pipeline else full


def box_of(parameter: Tensor) -> Box:
    """The part of a parameter that this process has."""
    shape = list(full_shape(parameter))
    offset = [0] * len(shape)
    if isinstance(parameter, DTensor):
        # FSDP2 shards what tensor parallelism has split: the mesh's last dimension is cut first
        for dim, placement in reversed(list(enumerate(parameter.placements))):
            if not placement.is_replicate():
                cut = cast(Any, placement).dim
                size = -(-shape[cut] // parameter.device_mesh.size(dim))
                start = min(size * parameter.device_mesh.get_local_rank(dim), shape[cut])
                offset[cut] += start
                shape[cut] = min(size, shape[cut] - start)
        assert tuple(shape) == parameter.to_local().shape, f"not understood: {parameter.placements}"
    return Box(tuple(offset), tuple(shape))


class FullState:
    """Weights and optimizer state of a prepared model, to save and to load."""

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: AcceleratedOptimizer):
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.is_zero, self.parameters = is_zero(accelerator), named_tensors(accelerator, model)
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self._kind: Any = getattr(optimizer.optimizer, "kind", None)  # none of ZeRO

    def _items(self) -> dict[str, Item]:
        """The state that the optimizer has, as `<parameter>.<key>`; not under ZeRO."""
        return {
            f"{name}.{key}": item
            for name, parameter in self.trained.items()
            for key, item in state_items(self.optimizer.state.get(parameter, {}))
        }

    def own_optimizer_state(self) -> Tensors:
        """The optimizer state as `own_weights` has the weights, as checkpoints hold it, by name."""
        self.check()
        if self.is_zero:
            yield from deepspeed.full_state_tensors(self.trained, self.optimizer)
            return
        for name, item in self._items().items():
            yield name, self._kind.as_saved(item.tensor).detach()

    def owned_boxes(self) -> tuple[dict[str, Box], list[int]]:
        """The parts that this process saves, and the ranks that save any.

        Of processes that have the same part the lowest rank saves it. Under ZeRO all gather each
        tensor, and each saves about as many bytes of whole ones.
        """
        boxes = {name: box_of(parameter) for name, parameter in self.parameters.items()}
        owners: dict[tuple[str, Box], int] = {}
        if self.is_zero:
            loads = [0] * self.accelerator.num_processes
            sizes = {
                name: full_shape(p).numel() * (12 if p.requires_grad else 4)
                for name, p in self.parameters.items()
            }
            for name in sorted(sizes, key=lambda name: -sizes[name]):
                owners[name, boxes[name]] = rank = loads.index(min(loads))
                loads[rank] += sizes[name]
            for name, shape in deepspeed.state_shapes(self.trained).items():
                parameter = name.rpartition(".")[0]
                boxes[name] = Box((0,) * len(shape), tuple(shape))
                owners[name, boxes[name]] = owners[parameter, boxes[parameter]]
        else:
            boxes |= {name: box_of(item.tensor) for name, item in self._items().items()}
            for rank, others in enumerate(gather_object([boxes])):
                for item in others.items():
                    owners.setdefault(item, rank)
        rank = self.accelerator.process_index
        owned = {n: box for n, box in boxes.items() if owners[n, box] == rank and not box.is_empty}
        return owned, sorted({owner for (_, box), owner in owners.items() if not box.is_empty})

    def saved_bytes(self) -> int:
        """Bytes of the weights and optimizer state that this process saves, if in float32."""
        self.make_optimizer_state()
        owned, _ = self.owned_boxes()
        reset_optimizer_state(self.accelerator, self.optimizer)
        return sum(4 * math.prod(box.shape) for box in owned.values())

    def check(self) -> None:
        """Raises UserError if the optimizer has state for some of the trainable parameters only.

        The others were then replaced when the model was prepared, and would not train.
        """
        if self.is_zero:  # DeepSpeed has one state for all, in flat buffers
            return
        without = [name for name, p in self.trained.items() if not self.optimizer.state.get(p)]
        if without and len(without) < len(self.trained):
            raise UserError(
                f"{len(without)} of {len(self.trained)} parameters that should train, first "
                f"{without[0]}, are unknown to the optimizer after a step: this accelerate config "
                "prepares the model in a way that is not supported"
            )

    def first_mismatch(self, weights: Layout, optimizer_state: Layout) -> str | None:
        """The first saved weight or state whose name or shape differs from the model's, or None.

        A parameter without any saved optimizer state may have just been unfrozen. The state of
        other pipeline stages is compared there.
        """
        pipeline, here = pipeline_of(self.accelerator), self.trained
        own = {name: full_shape(parameter) for name, parameter in self.parameters.items()}
        shapes = pipeline.shapes if pipeline else own
        elsewhere = shapes.keys() - here.keys()
        saved_state = {n: s for n, s in optimizer_state.items() if not _parameter_of(n, elsewhere)}
        with_state = {_parameter_of(name, here) for name in saved_state}
        if self.is_zero:
            state = deepspeed.state_shapes(here)
        else:
            state = {name: item.tensor.shape for name, item in self._items().items()}
        state = {n: shape for n, shape in state.items() if _parameter_of(n, here) in with_state}
        for saved, needed in ((weights, shapes), (saved_state, state)):
            kind = "weight" if saved is weights else "optimizer state"
            for name in sorted(saved.keys() | needed.keys()):
                shape = saved[name][0] if name in saved else "missing"
                if shape != needed.get(name):
                    return f"{kind} {name} is {shape} instead of {needed.get(name)}"
        return None

    def set_weights(self, saved: SavedTensors) -> None:
        """Load saved weights into the model."""
        for name in saved.layout:
            if (parameter := self.parameters.get(name)) is None:  # on another pipeline stage
                continue
            value = saved.read(name, box_of(parameter))
            with torch.no_grad():
                if self.is_zero:
                    value = value.to(self.accelerator.device, torch.float32)
                    deepspeed.set_weight(parameter, value)
                else:
                    local_part(parameter).copy_(value)

    def set_optimizer_state(self, saved: SavedTensors) -> None:
        """Load saved optimizer state into the optimizer's own.

        A trainable parameter that has none was just unfrozen: the optimizer makes its state when
        it steps.
        """
        items, fresh = {} if self.is_zero else self._items(), set(self.trained)
        for name in saved.layout:
            if self.is_zero:
                owner, _, key = name.rpartition(".")
                parameter = self.trained[owner]
                value = saved.read(name, Box((), ()) if key == "step" else box_of(parameter))
                value = value.to(self.accelerator.device)
                deepspeed.set_state(self.optimizer, parameter, key, value)
            elif item := items.get(name):
                value = saved.read(name, box_of(item.tensor))
                fresh.discard(cast(str, _parameter_of(name, self.trained)))
                if torch.is_tensor(item.value):
                    local = local_part(item.value)
                    self._kind.restore(local, value.to(local.device))
                else:
                    item.set_number(value)
        for name in () if self.is_zero else fresh:
            self.optimizer.state.pop(self.trained[name], None)

    def make_optimizer_state(self) -> None:
        """Make the state that the optimizer's first step makes, into which a checkpoint is loaded.

        It takes a step with gradients of zero at learning rate 0, unless there is state already.
        """
        groups, optimizer = self.optimizer.param_groups, self.optimizer.optimizer
        parameters = [p for group in groups for p in group["params"]]
        if self.is_zero or all(self.optimizer.state.get(p) for p in parameters):
            return
        rates = [copy.copy(group["lr"]) for group in groups]
        set_learning_rate(optimizer, 0.0)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def reset_optimizer_state(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> None:
    """Reset the optimizer to its state before the first step."""
    if is_zero(accelerator):
        deepspeed.reset_state(optimizer)
    else:
        optimizer.state.clear()


def scaler_state(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> Any:
    """The state of fp16's loss scaler, accelerate's or DeepSpeed's; None in other precisions."""
    if accelerator.scaler is not None:
        return accelerator.scaler.state_dict()
    if is_zero(accelerator) and (scaler := deepspeed.loss_scaler(accelerator, optimizer)):
        return {key: value for key, value in scaler.items() if type(value) in (int, float)}
    return None


def set_scaler_state(accelerator: Accelerator, optimizer: AcceleratedOptimizer, saved: Any) -> None:
    """Restore the loss scaler, if it is of the saved one's kind; else the scale is searched."""
    scaler = is_zero(accelerator) and deepspeed.loss_scaler(accelerator, optimizer)
    if accelerator.scaler is not None and "scale" in saved:
        accelerator.scaler.load_state_dict(saved)
    elif scaler and "cur_scale" in saved:
        scaler.update(saved)


def _parameter_of(name: str, parameters: Container[str]) -> str | None:
    """The parameter to which the state of this name belongs; None if it is none of `parameters`."""
    while name:
        name = name.rpartition(".")[0]
        if name in parameters:
            return name
    return None
