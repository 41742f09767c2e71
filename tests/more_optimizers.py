"""Two optimizers as rows of the tests' own: what a new optimizer needs is its code and two rows.

`SignMomentum` (Lion) has one state tensor. `RotatedAdam` (SOAP) has square factors, an eigenbasis
and second moments in it, which every process has whole, in nested lists and dicts, and a step count
that is a number. Their rows begin with `test_`, so that a row of the package may have the paper's
name.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch.distributed.tensor import DTensor

from nanogpt_hf.config import optimizers
from nanogpt_hf.config.schema import KNOBS
from nanogpt_hf.optim.optimizer import OPTIMIZERS, OptimizerKind


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class SignMomentum(torch.optim.Optimizer):
    """Lion: Chen et al. 2023, arXiv:2302.06675."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = local(state["momentum"])
                gradient = local(p.grad)
                update = torch.lerp(gradient, momentum, 0.9).sign()
                local(p).mul_(1 - group["lr"] * group["weight_decay"]).add_(
                    update, alpha=-group["lr"]
                )
                momentum.lerp_(gradient, 0.01)


class RotatedAdam(torch.optim.Optimizer):
    """SOAP: Vyas et al. 2024, arXiv:2409.11321, with a new eigenbasis at each step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                update = self.update(self.state[p], gradient)
                if isinstance(p, DTensor):
                    rows = p.device_mesh.get_local_rank() * -(-len(p) // p.device_mesh.size())
                    update = update[rows : rows + len(local(p))]
                local(p).mul_(1 - group["lr"] * group["weight_decay"]).add_(
                    update, alpha=-group["lr"]
                )

    def update(self, state, gradient):
        if not state:
            state["step"] = 0
            state["mean"] = torch.zeros_like(gradient)
            state["square"] = {"rotated": torch.zeros_like(gradient)}
            state["factors"] = [gradient.new_zeros(n, n) for n in gradient.shape]
            state["basis"] = [torch.eye(n) for n in gradient.shape]
        state["step"] += 1
        state["mean"].lerp_(gradient, 0.1)
        rotated = gradient
        for dim, (factor, basis) in enumerate(zip(state["factors"], state["basis"], strict=True)):
            flat = gradient.movedim(dim, 0).reshape(gradient.shape[dim], -1)
            factor.lerp_(flat @ flat.T, 0.05)
            rotated = torch.tensordot(rotated, basis, ([0], [0]))
            basis.copy_(
                torch.linalg.eigh(factor.double() + 1e-12 * torch.eye(len(factor))).eigenvectors
            )
        square = state["square"]["rotated"].lerp_(rotated.square(), 0.05)
        update = state["mean"] / state["step"]
        for basis in state["basis"]:
            update = torch.tensordot(update, basis, ([0], [0]))
        update = update / (square.sqrt() + 1e-8)
        for basis in state["basis"]:
            update = torch.tensordot(update, basis, ([0], [1]))
        return update


# Name of the row: class and bytes of state per parameter.
ROWS: dict[str, tuple[type[torch.optim.Optimizer], int]] = {
    "test_sign_momentum": (SignMomentum, 4),
    "test_rotated_adam": (RotatedAdam, 16),
}


def add_rows() -> None:
    """Add the rows to the package's tables, and their names to the choices of optim.name.

    Raises ValueError if the package has one of the names: the test would try its own optimizer
    instead.
    """
    taken = ROWS.keys() & optimizers.OPTIMIZERS.keys()
    if taken:
        raise ValueError(f"the package has an optimizer of this name: {', '.join(sorted(taken))}")
    for name, (kind, state_bytes) in ROWS.items():
        optimizers.OPTIMIZERS[name] = optimizers.OptimizerChoice(f"{name}, of the tests")
        OPTIMIZERS[name, "float32"] = OptimizerKind(
            build=lambda model, groups, optim, accelerator, kind=kind: kind(
                groups, {"lr": optim.learning_rate}
            ),
            describe=lambda optim, name=name: name,
            state_bytes=lambda model, shards, each=state_bytes: (
                each * model.num_parameters() / shards
            ),
        )
    choices = Literal[tuple(optimizers.OPTIMIZERS)]  # pyright: ignore[reportInvalidTypeForm]
    KNOBS["optim.name"] = replace(KNOBS["optim.name"], kind=choices)
