"""DeepSpeed's ZeRO: check and configure it; gather, load and reset its weights and optimizer state.

ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054) shards over all processes. Stage 1 shards the
optimizer state, stage 2 the gradients, too, and stage 3 also the weights. Float32 weights and
AdamW's state lie in flat buffers, one for all parameters of a group, of which each rank has a
slice: a slice may begin and end inside of a parameter. The parameters that the model computes with
are whole under stage 2, and empty under stage 3 between their uses (`ds_tensor` is a rank's part of
one, `ds_shape` the shape of the whole). All functions that take a parameter or an optimizer are
collectives.
"""

import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType

from nanogpt_hf.config.schema import Config
from nanogpt_hf.errors import UserError

# AdamW's state, each with the parameter's shape: running means of the gradient and of its square.
ADAMW_STATE = ("exp_avg", "exp_avg_sq")


def is_zero(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed's ZeRO holds the optimizer state."""
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def check_available() -> None:
    """Raises UserError if DeepSpeed is not installed."""
    if find_spec("deepspeed") is None:
        raise UserError(
            "the accelerate config sets DeepSpeed, which is not installed; run `pip install "
            "deepspeed`"
        )


def reduce_with_gloo() -> None:
    """Let DeepSpeed 0.18 sum over CPU processes with gloo, without an extension of its own.

    It would compile that at the first start, which takes minutes and a C++ compiler. A build that
    is killed leaves a lock file, and each later start waits for it without end.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def configure(deepspeed_config: dict, config: Config, accumulation: int) -> None:
    """Set what DeepSpeed's engine does itself: accumulation, clipping, and the dtype of gradient
    sums.
    """
    # DeepSpeed calls functions that torch 2.13 has renamed, with a warning at every call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\..*is deprecated", FutureWarning)
    zero = deepspeed_config["zero_optimization"]
    offloads = [
        (zero.get(f"offload_{part}") or {}).get("device") for part in ("optimizer", "param")
    ]
    if zero["stage"] not in (2, 3) or "nvme" in offloads:
        raise UserError(
            f"DeepSpeed's ZeRO stage {zero['stage']}, offload to {offloads}: only stages 2 and 3 "
            "are supported, and offload to cpu, since state on nvme cannot be saved"
        )
    for key, value, knob in (
        ("gradient_accumulation_steps", accumulation, "train.tokens_per_step"),
        ("gradient_clipping", config.optim.max_grad_norm, "optim.max_grad_norm"),
        (
            "train_micro_batch_size_per_gpu",
            config.train.micro_batch_size,
            "train.micro_batch_size",
        ),
    ):
        stated = deepspeed_config.get(key, "auto")
        if stated not in ("auto", value):
            raise UserError(conflict(key, stated, value, knob))
        deepspeed_config[key] = value
    # Without these, gradients of a bf16 model are summed in bf16, and lose their small parts: bf16
    # has 8 bits of precision, so 256 + 1 is 256.
    deepspeed_config.setdefault("communication_data_type", "fp32")
    deepspeed_config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")


def conflict(key: str, stated: object, ours: object, knob: str) -> str:
    """Message if the accelerate config states another value than the recipe implies."""
    return (
        f"the accelerate config (or a DeepSpeed config it names) sets {key} {stated}, but {knob} "
        f"of the recipe needs {ours}: set auto there"
    )


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of the whole parameter; ZeRO-3 replaces the parameter itself by an empty tensor."""
    return getattr(parameter, "ds_shape", parameter.shape)


def full_weight(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Gather the full weight, in float32 if the optimizer has it."""
    if parameter.requires_grad:
        from deepspeed.utils import safe_get_full_fp32_param

        return cast(torch.Tensor, safe_get_full_fp32_param(parameter)).detach()
    # A frozen parameter has no float32 copy. Under stage 2 it is whole; stage 3 gives it a ds_id.
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().float().clone()


def set_weight(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set a weight from its full float32 value, which all ranks have."""
    import deepspeed

    # The weight that the model computes with, in its precision; then the float32 copy.
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.copy_(value)
    if parameter.requires_grad:
        set_flat(parameter, value)


def set_flat(parameter: Any, value: torch.Tensor, key: str | None = None) -> None:
    """Copy this rank's part of a full float32 weight, or of its state `key`, into DeepSpeed's
    flat buffers.
    """
    if not hasattr(parameter, "ds_id"):
        parameter.set_full_hp_param(value, key)
        return
    # Under stage 3 all ranks' parts are of one size, and the last is padded. DeepSpeed 0.19's own
    # function for this forgets the padding.
    size = parameter.ds_tensor.numel()
    padding = size * torch.distributed.get_world_size() - value.numel()
    padded = torch.nn.functional.pad(value.flatten(), (0, padding))
    part = padded.narrow(0, size * torch.distributed.get_rank(), size)
    parameter._z3_optimizer.set_local_hp_param(part, parameter, key)


def full_state_tensors(
    trained: Mapping[str, torch.nn.Parameter], optimizer: AcceleratedOptimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather the full optimizer state, one tensor after another, as `<parameter>.<key>`."""
    from deepspeed.utils import safe_get_full_optimizer_state

    for name, parameter in trained.items():
        for key in ADAMW_STATE:
            yield f"{name}.{key}", cast(torch.Tensor, safe_get_full_optimizer_state(parameter, key))
    # AdamW counts steps once per flat buffer; we save the count with each parameter, as torch does.
    steps = torch.as_tensor(next(_states(optimizer))["step"], dtype=torch.float32)
    for name in trained:
        yield f"{name}.step", steps.clone()


def set_state(
    optimizer: AcceleratedOptimizer, parameter: torch.Tensor, key: str, value: torch.Tensor
) -> None:
    """Set a tensor of the optimizer state of a parameter; the number of steps is one for all."""
    if key in ADAMW_STATE:
        set_flat(parameter, value, key)
        return
    for state in _states(optimizer):
        state["step"] = value.clone() if torch.is_tensor(state["step"]) else int(value)


def reset_state(optimizer: AcceleratedOptimizer) -> None:
    """Reset the optimizer state to that before the first step."""
    from deepspeed.utils import lazy_init_hp_params_optimizer_state

    for state in _states(optimizer):
        for key, value in state.items():
            state[key] = torch.zeros_like(value) if torch.is_tensor(value) else 0
    # Stage 2: DeepSpeed 0.19 itself makes only the first group's state accessible.
    zero: Any = optimizer.optimizer
    if hasattr(zero, "bit16_groups"):
        for group, flat in zip(
            zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True
        ):
            lazy_init_hp_params_optimizer_state(group, flat, zero.optimizer.state)


def _flats(optimizer: AcceleratedOptimizer) -> list[torch.Tensor]:
    """This rank's slices of the flat float32 weights, by group, by which the state is kept."""
    zero: Any = optimizer.optimizer
    by_stage = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
    return next(getattr(zero, name) for name in by_stage if hasattr(zero, name))


def _states(optimizer: AcceleratedOptimizer) -> Iterator[dict]:
    return (cast(Any, optimizer.optimizer).optimizer.state[flat] for flat in _flats(optimizer))
