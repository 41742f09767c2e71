"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for matrices, and AdamW for
the rest.

Muon's update is the momentum of a matrix with its singular values brought close to 1
(orthogonalized), by five iterations of matrix products. The update is a function of the whole
matrix, so a shard is never orthogonalized: each process computes the whole matrices of its
share, and the others receive the result. `torch.optim.Muon` takes only 2-D parameters, so it does
not train the stacked matrices of experts, and nothing divides its work among processes.
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
from nanogpt_hf.optim.newton_schulz import (
    orthogonalization_buffers,
    orthogonalization_flops,
    orthogonalize,
)
from nanogpt_hf.optim.state import local_part

MOMENTUM = "momentum_buffer"  # the state of a matrix, as torch.optim.Muon names it
UpdateScale = Literal["original", "match_rms_adamw"]


def update_scale(rows: int, columns: int, kind: UpdateScale) -> float:
    """Factor of the learning rate for a matrix, as `adjust_lr_fn` of torch.optim.Muon.

    `original` is Jordan et al.'s. `match_rms_adamw` (Liu et al. 2025, arXiv:2502.16982) makes
    updates about as large as AdamW's, so that AdamW's learning rate fits.
    """
    if kind == "original":
        return max(1.0, rows / columns) ** 0.5
    # The orthogonalized matrix has min(rows, columns) singular values near 1, so the root mean
    # square of its values is 1 / √max(rows, columns). AdamW's updates have about 0.2.
    return 0.2 * max(rows, columns) ** 0.5


class Stored(NamedTuple):
    """Storage of matrices in a parameter: one, or `fused` ones of each expert below each other."""

    fused: int = 1
    transposed: bool = False  # stored as (inputs, outputs)


def matrices(model: PreTrainedModel) -> dict[torch.nn.Parameter, Stored]:
    """Trainable parameters that Muon updates: matrices inside the blocks, of experts too.

    Embeddings and head are no products of two hidden spaces: Muon is not for them (Jordan et al.).
    """
    blocks = architecture_of(model).blocks(model)
    experts: dict[torch.nn.Parameter, Stored] = {}
    for module in experts_of(blocks):
        # An expert's gate and up are two matrices, as in a dense MLP, unless their rows alternate.
        has_gate_above_up = module.is_concatenated and not module.is_transposed
        for name, parameter in module.named_parameters():
            fused = 2 if has_gate_above_up and name == "gate_up_proj" else 1
            experts[parameter] = Stored(fused, module.is_transposed)
    found: dict[torch.nn.Parameter, Stored] = {}
    for parameter in blocks.parameters():
        # Experts have a matrix each, (E, rows, columns); what has fewer dimensions is a bias.
        dimensions = 3 if parameter in experts else 2
        if parameter.requires_grad and parameter.dim() == dimensions:
            found[parameter] = experts.get(parameter, Stored())
    return found


def _shapes(model: PreTrainedModel) -> Counter[tuple[int, int]]:
    """Count the matrices of each shape that Muon orthogonalizes."""
    # The last two dimensions are the matrix; fused matrices lie below each other in it.
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
    # A step stacks matrices that are stored alike, so each way to store them has groups of its own.
    scale = optim.peak_muon_rate / optim.learning_rate
    muon_groups: list[dict[str, Any]] = []
    for stored in dict.fromkeys(inside.values()):
        for group in groups:
            chosen = [p for p in group["params"] if inside.get(p) == stored]
            if chosen:
                scaled = {"scale": group["scale"] * scale, "stored": stored}
                muon_groups.append({**group, "params": chosen, **scaled})
    adamw_groups: list[dict[str, Any]] = []
    for group in groups:
        chosen = [p for p in group["params"] if p not in inside]
        if chosen:
            adamw_groups.append({**group, "params": chosen})
    # The shares of a split matrix are not equal copies, so no process does another's work.
    parameters = [p for group in groups for p in group["params"]]
    is_split = any(isinstance(p, DTensor) and p.dim() < 3 for p in parameters)
    return Muon(
        muon_groups,
        adamw_groups,
        lr=optim.learning_rate,
        momentum=optim.muon_momentum,
        scale=optim.muon_scale,
        betas=(optim.beta1, optim.beta2),
        replicas=None if is_split else _replicas(accelerator),
        bfloat16=accelerator is not None and accelerator.mixed_precision in ("bf16", "fp8"),
    )


def _replicas(accelerator: Accelerator | None) -> DeviceMesh | None:
    """Processes that hold equal copies of the model, or of this pipeline stage; None if there
    is one, or the model is sharded.
    """
    # FSDP2's shards are DTensors, whose mesh `_orthogonalize_stack` reads from the parameter.
    if accelerator is None or accelerator.distributed_type == DistributedType.FSDP:
        return None
    if pipeline := getattr(accelerator, "pipeline", None):
        return pipeline.dp_mesh
    if accelerator.num_processes == 1:
        return None
    return init_device_mesh(accelerator.device.type, (accelerator.num_processes,))


def _below_stack(placement: Placement) -> Placement:
    """Placement of a stack of matrices that each have this one: the stack has one dimension
    more, its first.
    """
    if isinstance(placement, _StridedShard):  # FSDP2 shards what tensor parallelism has split
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if isinstance(placement, Shard) else placement


def describe(optim: OptimSection) -> str:
    return (
        f"Muon, learning rate {optim.peak_muon_rate:g}, Nesterov momentum "
        f"{optim.muon_momentum:g}, update scale {optim.muon_scale}, for the matrices inside the "
        "blocks"
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
    value = 4 if on_cpu else 2  # bytes; a GPU iterates in bfloat16, on a copy of the gradients
    sizes = []
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
        defaults = {"muon": True, "lr": lr, "momentum": momentum, "stored": Stored()}
        own = [{**defaults, **group} for group in matrices]
        adamw = [{"muon": False, **group} for group in self._adamw.param_groups]
        super().__init__([*own, *adamw], {})
        self.found_inf: torch.Tensor | None = None
        self._update_scale: UpdateScale = scale
        self._replicas = replicas
        self._bfloat16 = bfloat16
        self._orthogonalize = orthogonalize
        # Then fp16's scaler sets found_inf instead of waiting for it.
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
        # Matrices of one shape and layout are one batch: a few large kernels instead of many small
        # ones.
        stacks: dict[Any, list[tuple[torch.Tensor, dict[str, Any]]]] = {}
        for group in self.param_groups:
            if not group["muon"]:
                continue
            for p in group["params"]:
                if p.grad is not None:
                    layout = (p.device_mesh, p.placements) if isinstance(p, DTensor) else p.device
                    key = (p.shape, layout, group["stored"])
                    stacks.setdefault(key, []).append((p, group))
        for stack in stacks.values():
            self._update_matrices(stack, found_inf)
        # Optimizer.load_state_dict, which accelerate calls, replaces groups and state.
        self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
        self._adamw.state = self.state
        self._adamw.found_inf = found_inf
        self._adamw.step()

    def _update_matrices(
        self, stack: list[tuple[torch.Tensor, dict[str, Any]]], found_inf: torch.Tensor | None
    ) -> None:
        """Update matrices of one shape and one layout.

        With momentum β, M <- β·M + (1 - β)·G, and the update is the orthogonalized β·M + (1 - β)·G
        (Nesterov): the gradient moved towards the new momentum.
        """
        first, group = stack[0]
        stored: Stored = group["stored"]
        # 1, or 0 for a step that is skipped: without asking the device, each change is multiplied
        # by it.
        applied = 1.0 if found_inf is None else 1.0 - found_inf
        gradients = torch.stack([local_part(p.grad) for p, _ in stack if p.grad is not None])
        if found_inf is not None:
            # A NaN times 0 would still be a NaN.
            gradients = gradients.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        for (p, _), gradient in zip(stack, gradients.unbind(), strict=True):
            if MOMENTUM not in self.state[p]:
                self.state[p][MOMENTUM] = torch.zeros_like(p)
            momentum = local_part(self.state[p][MOMENTUM])
            momentum.lerp_(gradient, (1 - group["momentum"]) * applied)
            gradient.lerp_(momentum, group["momentum"])
        updates = self._orthogonalize_stack(gradients, first, stored.fused)
        del gradients
        if found_inf is not None:
            updates.mul_(applied)
        rows = first.shape[-2] // stored.fused
        columns = first.shape[-1]
        sizes = (columns, rows) if stored.transposed else (rows, columns)
        scale = update_scale(*sizes, self._update_scale)
        for (p, group), update in zip(stack, updates.unbind(), strict=True):
            weight = local_part(p)
            # Decoupled decay (arXiv:1711.05101): by the learning rate, not through the gradient.
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
        if stack.dim() == 4:  # (parameters, experts, rows, columns)
            rows, columns = stack.shape[2:]
            # One matrix after another, (K, rows, columns). A shard has whole experts, so it has
            # whole matrices.
            flat = stack.view(stack.shape[:2].numel() * fused, rows // fused, columns)
            if isinstance(parameter, DTensor):
                return self._orthogonalize(flat).reshape(stack.shape)
            one = torch.empty(flat.shape[1:], device="meta")
            return self._orthogonalize_stack(flat, one, 1).reshape(stack.shape)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            placements = [*map(_below_stack, parameter.placements)]
        elif self._replicas is not None:
            mesh = self._replicas
            placements = [Replicate()]
        else:
            return self._orthogonalize(stack)
        shape = torch.Size((len(stack), *parameter.shape))
        whole = {"run_check": False, "shape": shape, "stride": (math.prod(shape[1:]), shape[2], 1)}
        # From parts of all matrices on each process to the whole matrices of its share, and back.
        stacked = DTensor.from_local(stack, mesh, placements, **whole)
        share = stacked.redistribute(placements=[Shard(0)] * mesh.ndim)
        updates = DTensor.from_local(
            self._orthogonalize(share.to_local()).contiguous(), mesh, share.placements, **whole
        )
        return updates.redistribute(placements=placements).to_local()
