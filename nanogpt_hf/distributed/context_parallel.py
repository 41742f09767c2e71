"""Context parallelism: each sequence is cut in order, and every process trains on its part of the positions.

Attention exchanges heads for positions and back (Ulysses, Jacobs et al. 2023, arXiv:2309.14509): each process attends
to all positions with a part of the heads. So it is causal attention as before, on any device, and needs no mask. Only
training steps are cut: evaluation and generation take whole sequences.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nanogpt_hf.distributed.mesh import Mesh

_NAME = "exchange_of_heads"


def exchange_heads(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Let a model in training attend to the positions of all processes of `mesh`, of which it sees its own."""
    group, attend_locally = mesh.get_group(), ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """(B, H, T, D) of a part of the positions -> (B, T, H, D), as all attention functions of transformers."""
        if not module.training:
            return attend_locally(module, query, key, value, mask, **options)
        if mask is not None:
            raise ValueError("context parallelism has no attention masks: sequences are neither packed nor padded")
        query, key, value = (_positions_for_heads(tensor, group) for tensor in (query, key, value))
        out, _ = attend_locally(module, query, key, value, None, **options)
        return _heads_for_positions(out, group), None

    ALL_ATTENTION_FUNCTIONS.register(_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(_NAME)


def own_positions(batch: dict[str, torch.Tensor], mesh: Mesh) -> dict[str, torch.Tensor]:
    """This process's part of the positions of a batch (B, T), with their numbers; all of it without such a split."""
    if mesh.cp_size == 1:
        return batch
    length = batch["input_ids"].shape[1] // mesh.cp_size
    own = slice(length * mesh.cp_rank, length * (mesh.cp_rank + 1))
    part = {name: tensor[:, own].contiguous() for name, tensor in batch.items()}
    return part | {"position_ids": torch.arange(own.start, own.stop, device=part["input_ids"].device)[None]}


def _positions_for_heads(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(B, H, T/n, D) -> (B, H/n, T, D)."""
    n, (b, h, t, d) = group.size(), x.shape
    x = _exchange(x.reshape(b, n, h // n, t, d).transpose(0, 1), group)  # (n, B, H/n, T/n, D), by positions
    return x.permute(1, 2, 0, 3, 4).reshape(b, h // n, n * t, d)


def _heads_for_positions(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(B, T, H/n, D) -> (B, T/n, H, D)."""
    n, (b, t, h, d) = group.size(), x.shape
    x = _exchange(x.reshape(b, n, t // n, h, d).transpose(0, 1), group)  # (n, B, T/n, H/n, D), by heads
    return x.permute(1, 2, 0, 3, 4).reshape(b, t // n, n * h, d)


def _exchange(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send part i of the first dimension to process i; receive one from each."""
    return wait_tensor(all_to_all_single_autograd(parts.contiguous(), None, None, group))
