"""Build the optimizer of a run, set its learning rates, skip steps that are not finite. Names of its state.

Matrices and embeddings decay, biases and LayerNorms do not. With Muon, it updates the matrices inside the blocks.
"""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.optim.adamw_8bit import build_adamw_8bit, in_8_bits
from nanogpt_hf.optim.muon import MOMENTUM, Muon

ADAMW_STATE = ("exp_avg", "exp_avg_sq")  # each has the parameter's shape; `step`, a scalar, comes with them
NO_MUON_UNDER_ZERO = (
    "optim.name muon: DeepSpeed's ZeRO keeps the matrices in flat buffers that no process can orthogonalise; use "
    "accelerate_configs/fsdp2.yaml, or optim.name adamw"
)


def build_optimizer(
    model: PreTrainedModel, optim: OptimSection, layer_decay: float = 1.0, accelerator: Accelerator | None = None
) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters: torch's fused AdamW, torchao's with 8-bit state, or Muon with AdamW.

    A group's `scale` is its share of the learning rate: 1 at the top of the model, and `layer_decay` times that of the
    layer above for each layer below, the embeddings at the bottom. Muon's groups follow the same schedule up to their
    own peak. With several processes of `accelerator` that hold equal copies of the model, they share Muon's work.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    depths = architecture_of(model).depths(model)
    top, groups = max(depths.values()), {}
    matrices = {id(p) for p in muon_matrices(model)} if optim.name == "muon" else set()
    for decays in (True, False):
        for name, parameter in trained.items():
            if (parameter.dim() >= 2) == decays:
                scale = layer_decay ** (top - depths[name])
                group = {"params": [], "weight_decay": optim.weight_decay * decays, "scale": scale}
                # the fused kernel takes no mixture of whole and split (tensor-parallel) tensors
                key = (id(parameter) in matrices, decays, scale, isinstance(parameter, DTensor))
                groups.setdefault(key, group)["params"].append(parameter)
    rate, betas = optim.learning_rate, (optim.beta1, optim.beta2)
    optimizer: Any
    if optim.name == "muon":
        optimizer = Muon(
            [g | {"scale": g["scale"] * optim.muon_learning_rate / rate} for key, g in groups.items() if key[0]],
            [g for key, g in groups.items() if not key[0]],
            lr=rate,
            momentum=optim.muon_momentum,
            scale=optim.muon_scale,
            betas=betas,
            replicas=None if any(isinstance(p, DTensor) for p in trained.values()) else _replicas(accelerator),
        )
    elif optim.state == "8bit":
        optimizer = build_adamw_8bit(list(groups.values()), rate, betas)
    else:
        optimizer = torch.optim.AdamW(list(groups.values()), lr=rate, betas=betas, fused=True)
    optimizer.in_model_order = list(trained.values())  # so that clipping need not walk through it at every step
    return optimizer


def muon_matrices(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The trainable parameters that Muon updates: matrices inside the blocks."""
    inside = architecture_of(model).blocks(model).parameters()
    return [p for p in inside if p.requires_grad and p.dim() == 2]


def _replicas(accelerator: Accelerator | None) -> DeviceMesh | None:
    """The processes that hold equal copies of the model; None if there is one, or the model is sharded."""
    if accelerator is None or accelerator.num_processes == 1 or accelerator.distributed_type == DistributedType.FSDP:
        return None
    return init_device_mesh(accelerator.device.type, (accelerator.num_processes,))


def state_keys(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter]
) -> dict[str, tuple[str, ...]]:
    """Names of the state of each parameter, without the scalar `step` that AdamW has too: each has its shape."""
    matrices = {id(p) for group in optimizer.param_groups if group.get("muon") for p in group["params"]}
    return {name: (MOMENTUM,) if id(p) in matrices else ADAMW_STATE for name, p in parameters.items()}


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give each group its share of the step's learning rate."""
    for group in optimizer.param_groups:
        if torch.is_tensor(group["lr"]):  # torchao's, whose compiled step would take each number for a new constant
            group["lr"].fill_(learning_rate * group["scale"])
        else:
            group["lr"] = learning_rate * group["scale"]


def skip_step_unless_finite(optimizer: Any, grad_norm: torch.Tensor) -> None:
    """Make the next step leave weights and state unchanged if the gradient's norm is not finite.

    The fused kernels of CPU and CUDA, and Muon, read `found_inf` on the device, so the host need not wait for the norm.
    MPS accepts it too, but is not known to read it, and torchao's optimizer does not: there the host waits for the norm
    once a step and drops the gradients.
    """
    if grad_norm.device.type != "mps" and not in_8_bits(optimizer):
        optimizer.found_inf = (~grad_norm.isfinite()).float()
    elif not grad_norm.isfinite():
        optimizer.zero_grad(set_to_none=True)
