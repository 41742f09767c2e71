"""AdamW with two groups: matrices and embeddings decay, biases and LayerNorms do not."""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.optim.adamw_8bit import build_adamw_8bit, in_8_bits


def build_optimizer(model: torch.nn.Module, optim: OptimSection, layer_decay: float = 1.0) -> torch.optim.Optimizer:
    """AdamW over the parameters that train: torch's fused one, or torchao's where the moments are in 8 bits.

    A group's `scale` is its share of the learning rate: 1 at the top of the model, and `layer_decay` times that of the
    layer above for each layer below, the embeddings at the bottom.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    depths = architecture_of(model).depths(model)
    top, groups = max(depths.values()), {}
    for decays in (True, False):
        for name, parameter in trained.items():
            if (parameter.dim() >= 2) == decays:
                scale = layer_decay ** (top - depths[name])
                group = {"params": [], "weight_decay": optim.weight_decay * decays, "scale": scale}
                groups.setdefault((decays, scale), group)["params"].append(parameter)
    groups, rate, betas = list(groups.values()), optim.learning_rate, (optim.beta1, optim.beta2)
    if optim.state == "8bit":
        optimizer = build_adamw_8bit(groups, rate, betas)
    else:
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=betas, fused=True)
    optimizer.in_model_order = list(trained.values())  # so that clipping need not walk through it at every step
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give each group its share of the step's learning rate."""
    for group in optimizer.param_groups:
        if torch.is_tensor(group["lr"]):  # torchao's, whose compiled step would take each number for a new constant
            group["lr"].fill_(learning_rate * group["scale"])
        else:
            group["lr"] = learning_rate * group["scale"]


def clip_gradients(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_norm: float
) -> torch.Tensor:
    """Clip the gradients to `max_norm` (0: not) and return their norm before, a scalar on the device.

    Where it is not finite the next step leaves weights and moments alone. DeepSpeed and fp16's scaler, which do their
    step elsewhere, see to that themselves.
    """
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if sharded or accelerator.scaler is not None:
        norm = accelerator.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    else:  # accelerate would look through all gradients for shards first
        norm = torch.nn.utils.clip_grad_norm_(optimizer.optimizer.in_model_order, max_norm or math.inf)
    if not torch.is_tensor(norm):  # DeepSpeed has clipped and stepped already, and tells a number
        return torch.tensor(norm, device=accelerator.device)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if accelerator.scaler is None:
        skip_step_unless_finite(optimizer.optimizer, norm)
    return norm


def update(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Step, and clear the gradients.

    Where accelerate's wrapper would only call the optimizer it is passed by: at each call it searches Python's path
    twice for a package (LOMO).
    """
    if accelerator.scaler is None and accelerator.distributed_type != DistributedType.DEEPSPEED:
        optimizer = optimizer.optimizer
    optimizer.step()
    optimizer.zero_grad()


def skip_step_unless_finite(optimizer: torch.optim.Optimizer, grad_norm: torch.Tensor) -> None:
    """Make the next step leave weights and moments alone where the gradient's norm is not finite.

    The fused kernels of CPU and CUDA look at `found_inf` on the device, so the host need not wait for the norm. That of
    MPS takes it, too, but is not known to look at it, and torchao's optimizer does not know it: there the host waits
    for the norm, once a step, and drops the gradients.
    """
    if grad_norm.device.type != "mps" and not in_8_bits(optimizer):
        optimizer.found_inf = (~grad_norm.isfinite()).float()
    elif not grad_norm.isfinite():
        optimizer.zero_grad(set_to_none=True)
