"""Optimizer state under names: the tensors and numbers that an optimizer keeps for a parameter."""

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
        self.container[self.key] = type(self.value)(tensor.item())


def state_items(state: Any, prefix: str = "") -> Iterator[tuple[str, Item]]:
    """Every tensor and number of a parameter's state with its name: keys and indices, joined by
    dots.

    Raises TypeError for anything else but None, which needs no place in a checkpoint.
    """
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor | bool | int | float):
            yield name, Item(state, key, value)
        elif isinstance(value, dict | list):
            yield from state_items(value, f"{name}.")
        elif value is not None:
            raise TypeError(
                f"optimizer state {name} is a {type(value).__name__}, which cannot be saved"
            )


def total_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The norm of all tensors as one vector, a scalar on the device; of shards, the norm of the
    whole tensors.
    """
    norms = [torch.nn.utils.get_total_norm(group) for group in by_mesh(tensors).values()]
    norms = [full_tensor(norm) for norm in norms]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def clip_to_norm(parameters: list[torch.nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Clip the gradients, whose norm as one vector is `norm`, to `max_norm` (0: not)."""
    for mesh, group in by_mesh(parameters).items() if max_norm else ():
        whole = DTensor.from_local(norm, mesh, run_check=False) if mesh else norm
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, whole)


def by_mesh(tensors: list[Any]) -> dict[Any, list[Any]]:
    """Tensors by the mesh over which they are split; None for those that are whole."""
    groups: dict[Any, list[Any]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(mesh, []).append(tensor)
    return groups


def full_tensor(tensor: Any) -> Any:
    """The whole of a DTensor, on all its processes, which call it; anything else as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process has: all of it, or a DTensor's."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
