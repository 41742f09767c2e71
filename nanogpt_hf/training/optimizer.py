"""AdamW with two groups: matrices and embeddings decay, biases and LayerNorms do not."""

import torch

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


def skip_step_unless_finite(optimizer: torch.optim.AdamW, grad_norm: torch.Tensor) -> None:
    """Make the next step leave weights and moments alone where the gradient's norm is not finite.

    The fused kernels of CPU and CUDA look at `found_inf` on the device, so the host need not wait for the norm. That of
    MPS takes it, too, but is not known to look at it: there the host looks and drops the gradients.
    """
    if grad_norm.device.type != "mps":
        optimizer.found_inf = (~grad_norm.isfinite()).float()
    elif not grad_norm.isfinite():
        optimizer.zero_grad(set_to_none=True)
