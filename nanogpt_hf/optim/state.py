"""Optimizer state under names, and norms of gradients that may be sharded.

A DTensor is a tensor in parts, one on each process of a mesh. Parameters of one model may lie on
several meshes: tensor parallelism splits matrices and leaves norms whole.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor


class Item(NamedTuple):
    """A tensor or number of a parameter's state, and where it is."""

    container: Any  # dict or list
    key: Any
    value: Any

    @property
    def tensor(self) -> torch.Tensor:
        return self.value if torch.is_tensor(self.value) else torch.tensor(self.value)

    def set_number(self, tensor: torch.Tensor) -> None:
        # A number stays one of its type: a step count that is an int remains an int.
        self.container[self.key] = type(self.value)(tensor.item())


def state_items(state: Any, prefix: str = "") -> Iterator[tuple[str, Item]]:
    """Every tensor and number of a parameter's state with its name: keys and indices, joined by
    dots.

    Raises TypeError for anything else but None, which needs no place in a checkpoint.
    """
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        name = f"{prefix}{key}"
        # exp_avg, or factors.0 for the first of a list.
        if isinstance(value, torch.Tensor | bool | int | float):
            yield name, Item(state, key, value)
        elif isinstance(value, dict | list):
            yield from state_items(value, f"{name}.")
        elif value is not None:
            raise TypeError(
                f"optimizer state {name} is a {type(value).__name__}, which cannot be saved"
            )


def total_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Norm of all tensors as one vector, a scalar on the device. Shards count as the whole
    tensors.
    """
    # torch's function takes tensors of one mesh. The norm of a vector in parts is the norm of the
    # norms of its parts.
    norms = []
    for group in by_mesh(tensors).values():
        norms.append(full_tensor(torch.nn.utils.get_total_norm(group)))
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def clip_to_norm(parameters: list[torch.nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Clip the gradients, whose norm as one vector is `norm`, to `max_norm`; 0 clips nothing."""
    if not max_norm:
        return
    for mesh, group in by_mesh(parameters).items():
        whole = DTensor.from_local(norm, mesh, run_check=False) if mesh else norm
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, whole)


def by_mesh(tensors: list[Any]) -> dict[Any, list[Any]]:
    """Tensors by the mesh over which they are split; whole ones by None."""
    groups: dict[Any, list[Any]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(mesh, []).append(tensor)
    return groups


def full_tensor(tensor: Any) -> Any:
    """Gather a DTensor on all its processes, which call this; return anything else as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Part of a tensor that this process has: its shard of a DTensor, else all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
