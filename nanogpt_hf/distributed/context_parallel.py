"""Context parallelism: each sequence is cut, and every process trains on its part of the positions.

If the processes divide the heads, attention exchanges heads for positions and back (Ulysses,
Jacobs et al. 2023, arXiv:2309.14509): each process attends to all positions with a part of the
heads. So it is attention as before, on any device, with the mask of the whole sequences if they
are packed. Otherwise keys and values go around a ring of GPUs (Liu et al. 2023, arXiv:2310.01889),
by torch's implementation, without masks. Only training steps are cut: evaluation and generation
take whole sequences.
"""

import weakref
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

_EXCHANGE, _RING = "exchange_of_heads", "ring"
# torch has no ring for the plain one
_RING_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
# Devices and precisions of torch's ring; in float32 CUDA has no fused kernel for fewer heads of
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
    """Let a model in training attend to the positions of all processes of `mesh`, of which it sees
    its own.

    `rotation`, one of ROTATIONS: whether the ring gathers keys and values at once, or sends them
    around.
    """
    local = copy(model.config)
    inner = "sdpa" if ring else local._attn_implementation
    attend_locally: Any = ALL_ATTENTION_FUNCTIONS[inner]
    before: Any
    after: Any
    if ring:
        before, after = _enter_ring(mesh, rotation), DTensor.to_local
    else:
        before = after = partial(_exchange, group=mesh.get_group())

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """(B, H, T, D) of a part of the positions -> (B, T, H, D), as all attention functions of
        transformers.
        """
        if not module.training:
            return attend_locally(module, query, key, value, mask, **options)
        with sdpa_kernel(_RING_KERNELS) if ring else nullcontext():
            out, _ = attend_locally(
                module, before(query), before(key), before(value), mask, **options
            )
        return after(out), None

    trained = weakref.proxy(model)  # the registry must not keep a model's memory

    def build_mask(attention_mask: Any = None, **options: Any) -> Any:
        """That of the whole sequences, although transformers knows the own positions only: None
        if they are not packed.
        """
        if not trained.training or attention_mask is not None:
            return ALL_MASK_ATTENTION_FUNCTIONS[inner](attention_mask=attention_mask, **options)
        whole = trained.whole_positions
        if whole is None:
            return None
        return create_causal_mask(local, whole[..., None], None, None, whole)  # reads their shape

    name = _RING if ring else _EXCHANGE
    ALL_ATTENTION_FUNCTIONS.register(name, torch.compiler.disable(attend) if ring else attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, build_mask)
    model.set_attn_implementation(name)


def own_positions(
    batch: dict[str, torch.Tensor], model: Any, mesh: Mesh
) -> dict[str, torch.Tensor]:
    """This process's part of the positions of a batch (B, T), with their numbers, which are those
    of the batch if it is packed; all of it without such a split.

    In the ring it is a chunk and its mirror image: late positions attend to more than early ones.
    """
    if mesh.cp_size == 1:
        return batch
    model.whole_positions = batch.get("position_ids")
    pieces, own = mesh.cp_size, [mesh.cp_rank]
    if model.config._attn_implementation == _RING:
        pieces, own = 2 * pieces, [mesh.cp_rank, 2 * pieces - 1 - mesh.cp_rank]
    tokens = batch["input_ids"]
    chunks = torch.arange(tokens.shape[1], device=tokens.device).chunk(pieces)
    positions = torch.cat([chunks[index] for index in own])
    own_batch = {name: tensor[:, positions] for name, tensor in batch.items()}
    return {"position_ids": positions[None]} | own_batch


def _enter_ring(mesh: DeviceMesh, rotation: str) -> partial[DTensor]:
    """Let torch compute attention of tensors whose positions are split over `mesh` in a ring;
    returns the split.

    From here on, in all of this process; but no other attention has such tensors. By default its
    load is balanced as own_positions cuts.
    """
    from torch.distributed.tensor.experimental import _attention as ring

    ring._enable_context_parallel_dispatcher()
    ring.set_rotate_method(rotation)
    return partial(DTensor.from_local, device_mesh=mesh, placements=[Shard(2)], run_check=False)


def _exchange(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(B, H, T/n, D) -> (B, H/n, T, D): all positions of a part of the heads.

    Of the output of attention, (B, T, H/n, D) -> (B, T/n, H, D): all heads of a part of the
    positions.
    """
    n, (b, whole, part, d) = group.size(), x.shape
    x = x.reshape(b, n, whole // n, part, d).transpose(0, 1).contiguous()
    x = wait_tensor(all_to_all_single_autograd(x, None, None, group))  # part i is of process i
    return x.permute(1, 2, 0, 3, 4).reshape(b, whole // n, n * part, d)
