"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for matrices, and AdamW for
the rest.

Muon's update is the momentum of a matrix with its singular values brought close to 1
(orthogonalized), by five iterations of matrix products. The update is a function of the whole
matrix, so a shard is never orthogonalized: each process computes the whole matrices of its
share, and the others receive the result.
"""

import math
from collections import Counter
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel

from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.experts import experts_of
from nanogpt_hf.optim.state import local_part

MOMENTUM = "momentum_buffer"  # the state of a matrix, as torch.optim.Muon names it
UpdateScale = Literal["original", "match_rms_adamw"]
_COEFFICIENTS, _EPS = (3.4445, -4.7750, 2.0315), 1e-7  # from Jordan et al., as in torch.optim.Muon
# Iterations between two products with the whole matrix, if the shorter way is used: five in all. In
# one pass of five the rounding errors would be 60 times those of plain iterations.
_PASSES = (3, 2)
_ITERATIONS = sum(_PASSES)


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration on a batch (K, rows, columns): singular values come out between about
    0.7 and 1.2.

    An iteration is x <- (a + b·A + c·A²)·x with A = x·xᵀ. Long float32 matrices take a shorter
    way to the same result: the factors of some iterations are polynomials in A, so their product
    comes from small squares alone. In bfloat16 A is not exact enough for that.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)  # all singular values are at most 1
    if x.dtype == torch.float32 and _is_long(*x.shape[-2:]):
        for iterations in _PASSES:
            x = _product_of_factors(x @ x.mT, iterations) @ x
    else:
        for _ in range(_ITERATIONS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _is_long(m: int, n: int) -> bool:
    """Whether `_product_of_factors` takes fewer FLOPs for (m, n), m <= n: 8·m²·n + 28·m³ instead
    of 20·m²·n + 10·m³.
    """
    return 2 * n > 3 * m


def _product_of_factors(gram: torch.Tensor, iterations: int) -> torch.Tensor:
    """The product of the factors of some iterations, from the Gram matrix A of the first."""
    a, b, c = _COEFFICIENTS
    product = None
    for remaining in reversed(range(iterations)):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
        if remaining:
            gram = factor @ (gram @ factor)
    assert product is not None
    return product


def orthogonalization_flops(rows: int, columns: int) -> int:
    """FLOPs of `orthogonalize` for one matrix by plain iterations; long float32 matrices take
    fewer.

    With m the smaller and n the larger dimension an iteration multiplies (m, n) by (n, m), (m,
    m) by (m, m) and (m, m) by (m, n): 2·m²·n + 2·m³ + 2·m²·n. Jordan et al. derive the bound 5·m
    / tokens per step for the share of a training step.
    """
    m, n = sorted((rows, columns))
    return _ITERATIONS * (4 * m * m * n + 2 * m**3)


def orthogonalization_buffers(rows: int, columns: int, *, float32: bool) -> int:
    """Values of the buffers of `orthogonalize` at its peak, for one matrix."""
    m, n = sorted((rows, columns))
    if float32 and _is_long(m, n):
        return max(m * n + 5 * m * m, 2 * m * n + m * m)
    return 2 * m * n + 2 * m * m


def update_scale(rows: int, columns: int, kind: UpdateScale) -> float:
    """Factor of the learning rate for a matrix, as `adjust_lr_fn` of torch.optim.Muon.

    `original` is Jordan et al.'s. `match_rms_adamw` (Liu et al. 2025, arXiv:2502.16982) makes
    updates about as large as AdamW's, so that AdamW's learning rate fits.
    """
    return (
        max(1.0, rows / columns) ** 0.5 if kind == "original" else 0.2 * max(rows, columns) ** 0.5
    )


class Stored(NamedTuple):
    """How a parameter holds its matrices: one, or of each expert `fused` ones below each other."""

    fused: int = 1
    transposed: bool = False  # (inputs, outputs)


def matrices(model: PreTrainedModel) -> dict[torch.nn.Parameter, Stored]:
    """The trainable parameters that Muon updates: matrices inside the blocks, also of experts.

    An expert's gate and up are two matrices, as in a dense MLP, unless their rows alternate.
    """
    blocks = architecture_of(model).blocks(model)
    experts = {
        p: Stored(2 if fused and name == "gate_up_proj" else 1, module.is_transposed)
        for module in experts_of(blocks)
        for fused in [module.is_concatenated and not module.is_transposed]
        for name, p in module.named_parameters()
    }
    return {
        p: experts.get(p, Stored())
        for p in blocks.parameters()
        if p.requires_grad and p.dim() == (3 if p in experts else 2)
    }


def _shapes(model: PreTrainedModel) -> Counter[tuple[int, int]]:
    """How many matrices of each shape Muon orthogonalizes."""
    counts: Counter[tuple[int, int]] = Counter()
    for p, stored in matrices(model).items():
        rows, columns = p.shape[-2:]
        counts[rows // stored.fused, columns] += p.shape[:-2].numel() * stored.fused
    return counts


def build_muon(
    model: PreTrainedModel,
    groups: list[dict[str, Any]],
    optim: OptimSection,
    accelerator: Accelerator | None,
) -> "Muon":
    """Muon for the matrices inside the blocks, which follow the same schedule up to their own peak.

    Several processes of `accelerator` that hold equal copies of the model share Muon's work.
    """
    inside = matrices(model)

    def part(stored: Stored | None, scale: float) -> list[dict[str, Any]]:
        parts = [
            group
            | {
                "params": [p for p in group["params"] if inside.get(p) == stored],
                "scale": group["scale"] * scale,
                **({"stored": stored} if stored else {}),
            }
            for group in groups
        ]
        return [part for part in parts if part["params"]]

    split = any(isinstance(p, DTensor) and p.dim() < 3 for g in groups for p in g["params"])
    scale = optim.muon_learning_rate / optim.learning_rate
    return Muon(
        [group for stored in dict.fromkeys(inside.values()) for group in part(stored, scale)],
        part(None, 1.0),
        lr=optim.learning_rate,
        momentum=optim.muon_momentum,
        scale=optim.muon_scale,
        betas=(optim.beta1, optim.beta2),
        replicas=None if split else _replicas(accelerator),
        bfloat16=accelerator is not None and accelerator.mixed_precision in ("bf16", "fp8"),
    )


def _replicas(accelerator: Accelerator | None) -> DeviceMesh | None:
    """The processes that hold equal copies of the model, or of this pipeline stage; None if there
    is one, or the model is sharded.
    """
    if accelerator is None or accelerator.distributed_type == DistributedType.FSDP:
        return None
    if pipeline := getattr(accelerator, "pipeline", None):
        return pipeline.dp_mesh
    if accelerator.num_processes == 1:
        return None
    return init_device_mesh(accelerator.device.type, (accelerator.num_processes,))


def _below_stack(placement: Placement) -> Placement:
    """The placement of a stack of matrices, of which each has this one."""
    if isinstance(placement, _StridedShard):  # FSDP2 shards what tensor parallelism has split
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def describe(optim: OptimSection) -> str:
    rate, momentum = optim.muon_learning_rate, optim.muon_momentum
    return (
        f"Muon, learning rate {rate:g}, Nesterov momentum {momentum:g}, update scale "
        f"{optim.muon_scale}, for the matrices inside the blocks"
    )


def update_flops(model: PreTrainedModel) -> float:
    """FLOPs of the orthogonalization of all matrices."""
    shapes = _shapes(model).items()
    return sum(count * orthogonalization_flops(*shape) for shape, count in shapes)


def update_bytes(model: PreTrainedModel, on_cpu: bool, shards: float, processes: int) -> float:
    """Bytes of the buffers of Muon's update, for the largest stack of matrices of one shape.

    They are the stack of gradients, and the buffers of the iteration for this process's share of
    it.
    """
    value, sizes = 4 if on_cpu else 2, []
    for (rows, columns), count in _shapes(model).items():
        stacked = (4 if on_cpu else 4 + value) * count * rows * columns / shards
        buffers = count * orthogonalization_buffers(rows, columns, float32=on_cpu)
        sizes.append(stacked + value * buffers / processes)
    return max(sizes, default=0.0)


class Muon(torch.optim.Optimizer):
    """Muon for the groups `matrices`, fused AdamW for the groups `others`. Momentum is Nesterov's,
    decay is decoupled.

    Parameters are plain tensors or DTensors with any placements. Plain ones are equal on all
    processes of `replicas` (DDP), which share the work. Matrices are orthogonalized in bfloat16 on
    GPUs, and elsewhere if `bfloat16` is set. If `found_inf` is set and not 0, a step
    leaves weights and state unchanged, without waiting for the device.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        scale: UpdateScale,
        betas: tuple[float, float],
        replicas: DeviceMesh | None = None,
        bfloat16: bool = False,
    ):
        self._adamw: Any = torch.optim.AdamW(others, lr=lr, betas=betas, fused=True)
        muon = {"muon": True, "lr": lr, "momentum": momentum, "stored": Stored()}
        groups = [{**muon, **group} for group in matrices]
        super().__init__(
            [*groups, *({"muon": False, **group} for group in self._adamw.param_groups)], {}
        )
        self.found_inf: torch.Tensor | None = None
        self._update_scale: UpdateScale = scale
        self._replicas, self._bfloat16 = replicas, bfloat16
        self._orthogonalize = orthogonalize
        # fp16's scaler then sets found_inf, instead of waiting for it
        self._step_supports_amp_scaling = True

    def compile(self, **options: Any) -> None:
        """Compile the Newton-Schulz iteration; `options` are torch.compile's."""
        self._orthogonalize = torch.compile(orthogonalize, dynamic=False, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient.

        Gradients must be unscaled; there is no closure.
        """
        found_inf = getattr(self, "found_inf", None)  # fp16's scaler deletes it
        stacks: dict[Any, list[tuple[torch.Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            for p in group["params"] if group["muon"] else ():
                if p.grad is not None:
                    layout = (p.device_mesh, p.placements) if isinstance(p, DTensor) else p.device
                    key = (p.shape, layout, group["stored"])
                    stacks.setdefault(key, []).append((p, group))
        for stack in stacks.values():
            self._update_matrices(stack, found_inf)
        # Optimizer.load_state_dict, which accelerate calls, replaces groups and state
        self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
        self._adamw.state = self.state
        self._adamw.found_inf = found_inf
        self._adamw.step()

    def _update_matrices(
        self, stack: list[tuple[torch.Tensor, dict[str, Any]]], found_inf: torch.Tensor | None
    ) -> None:
        """Update matrices of one shape and one layout."""
        first, group = stack[0]
        stored: Stored = group["stored"]
        applied = 1.0 if found_inf is None else 1.0 - found_inf  # 0: the step is skipped
        gradients = torch.stack([local_part(p.grad) for p, _ in stack if p.grad is not None])
        if found_inf is not None:
            gradients = gradients.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for (p, _), gradient in zip(stack, gradients.unbind(), strict=True):
            if MOMENTUM not in self.state[p]:
                self.state[p][MOMENTUM] = torch.zeros_like(p)
            momentum = local_part(self.state[p][MOMENTUM])
            momentum.lerp_(gradient, (1 - group["momentum"]) * applied)
            gradient.lerp_(momentum, group["momentum"])  # Nesterov
        updates = self._orthogonalize_stack(gradients, first, stored.fused)
        del gradients
        if found_inf is not None:
            updates.mul_(applied)
        rows, columns = first.shape[-2] // stored.fused, first.shape[-1]
        sizes = (columns, rows) if stored.transposed else (rows, columns)
        scale = update_scale(*sizes, self._update_scale)
        for (p, group), update in zip(stack, updates.unbind(), strict=True):
            weight = local_part(p)
            weight.mul_(1 - group["lr"] * group["weight_decay"] * applied)
            weight.add_(update, alpha=-group["lr"] * scale)

    def _orthogonalize_stack(
        self, stack: torch.Tensor, parameter: torch.Tensor, fused: int
    ) -> torch.Tensor:
        """Orthogonalize a stack of matrices (or of shards of them) laid out as `parameter`: each
        process a share.
        """
        if stack.device.type == "cuda" or self._bfloat16:
            stack = stack.bfloat16()
        if stack.dim() == 4:  # (parameters, experts, rows, columns); a shard has whole experts
            count, (rows, columns) = stack.shape[:2].numel() * fused, stack.shape[2:]
            flat = stack.view(count, rows // fused, columns)
            if isinstance(parameter, DTensor):
                return self._orthogonalize(flat).reshape(stack.shape)
            one = torch.empty(flat.shape[1:], device="meta")
            return self._orthogonalize_stack(flat, one, 1).reshape(stack.shape)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            placements = [*map(_below_stack, parameter.placements)]
        elif self._replicas is not None:
            mesh, placements = self._replicas, [Replicate()]
        else:
            return self._orthogonalize(stack)
        shape = torch.Size((len(stack), *parameter.shape))
        whole = {"run_check": False, "shape": shape, "stride": (math.prod(shape[1:]), shape[2], 1)}
        stacked = DTensor.from_local(stack, mesh, placements, **whole)
        share = stacked.redistribute(placements=[Shard(0)] * mesh.ndim)
        updates = DTensor.from_local(
            self._orthogonalize(share.to_local()).contiguous(), mesh, share.placements, **whole
        )
        return updates.redistribute(placements=placements).to_local()
