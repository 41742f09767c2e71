"""The gradient of a step as a fixed sum: the same bytes on any number of processes.

Floating-point sums depend on their order, and the ring of an all-reduce has another order for each
number of processes. Here the micro-batches of a step belong to a fixed number of groups, a power
of two. A group's gradient is a sum in order, and the step's is a binary tree over the groups. A
process has a whole branch of the tree; the processes exchange slices of their sums, add them up
the rest of the tree, and gather: as many bytes as a ring sends.
"""

import torch
import torch.distributed as dist


class GradientTree:
    """Sums gradients and losses of the micro-batches of a step, of `per_group` micro-batches first.

    Keeps one gradient per level of its branch of the tree.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], per_group: int):
        self.parameters, self.per_group = parameters, per_group
        self._branches: list[torch.Tensor] = []  # sums of whole branches, the largest first
        self._losses: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of the next micro-batch, and the gradients of its backward pass."""
        self._losses.append(loss)
        group, rest = divmod(len(self._losses), self.per_group)
        if rest:
            return
        self.parameters = [p for p in self.parameters if p.grad is not None]
        gradients = [p.grad.flatten() for p in self.parameters if p.grad is not None]
        loss_sum = torch.stack(self._losses[-self.per_group :]).sum(0, True)
        total = torch.cat([*gradients, loss_sum])
        while group % 2 == 0:  # with it a larger branch is whole
            total, group = self._branches.pop().add_(total), group // 2
        self._branches.append(total)
        for parameter in self.parameters:
            parameter.grad = None

    def finish(self) -> torch.Tensor:
        """Give the parameters the gradient of the step; return its loss. All processes call it."""
        (total,) = self._branches
        *gradients, loss = sum_over_branches(total).split(
            [*(p.numel() for p in self.parameters), 1]
        )
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        return loss[0]


def sum_over_branches(own: torch.Tensor) -> torch.Tensor:
    """The sum of a 1-D tensor over all processes, a power of two, by the tree; on all of them."""
    if not dist.is_initialized() or (size := dist.get_world_size()) == 1:
        return own
    slices = torch.nn.functional.pad(own, (0, -len(own) % size)).view(size, -1)
    parts = torch.empty_like(slices)
    dist.all_to_all_single(parts, slices)
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    dist.all_gather_into_tensor(slices.view(-1), parts[0])
    return slices.view(-1)[: len(own)]
