"""Kinds of optimizers, a row for each; build a run's optimizer, set learning rates, skip steps that
are not finite.

Matrices and embeddings decay, biases and LayerNorms do not. With Muon, it updates the matrices
inside the blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nanogpt_hf.config.schedules import SCHEDULES
from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.errors import UserError, did_you_mean
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.optim import adamw_8bit, muon

# `params`, `weight_decay`, `scale`, the share of the learning rate, and for AdamW `betas`, where
# they are not the optimizer's.
Group = dict[str, Any]


@dataclass(frozen=True)
class OptimizerKind:
    """A kind of optimizer: all that the package asks of it.

    Its state is what `optimizer.state[parameter]` holds after the first step, under any names:
    tensors of any shapes, numbers, lists and dicts of them. Tensors of the parameter's shape are
    sharded like it; others are DTensors, or equal on all processes that have the parameter.
    Checkpoints hold each of them under its name. Loading one fills the state that a step with
    gradients of zero and learning rate 0 makes.
    """

    build: Callable[
        [PreTrainedModel, list[Group], OptimSection, Accelerator | None], torch.optim.Optimizer
    ]
    describe: Callable[[OptimSection], str]  # its words in the model card
    state_bytes: Callable[[PreTrainedModel, int], float]  # on one of N shards
    check: Callable[[], None] = lambda: None  # raises UserError if this machine lacks something
    reads_found_inf: bool = False  # a step reads it on the device; else the host waits for the norm
    as_saved: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    restore: Callable[[Any, torch.Tensor], Any] = lambda tensor, values: tensor.copy_(values)
    update_bytes: Callable[..., float] | None = None  # (model, on_cpu, shards, processes): buffers
    update_flops: Callable[[PreTrainedModel], float] = lambda model: 0.0
    in_trainer: str | None = None  # its name in transformers' Trainer


def describe_adamw(optim: OptimSection) -> str:
    betas = f"betas {optim.beta1:g} and {optim.beta2:g}"
    for family, (beta1, beta2) in optim.betas.items():
        betas += f" ({family} {beta1:g} and {beta2:g})"
    decay = f"weight decay {optim.weight_decay:g}"
    for family, value in optim.weight_decays.items():
        decay += f" ({family} {value:g})"
    return f"AdamW, {betas}, {decay}"


def build_adamw(
    model: PreTrainedModel,
    groups: list[Group],
    optim: OptimSection,
    accelerator: Accelerator | None,
) -> torch.optim.Optimizer:
    # Fused: one kernel for many tensors, which reads `found_inf` on the device.
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=betas, fused=True)


def adamw_bytes(model: PreTrainedModel, shards: int) -> float:
    """Two float32 tensors for each trainable parameter."""
    return 8 * model.num_parameters(only_trainable=True) / shards


def muon_bytes(model: PreTrainedModel, shards: int) -> float:
    """Bytes of AdamW's state, less the second tensor of matrices, which have one momentum each."""
    saved = 4 * sum(p.numel() for p in muon.matrices(model))
    return adamw_bytes(model, shards) - saved / shards


# By optim.name and optim.state. config/optimizers.py has what each does not combine with.
OPTIMIZERS: dict[tuple[str, str], OptimizerKind] = {
    ("adamw", "float32"): OptimizerKind(
        build=build_adamw,
        describe=describe_adamw,
        state_bytes=adamw_bytes,
        reads_found_inf=True,
        in_trainer="adamw_torch_fused",
    ),
    ("adamw", "8bit"): OptimizerKind(
        build=adamw_8bit.build_adamw_8bit,
        describe=lambda optim: f"{describe_adamw(optim)}, 8-bit state (torchao)",
        state_bytes=adamw_8bit.state_bytes,
        check=adamw_8bit.check_8bit,
        as_saved=adamw_8bit.as_float32,
        restore=adamw_8bit.restore,
        in_trainer="adamw_torch_8bit",
    ),
    ("muon", "float32"): OptimizerKind(
        build=muon.build_muon,
        describe=lambda optim: f"{muon.describe(optim)}; for the rest {describe_adamw(optim)}",
        state_bytes=muon_bytes,
        reads_found_inf=True,
        update_bytes=muon.update_bytes,
        update_flops=muon.update_flops,
    ),
}


def kind_of(optim: OptimSection) -> OptimizerKind:
    """Row of the optimizer that a recipe asks for. Raises UserError if there is none."""
    if kind := OPTIMIZERS.get((optim.name, optim.state)):
        return kind
    names = list(dict.fromkeys(name for name, _ in OPTIMIZERS))
    if optim.name in names:
        raise UserError(f"optim.state: {optim.name} has no state in {optim.state}; use float32")
    near = did_you_mean(optim.name, names) or f"; use one of {', '.join(names)}"
    raise UserError(f"optim.name: there is no optimizer {optim.name!r:.80}{near}")


def build_optimizer(
    model: PreTrainedModel,
    optim: OptimSection,
    layer_decay: float = 1.0,
    accelerator: Accelerator | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer of the trainable parameters.

    A group's `scale` is its share of the learning rate: the factor of its kind in optim.rates,
    times `layer_decay` for each layer above it, the embeddings at the bottom. Kinds in optim.betas
    and optim.weight_decays have groups of their own.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    architecture = architecture_of(model)
    depths = architecture.depths(model)
    families = architecture.families(model)
    top = max(depths.values())
    groups: dict[Any, Group] = {}
    # In two passes, so that the groups that decay come first, as in nanoGPT.
    for decays in (True, False):
        for name, parameter in trained.items():
            # Biases and norms do not decay: towards 0 is no simpler function for them.
            if (families[name] != "vectors") != decays:
                continue
            family = families[name]
            factor = optim.rates.get(family, 1.0)
            scale = factor * layer_decay ** (top - depths[name])
            decay = optim.weight_decays.get(family, optim.weight_decay * decays)
            group = {"params": [], "weight_decay": decay, "scale": scale}
            if betas := optim.betas.get(family):
                group["betas"] = tuple(betas)
            # The fused kernel takes no mixture of whole and split (tensor-parallel) tensors.
            key = (decays, decay, scale, group.get("betas"), isinstance(parameter, DTensor))
            groups.setdefault(key, group)["params"].append(parameter)
    kind = kind_of(optim)
    optimizer: Any = kind.build(model, list(groups.values()), optim, accelerator)
    optimizer.kind = kind
    # Clipping then need not walk through the model at every step.
    optimizer.in_model_order = list(trained.values())
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give each group its share of the step's learning rate."""
    for group in optimizer.param_groups:
        # A compiled step, as torchao's, would take each number for a new constant.
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(learning_rate * group["scale"])
        else:
            group["lr"] = learning_rate * group["scale"]


def skip_step_unless_finite(optimizer: Any, grad_norm: torch.Tensor) -> None:
    """Make the next step leave weights and state unchanged if the gradient's norm is not finite.

    Most steps read `found_inf` on the device, so the host need not wait for the norm. For the
    others, and on MPS, which accepts it but is not known to read it, the host waits once a step
    and drops the gradients.
    """
    if optimizer.kind.reads_found_inf and grad_norm.device.type != "mps":
        # 0 · inf and 0 · nan are nan, which is not 0. isfinite() would start twice as many kernels.
        optimizer.found_inf = (0 * grad_norm != 0).float()
    elif not grad_norm.isfinite():
        optimizer.zero_grad(set_to_none=True)


def learning_rate_at(step: int, optim: OptimSection, max_steps: int) -> float:
    """Learning rate of update number `step` (0 is the first of `max_steps`).

    Linear warm-up from almost 0, as in nanoGPT's `get_lr` (train.py), then the share of the
    schedule (config/schedules.py). One with an end goes down to `lowest_learning_rate`, which holds
    from update `decay_steps` on, by default `max_steps`: one after the last update, whose rate is
    therefore higher.
    """
    end = optim.decay_steps or max_steps
    warmup_steps = optim.warmup_in(max_steps)
    # Warm-up: the first steps of Adam divide by a second moment of few gradients.
    if step < warmup_steps:
        return optim.learning_rate * (step + 1) / (warmup_steps + 1)
    schedule = SCHEDULES[optim.schedule]
    lowest = optim.lowest_learning_rate if schedule.ends else 0.0
    share = schedule.share(step, warmup_steps, end, optim)
    return lowest + share * (optim.learning_rate - lowest)
