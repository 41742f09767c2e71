"""Pipeline parallelism: the stages of a model, one per process, and their training by a schedule
of torch.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.stages import Stage, own_blocks

_BUCKET = 2**24  # values of gradients that are summed over data-parallel ranks at once


class Pipeline:
    """The stage of this process, its links to the others, and the schedule of a training step.

    It cuts `model` in place, and puts the rest on the device, sharded if the accelerate config
    sets FSDP2.
    """

    def __init__(self, model: PreTrainedModel, accelerator: Accelerator, mesh: Mesh):
        self.accelerator, self.device = accelerator, accelerator.device
        self.index, self.count, self.dp_size = mesh.pp_rank, mesh.pp_size, mesh.dp_size
        self.is_zero_bubble = mesh.pp_schedule == "zero_bubble"
        device_mesh = init_device_mesh(
            self.device.type, (mesh.pp_size, mesh.dp_size), mesh_dim_names=("pp", "dp")
        )
        self.pp_group, self.dp_mesh = device_mesh["pp"].get_group(), device_mesh["dp"]
        self.is_main_of_stage = mesh.dp_rank == 0
        self.is_sharded = accelerator.distributed_type == DistributedType.FSDP
        self.model = model
        self._schedule: Schedule1F1B | ScheduleInterleavedZeroBubble | None = None
        self._schedule_shape: tuple[int, ...] = ()
        self._divisor = 1.0
        self.micro_batch = 0  # index of the one in the forward pass
        self._before: Callable[[int], None] = lambda number: None
        self.stage = Stage(model, self.index, self.count, self)
        self._replace_forward(model)
        model.to(cast(Any, self.device))
        if self.is_sharded:
            self._shard(model)
        vars(model)["pipeline"] = self
        shapes = {
            name: (p.shape, p.dtype, p.requires_grad) for name, p in self.named_parameters().items()
        }
        self._shapes: list[dict[str, tuple[torch.Size, torch.dtype, bool]]] = [{}] * self.count
        dist.all_gather_object(self._shapes, shapes, group=self.pp_group)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this stage by their names in the whole model, as on disk: a tied
        head is the embedding.
        """
        return {
            self.stage.tied_name if name == self.stage.tied_here else name: parameter
            for name, parameter in self.model.named_parameters()
        }

    def whole_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters of the model by name, in the same order on all stages; those of others
        on the meta device.
        """
        own = self.named_parameters()
        return {
            name: own.get(
                name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad)
            )
            for stage in self._shapes
            for name, (shape, dtype, requires_grad) in stage.items()
        }

    def gather(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of all stages on the main process's CPU, of those that each stage has; {}
        on others.
        """
        if not self.is_main_of_stage:
            return {}
        if self.stage.is_last:  # the first stage has the other copy
            tensors = {name: tensor for name, tensor in tensors.items() if not self._is_tied(name)}
        described: list[dict] = [{}] * self.count
        mine = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        dist.all_gather_object(described, mine, group=self.pp_group)
        if self.index:
            for tensor in tensors.values():
                dist.send(tensor.to(self.device).contiguous(), group=self.pp_group, group_dst=0)
            return {}
        for index in range(1, self.count):
            for name, (shape, dtype) in described[index].items():
                received = torch.empty(shape, dtype=dtype, device=self.device)
                dist.recv(received, group=self.pp_group, group_src=index)
                tensors[name] = received.cpu()
        return tensors

    def _is_tied(self, name: str) -> bool:
        """Whether this is the tied matrix, or its optimizer state."""
        return bool(self.stage.tied_name) and (
            name == self.stage.tied_name or name.startswith(f"{self.stage.tied_name}.")
        )

    def _shard(self, model: PreTrainedModel) -> None:
        """Shard each block, and the rest, over the data-parallel ranks of this stage by FSDP2."""
        plugin: Any = self.accelerator.state.fsdp_plugin
        options: dict[str, Any] = {
            "mesh": self.dp_mesh,
            "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            "offload_policy": plugin.cpu_offload,
        }
        for block in own_blocks(architecture_of(model).blocks(model)).values():
            fully_shard(block, reshard_after_forward=plugin.reshard_after_forward, **options)
        fully_shard(model, **options)

    def _replace_forward(self, model: PreTrainedModel) -> None:
        """Make the model's forward pass that of a stage if the schedule calls it, else that of
        the whole pipeline.
        """
        whole = model.forward

        @functools.wraps(whole)
        def forward(*args, number: torch.Tensor | None = None, **batch):
            with self.accelerator.autocast():
                if number is None:
                    return whole(*args, **batch)
                self.micro_batch = int(number)
                self._before(self.micro_batch)
                return self.stage.micro_batch(args[0], **batch)

        vars(model)["forward"] = forward

    # Outside of a schedule, hidden states travel in float32, which represents bf16 exactly.

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(hidden, dtype=torch.float32)
        dist.recv(received, group=self.pp_group, group_src=self.index - 1)
        return received

    def send(self, hidden: torch.Tensor) -> None:
        dist.send(
            hidden.detach().float().contiguous(), group=self.pp_group, group_dst=self.index + 1
        )

    def from_last(self, output: torch.Tensor) -> torch.Tensor:
        output = output.detach().float().contiguous()
        dist.broadcast(output, group=self.pp_group, group_src=self.count - 1)
        return output

    def train(
        self,
        micro_batches: list[dict[str, torch.Tensor]],
        num_targets: int,
        before: Callable[[int], None],
    ) -> torch.Tensor:
        """Run forward and backward passes of a step's micro-batches by the schedule, and reduce the
        gradients.

        `before(i)` is called before the forward pass of micro-batch i. Returns this process's
        share of the loss: the summed loss divided by `num_targets`, on the last stage.
        """
        batch: dict[str, Any] = {
            name: torch.cat([batch[name] for batch in micro_batches]).to(
                self.device, non_blocking=True
            )
            for name in micro_batches[0]
        }
        # FSDP2 averages gradients over ranks; without it they are summed below
        scale = self.dp_size if self.is_sharded else 1
        self._divisor, self._before = num_targets / scale, before
        input_ids, targets = batch.pop("input_ids"), batch["shift_labels"]
        if not self.stage.is_last:
            del batch["shift_labels"]
        schedule, losses = self._schedule_for(len(micro_batches), input_ids), []
        schedule.step(
            *([input_ids] if self.stage.is_first else []),
            target=targets,
            losses=losses,
            return_outputs=False,
            number=torch.arange(len(micro_batches)),
            **batch,
        )
        loss = torch.zeros((), device=self.device)
        for part in losses:
            loss = loss + part.detach() / scale
        if not self.is_sharded and self.dp_size > 1:
            self._sum_gradients()
        if self.stage.tied_here:
            self._add_tied_gradient(self.model.get_parameter(self.stage.tied_here))
        return loss

    def _schedule_for(
        self, count: int, input_ids: torch.Tensor
    ) -> Schedule1F1B | ScheduleInterleavedZeroBubble:
        shape = (count, *input_ids.shape)
        if self._schedule is None or shape != self._schedule_shape:
            stage = PipelineStage(
                self.model, self.index, self.count, self.device, group=self.pp_group
            )
            options: Any = {
                "scale_grads": False,
                "loss_fn": lambda summed_loss, targets: summed_loss / self._divisor,
            }
            self._schedule_shape = shape
            if self.is_zero_bubble:
                self._schedule = ScheduleInterleavedZeroBubble([stage], count, **options)
            else:
                self._schedule = Schedule1F1B(stage, count, **options)
        return self._schedule

    def _sum_gradients(self) -> None:
        """Sum the gradients over data-parallel ranks.

        DDP would overlap this with the last backward pass only.
        """
        buckets: list[list[torch.Tensor]] = [[]]
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                if sum(gradient.numel() for gradient in buckets[-1]) >= _BUCKET:
                    buckets.append([])
                buckets[-1].append(parameter.grad)
        for bucket in buckets:
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=self.dp_mesh.get_group())
            for gradient, total in zip(
                bucket, flat.split([g.numel() for g in bucket]), strict=True
            ):
                gradient.copy_(total.view_as(gradient))

    def _add_tied_gradient(self, parameter: nn.Parameter) -> None:
        """Add the gradients of the two copies of a tied matrix, on first and last stage; both
        get the same sum.
        """
        gradient = _local(cast(torch.Tensor, parameter.grad))
        other, peer = torch.empty_like(gradient), self.count - 1 if self.stage.is_first else 0
        operations = [
            dist.P2POp(operation, tensor, group=self.pp_group, group_peer=peer)
            for operation, tensor in ((dist.isend, gradient.clone()), (dist.irecv, other))
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        gradient += other

    def clip_gradients(self, parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clip the gradients to `max_norm` (0: not), and return the norm of the whole gradient
        before.
        """
        copy = (
            self.model.get_parameter(self.stage.tied_here)
            if self.stage.tied_here and self.stage.is_last
            else None
        )
        counted = [p.grad for p in parameters if p.grad is not None and p is not copy]
        norm = nn.utils.get_total_norm(counted)
        square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
        dist.all_reduce(square, group=self.pp_group)
        norm = square.sqrt()
        if max_norm:
            whole = (
                DTensor.from_local(norm, self.dp_mesh, run_check=False) if self.is_sharded else norm
            )
            nn.utils.clip_grads_with_norm_(parameters, max_norm, whole)
        return norm


def pipeline_of(model: Any) -> Pipeline | None:
    """The pipeline that a prepared model is a stage of; None without pipeline parallelism."""
    return vars(model).get("pipeline")


def merged_over_stages(pipeline: Pipeline | None, values: dict[str, float]) -> dict[str, float]:
    """Values of all stages by name, on all of them."""
    if pipeline is None:
        return values
    gathered: list[dict[str, float]] = [{}] * pipeline.count
    dist.all_gather_object(gathered, values, group=pipeline.pp_group)
    return {name: value for part in gathered for name, value in part.items()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
