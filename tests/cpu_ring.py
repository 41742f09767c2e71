"""Torch's ring attention on CPUs: torch 2.13 has it for the kernels of GPUs only, so that no test
could run it.

The ring itself, its merging of partial results and its backward pass are torch's; the kernel of
each part is the CPU's.
"""

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from nanogpt_hf.distributed import context_parallel

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
POSITIONS = 2  # their dimension in (B, H, T, D)


def in_a_ring(template, **options):
    """What torch calls for an operation on DTensors: all its arguments by name, their local
    parts to torch's ring.
    """

    def handle(operation, arguments, keywords):
        mesh = arguments[0].device_mesh
        names = (argument.name for argument in operation._schema.arguments)
        named = dict(zip(names, arguments, strict=False)) | keywords
        assert named.pop("attn_mask", None) is None
        local = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in named.items()
        }
        parts = template(mesh.get_group(), POSITIONS, operation, **local, **options)
        return tuple(
            DTensor.from_local(part, mesh, [Shard(POSITIONS)], run_check=False) for part in parts
        )

    return handle


def allow_cpu_ring() -> None:
    """Let this process train with ring attention on CPUs."""
    torch_ring.custom_ops[FORWARD] = in_a_ring(torch_ring._templated_ring_attention)
    torch_ring.custom_ops[BACKWARD] = in_a_ring(
        torch_ring._templated_ring_attention_backward, grad_out_name="grad_out"
    )
    context_parallel.RING_MACHINES.extend([("cpu", "no"), ("cpu", "bf16"), ("cpu", "fp8")])
