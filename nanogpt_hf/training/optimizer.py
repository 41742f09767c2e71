"""AdamW with two groups: matrices and embeddings decay, biases and LayerNorms do not."""

import math

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from nanogpt_hf.config.schema import OptimSection


def build_optimizer(model: torch.nn.Module, optim: OptimSection) -> torch.optim.AdamW:
    """Fused AdamW over the parameters that train. The learning rate is set before every step, from the schedule."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=betas, fused=True)


def clip_gradients(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_norm: float
) -> torch.Tensor:
    """Clip the gradients to `max_norm` (0: not) and return their norm before, a scalar on the device.

    Where it is not finite the next step leaves weights and moments alone. DeepSpeed and fp16's scaler, which do their
    step elsewhere, see to that themselves.
    """
    norm = accelerator.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    if not torch.is_tensor(norm):  # DeepSpeed has clipped and stepped already, and tells a number
        return torch.tensor(norm, device=accelerator.device)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if accelerator.scaler is None:
        skip_step_unless_finite(optimizer.optimizer, norm)
    return norm


def skip_step_unless_finite(optimizer: torch.optim.AdamW, grad_norm: torch.Tensor) -> None:
    """Make the next step leave weights and moments alone where the gradient's norm is not finite.

    The fused kernels of CPU and CUDA look at `found_inf` on the device, so the host need not wait for the norm. That of
    MPS takes it, too, but is not known to look at it: there the host looks and drops the gradients.
    """
    if grad_norm.device.type != "mps":
        optimizer.found_inf = (~grad_norm.isfinite()).float()
    elif not grad_norm.isfinite():
        optimizer.zero_grad(set_to_none=True)
