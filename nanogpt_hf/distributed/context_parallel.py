"""Context parallelism: each sequence is cut, and every process trains on its part of the positions.

All layers but attention work on each position alone, so a process that has T/n positions of every
sequence needs the others in attention only. There are two ways to get them:

- Ulysses (Jacobs et al. 2023, arXiv:2309.14509), if the processes divide the heads. An all-to-all
  before attention exchanges positions for heads: each process attends to all T positions with H/n
  of the heads. Another one after it exchanges back. So it is attention as before, on any device,
  with the mask of the whole sequences if they are packed.
- A ring (Liu et al. 2023, arXiv:2310.01889), for any number of heads. Each process keeps its
  queries, and keys and values go around all processes; partial results are merged as in flash
  attention. It is torch's implementation, for GPUs, without masks.

Only training steps are cut: evaluation and generation take whole sequences. Gradients of the parts
are summed over processes by FSDP2, which context parallelism requires.
"""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.model.config_fields import size_of

_EXCHANGE = "exchange_of_heads"
_RING = "ring"
# torch's ring has no version of the plain kernel.
_RING_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
# Devices and precisions of torch's ring. In float32 CUDA has no fused kernel for fewer heads of
# keys than of queries.
RING_MACHINES = [("cuda", "bf16"), ("cuda", "fp8")]


def heads_of(config: Any) -> tuple[int, int]:
    """Heads of queries, and of keys and values."""
    heads = size_of(config, "num_attention_heads", 1)
    return heads, size_of(config, "num_key_value_heads") or heads


def needs_ring(config: Any, processes: int) -> bool:
    """Whether heads cannot be exchanged, since `processes`, tensor- times context-parallel, do
    not divide them.
    """
    return any(heads % processes for heads in heads_of(config))


def share_positions(model: PreTrainedModel, mesh: DeviceMesh, *, ring: bool, rotation: str) -> None:
    """Let a model in training attend to the positions of all processes of `mesh`, although it is
    called with its own.

    `rotation`, one of ROTATIONS: whether the ring gathers keys and values at once, or sends them
    around.
    """
    # The kernel that attends within a process, by its name in transformers: the model's own, with
    # its own masks. Only what goes into it and comes out of it is moved.
    local: Any = copy(model.config)
    inner = "sdpa" if ring else local._attn_implementation
    name = _RING if ring else _EXCHANGE
    if ring:
        attend = _attention(inner, _enter_ring(mesh, rotation), DTensor.to_local, _RING_KERNELS)
        attend = torch.compiler.disable(attend)
    else:
        exchange = partial(_exchange, group=mesh.get_group())
        attend = _attention(inner, exchange, exchange)
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask_builder(model, inner, local))
    model.set_attn_implementation(name)


def _attention(
    inner: str, before: Callable, after: Callable, kernels: list[SDPBackend] | None = None
) -> Callable[..., tuple[torch.Tensor, None]]:
    """Make an attention function of transformers that moves queries, keys and values by `before`,
    and the output by `after`.
    """
    attend_locally: Any = ALL_ATTENTION_FUNCTIONS[inner]

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """(B, H, T, D) of a part of the positions -> (B, T, H, D)."""
        if not module.training:
            return attend_locally(module, query, key, value, mask, **options)
        with sdpa_kernel(kernels) if kernels else nullcontext():
            out, _ = attend_locally(
                module, before(query), before(key), before(value), mask, **options
            )
        return after(out), None

    return attend


def _mask_builder(model: PreTrainedModel, inner: str, local: Any) -> Callable[..., Any]:
    """Make a mask function of transformers for the whole sequences, although it is called with the
    own positions only.
    """
    # transformers keeps a registered function for ever; it must not keep the model's memory.
    trained = weakref.proxy(model)

    def build_mask(attention_mask: Any = None, **options: Any) -> Any:
        if not trained.training or attention_mask is not None:
            return ALL_MASK_ATTENTION_FUNCTIONS[inner](attention_mask=attention_mask, **options)
        whole = trained.whole_positions
        # Without packed documents attention is causal, and needs no mask.
        if whole is None:
            return None
        # It reads the shape of its second argument, (B, T, width), and no value.
        return create_causal_mask(local, whole[..., None], None, None, whole)

    return build_mask


def own_positions(
    batch: dict[str, torch.Tensor], model: Any, mesh: Mesh
) -> dict[str, torch.Tensor]:
    """This process's part of the positions of a batch (B, T), with their numbers, which are the
    batch's own if it is packed.
    """
    # build_mask reads them: numbers that begin again at 0 mark the documents of a packed row.
    model.whole_positions = batch.get("position_ids")
    pieces = mesh.cp_size
    own = [mesh.cp_rank]
    if model.config._attn_implementation == _RING:
        # Under a causal mask late positions attend to more than early ones. So the sequence is cut
        # into 2n chunks, and process i has chunk i and its mirror image, 2n - 1 - i: all processes
        # compute the same number of products.
        pieces = 2 * mesh.cp_size
        own = [mesh.cp_rank, pieces - 1 - mesh.cp_rank]
    tokens = batch["input_ids"]
    chunks = torch.arange(tokens.shape[1], device=tokens.device).chunk(pieces)
    positions = torch.cat([chunks[index] for index in own])
    own_batch = {name: tensor[:, positions] for name, tensor in batch.items()}
    return {"position_ids": positions[None]} | own_batch


def _enter_ring(mesh: DeviceMesh, rotation: str) -> partial[DTensor]:
    """Let torch compute attention of tensors whose positions are split over `mesh` in a ring;
    return a function that declares a tensor split so.

    From here on it is so in all of this process; but no other attention has such tensors. torch
    balances the ring's load by default, for positions as own_positions cuts them.
    """
    from torch.distributed.tensor.experimental import _attention as ring

    ring._enable_context_parallel_dispatcher()
    ring.set_rotate_method(rotation)
    # Dimension 2 of (B, H, T, D) is the positions.
    return partial(DTensor.from_local, device_mesh=mesh, placements=[Shard(2)], run_check=False)


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Cut dimension 1 into n parts, send part i to process i, and join those received in dimension
    2.

    Before attention, (B, H, T/n, D) -> (B, H/n, T, D): all positions of a part of the heads.
    After it, on its output, (B, T, H/n, D) -> (B, T/n, H, D): all heads of a part of the
    positions. So one function does both ways.
    """
    n = group.size()
    batch, whole, part, width = x.shape
    # (B, n, whole/n, part, D) -> (n, B, whole/n, part, D): the first dimension is the receiver
    x = x.reshape(batch, n, whole // n, part, width).transpose(0, 1).contiguous()
    # An all-to-all of equal parts; afterwards the first dimension is the sender. Its gradient is
    # the same exchange.
    x = wait_tensor(all_to_all_single_autograd(x, None, None, group))
    # (n, B, whole/n, part, D) -> (B, whole/n, n, part, D) -> (B, whole/n, n * part, D)
    return x.permute(1, 2, 0, 3, 4).reshape(batch, whole // n, n * part, width)
