"""Sum the gradient of a step in a fixed order: the same bytes on any number of processes.

Floating-point sums depend on their order: (a + b) + c and a + (b + c) differ in the last bits. The
ring of an all-reduce has another order for each number of processes. Here the micro-batches of a
step belong to a fixed number of groups, a power of two. A group's gradient is a sum in order, and
the step's is a binary tree over the groups. For 8 groups:

                     g0 g1   g2 g3   g4 g5   g6 g7
    1 process        (((g0+g1) + (g2+g3)) + ((g4+g5) + (g6+g7)))
    2 processes      process 0: (g0+g1) + (g2+g3), process 1: (g4+g5) + (g6+g7); then their sum
    4 processes      process i: a pair; then two levels over the processes

A process of whole models (DDP's layout) has a whole branch of the tree. Then the processes exchange
slices of their sums, add them up the rest of the tree, and gather: as many bytes as a ring sends.
Processes with shards (FSDP2, HSDP) take groups in turn, and each reduce-scatter is a branch.

Nothing else of a step may depend on the shards: the norm adds up rows (`norm_by_rows`), and AdamW
is not fused, since the fused kernel rounds the last values of a tensor, fewer than a vector, in
another way.
"""

import dataclasses
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from nanogpt_hf.distributed.full_state import box_of
from nanogpt_hf.optim.state import local_part

# torch 2.13 has renamed it, and warns of the old name.
_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class GradientTree:
    """Sums gradients and losses of the micro-batches of a step, of `per_group` micro-batches first.

    Keeps one gradient, or shard of it, per level of its branch of the tree.
    """

    def __init__(
        self, model: torch.nn.Module, parameters: list[torch.nn.Parameter], per_group: int
    ):
        self.model = model
        self.parameters = parameters
        self.per_group = per_group
        # Sums of whole branches, the largest first: as the ones in the binary number of groups so
        # far. After 3 groups they are g0 + g1 and g2.
        self._branches: list[Tensor] = []
        self._losses: list[Tensor] = []

    def before_backward(self) -> None:
        """Let FSDP2 reduce-scatter the gradients if the next micro-batch ends a group."""
        if isinstance(self.model, FSDPModule):
            ends_group = (len(self._losses) + 1) % self.per_group == 0
            self.model.set_requires_gradient_sync(ends_group)

    def add(self, loss: Tensor) -> None:
        """Add the loss of the next micro-batch, and the gradients of its backward pass."""
        self._losses.append(loss)
        # Within a group autograd adds up the gradients of its micro-batches in order.
        group, rest = divmod(len(self._losses), self.per_group)
        if rest:
            return
        # One vector of all gradients and the loss: it is summed, sent and gathered at once.
        self.parameters = [p for p in self.parameters if p.grad is not None]
        gradients = [local_part(p.grad).flatten() for p in self.parameters if p.grad is not None]
        loss_sum = torch.stack(self._losses[-self.per_group :]).sum(0, True)
        if isinstance(self.model, FSDPModule):
            # FSDP2's reduce-scatter has summed the gradients over the processes already.
            loss_sum = sum_over_branches(loss_sum)
        total = torch.cat([*gradients, loss_sum])
        # As a carry when 1 is added to a binary number: each 0 at the end of the number of groups
        # is a branch that is whole with this one.
        while group % 2 == 0:
            total = self._branches.pop().add_(total)
            group //= 2
        self._branches.append(total)
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> Tensor:
        """Give the parameters the gradient of the step; return its loss. All processes call it."""
        # The number of groups is a power of two: one branch is left, the whole tree.
        (total,) = self._branches
        if not isinstance(self.model, FSDPModule):
            total = sum_over_branches(total)
        sizes = [local_part(parameter).numel() for parameter in self.parameters]
        *gradients, loss = total.split([*sizes, 1])
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = _laid_out_as(parameter, gradient)
        return loss[0]


def fix_order(model: torch.nn.Module, optimizer: Any) -> None:
    """Make the gradients' sums and the updates of a prepared model the same on any shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(cast(Any, _TreeReduceScatter(_copies_of(model))))
            # sums, not means: a division would round, at another place for other processes
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"] = False
            group["foreach"] = True
            # only the fused kernel reads on the device whether a gradient is finite
            optimizer.kind = dataclasses.replace(optimizer.kind, reads_found_inf=False)


def _copies_of(model: torch.nn.Module) -> dist.ProcessGroup | None:
    """Group of the processes that have this one's shards, too (HSDP)."""
    mesh = cast(DTensor, next(model.parameters())).device_mesh
    return mesh.get_group(0) if mesh.ndim > 1 else None


class _TreeReduceScatter:
    """Replaces FSDP2's reduce-scatter (its interface `ReduceScatter`): the sum is the tree.

    FSDP2 then all-reduces over the copies of HSDP. Each has added up its slice of the shard before:
    that sum is exact, since all others have -0.0 there.
    """

    def __init__(self, copies: dist.ProcessGroup | None):
        self.copies = copies

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        own = _own_sum(input_tensor.view(group.size(), -1), group)
        if self.copies:
            # Another level of the tree, over the copies. x + -0.0 is x for every x, also for -0.0,
            # so FSDP2's all-reduce over the copies adds nothing to a slice and fills the others.
            slices = _slices(own, self.copies.size())
            whole = torch.full_like(slices, -0.0)
            whole[self.copies.rank()] = _own_sum(slices, self.copies)
            own = whole.view(-1)[: len(own)]
        output_tensor.copy_(own)


def sum_over_branches(own: Tensor) -> Tensor:
    """Sum a 1-D tensor over all processes, a power of two, by the tree; all of them get it."""
    if not dist.is_initialized() or (size := dist.get_world_size()) == 1:
        return own
    # A reduce-scatter and an all-gather, as a ring all-reduce: 2 (n - 1) / n of the bytes.
    slices = _slices(own, size)
    whole = slices.view(-1)
    _all_gather(whole, _own_sum(slices))
    return whole[: len(own)]


def _slices(values: Tensor, count: int) -> Tensor:
    """A 1-D tensor as `count` equal rows, with zeros at its end."""
    return torch.nn.functional.pad(values, (0, -len(values) % count)).view(count, -1)


def _own_sum(slices: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum the slice of this process's number over the processes of a group, by the tree."""
    # Row i of `parts` is process i's summand of this process's slice.
    parts = torch.empty_like(slices)
    dist.all_to_all_single(parts, slices, group=group)
    while len(parts) > 1:
        # Neighbors are added: a level of the tree halves the rows.
        parts = parts[::2] + parts[1::2]
    return parts[0]


def norm_by_rows(tensors: list[Tensor]) -> Tensor:
    """Norm of all tensors as one vector, whose bytes are the same however rows are sharded.

    A row's sum is a fixed tree of elementwise sums, and a process's rows are added to zeros.
    """
    first = tensors[0]
    # One number for each row of each tensor, whole on every process.
    rows = torch.cat([_squares_of_rows(tensor) for tensor in tensors])
    if isinstance(first, DTensor):
        # A row is on one process; the others have 0, which adds nothing to it.
        layout = [Partial() if p.is_shard() else p for p in first.placements]
        rows = DTensor.from_local(rows, first.device_mesh, layout, run_check=False).full_tensor()
    return rows.sum().sqrt()


def _squares_of_rows(tensor: Tensor) -> Tensor:
    """Sum the squares of each row; 0 for rows of other processes. Rows of a vector are values."""
    own = local_part(tensor).square()
    own = own.flatten(1) if own.dim() > 1 else own.reshape(-1, 1)
    while (width := own.shape[1]) > 1:
        # Halves are added elementwise, since a kernel for sums may choose another order for
        # another number of rows. Of an odd width the last column stays as it is.
        half = width // 2
        own = torch.cat([own[:, :half] + own[:, half : 2 * half], own[:, 2 * half :]], 1)
    if not isinstance(tensor, DTensor):
        return own[:, 0]
    rows = own.new_zeros(len(tensor))
    start = box_of(tensor).offset[0]
    rows[start : start + len(own)] = own[:, 0]
    return rows


def _laid_out_as(parameter: Tensor, values: Tensor) -> Tensor:
    """Make a tensor that is split like a parameter from the values of this process's part."""
    own = values.view_as(local_part(parameter))
    if not isinstance(parameter, DTensor):
        return own
    whole: Any = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    return DTensor.from_local(own, parameter.device_mesh, parameter.placements, **whole)
