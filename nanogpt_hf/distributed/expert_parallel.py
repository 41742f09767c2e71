"""Expert parallelism: data-parallel ranks share one copy of the experts, each some of every layer.

Of E experts in a layer, each of `ep_size` processes holds E / ep_size; with dp_size / ep_size
copies of all. A token's hidden state is sent to the processes of its experts, and their outputs
come back: two all-to-all exchanges per layer, and as many in the backward pass (Lepikhin et al.
2020, GShard, arXiv:2006.16668, section 3.2; without its capacity limit: no token is dropped). For
4 processes with ep_size 2 and 8 experts:

    process         0      1      2      3
    experts       0 - 3  4 - 7  0 - 3  4 - 7
    copy            0      0      1      1

All other parameters are whole on each process (DDP) or sharded over all (FSDP2). If there are
several copies of the experts, DDP does not see them and their gradients are summed here; FSDP2
shards the copies.
"""

import dataclasses
import logging
import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from nanogpt_hf.config.step_size import divisors
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.mesh import Mesh, mesh_of
from nanogpt_hf.model.experts import View, experts_of, products
from nanogpt_hf.optim.state import local_part


def experts_problem(model: PreTrainedModel, launch: Launch) -> str | None:
    """Say why the processes cannot share the experts of a model, if they cannot."""
    for experts in experts_of(model):
        count = experts.num_experts
        if any(parameter.shape[0] != count for parameter in experts.parameters()):
            architecture = model.config.model_type
            return f"ep_size {launch.ep_size}: experts of {architecture} share parameters"
        sizes = divisors(math.gcd(launch.dp_size, count))
        if launch.ep_size not in sizes:
            return (
                f"ep_size is {launch.ep_size}, which has to divide the {count} experts and the "
                f"data-parallel size {launch.dp_size}; set {' or '.join(map(str, sizes))}"
            )
        if launch.sharding == "fsdp" and count < launch.dp_size:
            return (
                f"ep_size {launch.ep_size} does not combine with FSDP2 over {launch.dp_size} "
                f"processes, more than the {count} experts; use accelerate_configs/ep.yaml"
            )
    return None


def split_experts(model: PreTrainedModel, accelerator: Accelerator) -> None:
    """Keep this process's share of the experts of a model that is equal on all, in place."""
    mesh = mesh_of(accelerator)
    copies = mesh.dp_size // mesh.ep_size
    # The processes of one copy are neighbors: the exchanges of every layer go between them.
    sizes = {"copies": copies, "ep": mesh.ep_size}
    device_mesh = init_device_mesh(
        accelerator.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    # All parameters of experts are (E, ...): dimension 0 is cut. With FSDP2 the mesh has the
    # processes of one copy only, since FSDP2 adds the dimension over the copies itself.
    whole: Any = device_mesh["ep"] if plugin else device_mesh
    placements = [Shard(0)] if plugin else [Replicate(), Shard(0)]
    for experts in experts_of(model):
        for name, p in list(experts.named_parameters()):
            part = distribute_tensor(p.data, whole, placements, src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(part, p.requires_grad))
        experts.exchanged = partial(_exchanged, experts, device_mesh["ep"].get_group())
        if plugin:
            _shard_copies(experts, device_mesh["copies"], plugin, mesh.dp_size)
    # torch warns of gathers over both dimensions, which only norms and checkpoints need.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    if not plugin:
        # DDP would all-reduce over all processes, which hold different experts.
        names = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def _shard_copies(experts: Any, copies: DeviceMesh, plugin: Any, dp_size: int) -> None:
    """Let FSDP2 shard experts over the processes that hold the same ones."""
    policy = plugin.mixed_precision_policy or MixedPrecisionPolicy()
    fully_shard(
        experts,
        mesh=copies,
        reshard_after_forward=plugin.reshard_after_forward,
        # numbers of experts are integers, which a cast of all inputs would change
        mp_policy=dataclasses.replace(policy, cast_forward_inputs=False),
        offload_policy=plugin.cpu_offload,
    )
    # The gradient of an expert sums over the tokens of all processes of its copy already. So it
    # is divided by all processes, as the gradients of the other parameters are, and not by the
    # copies alone, over which FSDP2 would take the mean.
    experts.set_gradient_divide_factor(float(dp_size))
    experts.set_force_sum_reduction_for_comms(True)


@torch.compiler.disable
def _exchanged(
    experts: Any, group: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the `products` of experts, each by the process of `group` that has it.

    hidden (N, C): this process's tokens; chosen (N, k): the numbers of each token's experts;
    weights (N, k): the weights of their outputs. Returns (N, C).
    """
    k = chosen.shape[1]
    size = group.size()
    own = experts.num_experts // size
    # 1. Sort the N·k pairs of token and expert by expert: the rows for a process are neighbors.
    order = chosen.flatten().argsort(stable=True)
    received, sends, receives = _rows_by_process(chosen, experts.num_experts, group)
    # 2. Send each hidden state to the processes of its experts: row i of the sorted pairs is token
    # order[i] // k. (N·k, C) -> (rows received, C)
    rows = _exchange(hidden[order // k], receives, sends, group)
    # 3. Number the received rows by own expert. They lie by sender, and for each by expert.
    index = torch.arange(own, device=rows.device).repeat(size)
    index = index.repeat_interleave(received.flatten(), output_size=len(rows))
    count = len(rows)
    if not count:
        # No token chose an expert of this process. One row of zeros keeps the experts in the
        # graph, so that the backward pass has the exchanges and gradients of the others.
        rows = rows.sum(0, keepdim=True)
        index = index.new_zeros(1)
    # 4. Compute, with weights of 1: the sender weighs the outputs.
    part = View(experts, local_part, num_experts=own, exchanged=None)
    rows = products(part, rows, index[:, None], rows.new_ones(len(rows), 1))[:count]
    # 5. Send the outputs back, and restore the order of the pairs. (rows received, C) -> (N·k, C)
    rows = _exchange(rows, sends, receives, group)
    # index_select, unlike indexing, saves no rows for the backward pass
    back = rows.index_select(0, order.argsort())
    # 6. Sum the k weighted outputs of each token.
    return (back.view(-1, k, hidden.shape[1]) * weights[..., None]).sum(1).to(hidden.dtype)


def _rows_by_process(
    chosen: torch.Tensor, num_experts: int, group: Any
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Rows that come from each process, for each own expert, (processes, own experts); the rows
    sent to each process, and received from it. The host waits for the last two.
    """
    # How many tokens of this process chose each expert, by the process that has it.
    counts = torch.bincount(chosen.flatten(), minlength=num_experts).view(group.size(), -1)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    # An all-to-all of unequal parts needs their sizes on the host.
    sends, receives = torch.stack([counts.sum(1), received.sum(1)]).tolist()
    return received, sends, receives


def _exchange(rows: torch.Tensor, receives: list[int], sends: list[int], group: Any) -> Any:
    """Send the next `sends[i]` rows to process i, and return those received, in order."""
    return wait_tensor(all_to_all_single_autograd(rows.contiguous(), receives, sends, group))


def average_copies(parameters: list[nn.Parameter], mesh: Mesh) -> None:
    """Take the mean of experts' gradients over all processes, which DDP does not see."""
    for gradient in (p.grad for p in parameters):
        if isinstance(gradient, DTensor) and isinstance(gradient.placements[0], Replicate):
            # The tokens of a copy's processes are summed already, so only the copies are left to
            # sum over. The mean is over all processes.
            local = gradient.to_local().div_(mesh.dp_size)
            dist.all_reduce(local, group=gradient.device_mesh.get_group(0))
