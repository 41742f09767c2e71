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
