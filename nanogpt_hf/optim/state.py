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


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process has: all of it, or a DTensor's."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
