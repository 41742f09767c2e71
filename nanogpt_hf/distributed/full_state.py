"""Weights and optimizer state of a prepared model under any kind of sharding.

A checkpoint is independent of the layout that wrote it: its tensors are float32, have the names of
the whole model, and state which part of the whole tensor they are (a `Box`: offset and shape). A
process has a tensor in one of three forms:

    whole on every process (one process, DDP)      one process saves it
    a DTensor (FSDP2, tensor parallelism, experts) each process saves its box; of copies one does
    a slice of a flat buffer (ZeRO, deepspeed.py)  gathered one by one, each saved by one process

To load, each process reads the boxes that it has, which may lie across several saved ones. So a run
can be resumed under another kind of sharding, and on another number of processes. All functions are
collectives: all processes call them.
"""

import math
from collections.abc import Iterator
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
    """Iterate over the weights as this process has them: whole, or DTensors; ZeRO's gathered one by
    one.
    """
    for name, parameter in named_tensors(accelerator, model).items():
        yield name, deepspeed.full_weight(parameter) if is_zero(accelerator) else parameter.detach()


def full_weights(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, Tensor]:
    """Gather the model's full weights on the main process's CPU; {} on other processes."""
    pipeline = pipeline_of(accelerator)
    keeps = pipeline.is_main_of_stage if pipeline else accelerator.is_main_process
    full = {}
    # One after another, so that a device needs memory for one whole tensor only.
    for name, tensor in own_weights(accelerator, model):
        whole = full_tensor(tensor)
        if keeps:
            full[name] = whole.cpu()
    return pipeline.gather(full) if pipeline else full


def _described(facts: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    if facts is None:
        return "missing"
    return f"{tuple(facts[0])} {str(facts[1]).removeprefix('torch.')}"


def box_of(parameter: Tensor) -> Box:
    """Part of a parameter that this process has."""
    if isinstance(parameter, DTensor):
        # torch's own checkpoints ask this, too. It knows uneven shards and several dimensions.
        (chunk,) = parameter.__create_chunk_list__()
        return Box(tuple(chunk.offsets), tuple(chunk.sizes))
    shape = full_shape(parameter)
    return Box((0,) * len(shape), tuple(shape))


class FullState:
    """Weights and optimizer state of a prepared model, to save and to load."""

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: AcceleratedOptimizer):
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.is_zero = is_zero(accelerator)
        self.parameters = named_tensors(accelerator, model)
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        # the row of OPTIMIZERS; DeepSpeed's optimizer is none of them
        self._kind: Any = getattr(optimizer.optimizer, "kind", None)

    def _items_of(self, name: str) -> dict[str, Item]:
        """Optimizer state of a parameter, as `<parameter>.<key>`; not under ZeRO."""
        state = self.optimizer.state.get(self.trained[name], {})
        return {f"{name}.{key}": item for key, item in state_items(state)}

    def _items(self) -> dict[str, Item]:
        """Optimizer state of all parameters; not under ZeRO."""
        return {key: item for name in self.trained for key, item in self._items_of(name).items()}

    def _as_saved(self, item: Item) -> Tensor:
        """Optimizer state as checkpoints hold it: 8-bit state is decoded."""
        return cast(Tensor, self._kind.as_saved(item.tensor)).detach()

    def own_optimizer_state(self) -> Tensors:
        """Iterate over the optimizer state as `own_weights` does over the weights; 8-bit state is
        decoded, as in checkpoints.
        """
        if self.is_zero:
            yield from deepspeed.full_state_tensors(self.trained, self.optimizer)
            return
        for name, item in self._items().items():
            yield name, self._as_saved(item)

    def owned_boxes(self) -> tuple[dict[str, Box], list[int]]:
        """Choose the parts that this process saves, and the ranks that save any.

        Of processes that have the same part the lowest rank saves it. Under ZeRO all gather each
        tensor, and each saves about as many bytes of whole ones.
        """
        boxes = {name: box_of(parameter) for name, parameter in self.parameters.items()}
        if self.is_zero:
            owners = self._balanced_owners(boxes)
        else:
            boxes |= {name: box_of(item.tensor) for name, item in self._items().items()}
            owners: dict[tuple[str, Box], int] = {}
            for rank, others in enumerate(gather_object([boxes])):
                for item in others.items():
                    owners.setdefault(item, rank)
        rank = self.accelerator.process_index
        # A small tensor over many processes leaves empty shards.
        owned = {n: box for n, box in boxes.items() if owners[n, box] == rank and not box.is_empty}
        return owned, sorted({owner for (_, box), owner in owners.items() if not box.is_empty})

    def _balanced_owners(self, boxes: dict[str, Box]) -> dict[tuple[str, Box], int]:
        """Choose the rank that saves each whole tensor under ZeRO; add the optimizer state to
        `boxes`.
        """
        owners: dict[tuple[str, Box], int] = {}
        loads = [0] * self.accelerator.num_processes
        sizes = {name: math.prod(box.shape) for name, box in boxes.items()}
        # Largest first, each to the rank with the least so far: at most 4/3 of a perfect balance
        # (Graham 1969).
        for name in sorted(sizes, key=lambda name: -sizes[name]):
            rank = loads.index(min(loads))
            owners[name, boxes[name]] = rank
            loads[rank] += sizes[name]
        for name in self.trained:
            for key in (*deepspeed.ADAMW_STATE, "step"):
                box = Box((), ()) if key == "step" else boxes[name]
                boxes[f"{name}.{key}"] = box
                owners[f"{name}.{key}", box] = owners[name, boxes[name]]
        return owners

    def _layouts(self) -> tuple[Layout, Layout, dict[str, str]]:
        """Names, shapes and dtypes of the weights and of the optimizer state in a checkpoint of the
        whole model, and the parameter that each state belongs to.
        """
        weights = {n: (tuple(full_shape(p)), p.dtype) for n, p in self.parameters.items()}
        state: Layout = {}
        owners: dict[str, str] = {}
        for name in self.trained:
            if self.is_zero:
                # ZeRO keeps float32 weights, also if it computes in 16 bits.
                shape = weights[name][0]
                dtype = torch.float32
                weights[name] = shape, dtype
                own = {f"{name}.{key}": (shape, dtype) for key in deepspeed.ADAMW_STATE}
                own[f"{name}.step"] = (), dtype
            else:
                items = self._items_of(name).items()
                own = {n: (tuple(i.tensor.shape), self._as_saved(i).dtype) for n, i in items}
            state |= own
            owners |= dict.fromkeys(own, name)
        if pipeline_of(self.accelerator):
            # Each stage has the names of its own layers.
            for other in gather_object([(weights, state, owners)]):
                for ours, theirs in zip((weights, state, owners), other, strict=True):
                    ours.update(theirs)
        return weights, state, owners

    def first_mismatch(self, weights: Layout, optimizer_state: Layout) -> str | None:
        """Find the first saved weight or state whose name, shape or dtype is not the model's; a
        collective.

        A parameter has all of its state or none: it is made when the optimizer first steps with
        its gradient. Which ones had none is in the layout that a checkpoint records.
        """
        needed, state, owners = self._layouts()
        with_state = {owners[name] for name in state.keys() & optimizer_state.keys()}
        state = {name: facts for name, facts in state.items() if owners[name] in with_state}
        trained = set(owners.values())
        for kind, saved, model in (
            ("weight", weights, needed),
            ("optimizer state", optimizer_state, state),
        ):
            for name in sorted(saved.keys() | model.keys()):
                here = saved.get(name)
                there = model.get(name)
                # ZeRO-2 saves frozen weights in the precision of the computation
                frozen = kind == "weight" and name not in trained
                if frozen and here and there and here[1].is_floating_point:
                    here = here[0], there[1] if there[1].is_floating_point else here[1]
                if here != there:
                    return f"{kind} {name} is {_described(here)} instead of {_described(there)}"
        return None

    def set_weights(self, saved: SavedTensors) -> None:
        """Load saved weights into the model."""
        for name, parameter in self.parameters.items():
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
        if self.is_zero:
            for name in saved.layout:
                owner, _, key = name.rpartition(".")
                parameter = self.trained[owner]
                value = saved.read(name, Box((), ()) if key == "step" else box_of(parameter))
                value = value.to(self.accelerator.device)
                deepspeed.set_state(self.optimizer, parameter, key, value)
            return
        for owner, parameter in self.trained.items():
            items = self._items_of(owner)
            if not items.keys() & saved.layout.keys():
                # It was just unfrozen. It must not keep the state of `make_optimizer_state`, which
                # has counted a step.
                self.optimizer.state.pop(parameter, None)
                continue
            for name, item in items.items():
                value = saved.read(name, box_of(item.tensor))
                if torch.is_tensor(item.value):
                    # the row of the optimizer encodes 8-bit state again
                    local = local_part(item.value)
                    self._kind.restore(local, value.to(local.device))
                else:
                    item.set_number(value)

    def make_optimizer_state(self) -> None:
        """Make the state that the optimizer's first step makes, into which a checkpoint is loaded.

        It takes a step with gradients of zero at learning rate 0, unless there is state already.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.is_zero or all(self.optimizer.state.get(p) for p in parameters):
            return
        # The next step sets its own rate. At rate 0 also weight decay changes nothing.
        set_learning_rate(self.optimizer.optimizer, 0.0)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.optimizer.step()
        self.optimizer.zero_grad()


def reset_optimizer_state(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> None:
    """Reset the optimizer to its state before the first step."""
    if is_zero(accelerator):
        deepspeed.reset_state(optimizer)
    else:
        optimizer.state.clear()
