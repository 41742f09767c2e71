"""Pipeline parallelism: the stages of a model, one per process, and their training by a schedule
of torch.

A stage sends its hidden states (B, T, C) of each micro-batch to the next one, and gets their
gradient back. The schedule decides when: 1F1B (Narayanan et al. 2019, PipeDream; as in
arXiv:2104.04473, section 2.2) fills the pipeline, and then alternates one forward and one backward
pass, so that stage i of p holds the activations of p - i micro-batches at most:

    stage 0:  F0 F1    B0 F2 B1 F3 B2    B3
    stage 1:     F0 B0 F1 B1 F2 B2 F3 B3

The processes form a mesh (stages, copies, data-parallel, tensor-parallel). Inside a stage
everything is as without a pipeline: FSDP2 shards the blocks over data-parallel ranks, tensor
parallelism splits matrices. Between stages there are only the messages of the schedule, the norm
of the whole gradient, and the gradient of a tied matrix, which first and last stage both have.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from transformers import PreTrainedModel

from nanogpt_hf.distributed.mesh import mesh_of
from nanogpt_hf.distributed.pipeline_stages import Links, ModelStage, own_blocks
from nanogpt_hf.distributed.tensor_parallel import split_matrices, split_vocabulary
from nanogpt_hf.model.architecture import architecture_of, saved_buffers
from nanogpt_hf.optim.state import local_part, total_norm


class Pipeline(Links):
    """Trains the stage of this process by a schedule, and links it to the other stages.

    It cuts `model` in place, and puts the rest on the device, sharded if the accelerate config
    sets FSDP2.
    """

    def __init__(self, model: PreTrainedModel, accelerator: Accelerator):
        mesh = mesh_of(accelerator)
        self.accelerator = accelerator
        self.device = accelerator.device
        self.index = mesh.pp_rank
        self.count = mesh.pp_size
        self.dp_size = mesh.dp_size
        self.schedule = mesh.pp_schedule
        self.is_sharded = accelerator.distributed_type == DistributedType.FSDP
        copies = mesh.dp_replicate_size
        # In the order of Mesh's ranks, so that both number the processes alike.
        sizes = {
            "pp": mesh.pp_size,
            "copies": copies,
            "dp": mesh.dp_size // copies,
            "tp": mesh.tp_size,
        }
        device_mesh = init_device_mesh(
            self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
        self.pp_group = device_mesh["pp"].get_group()
        self.dp_mesh = device_mesh["copies", "dp"] if copies > 1 else device_mesh["dp"]
        self.is_main_of_stage = mesh.dp_rank == mesh.tp_rank == 0
        self.model = model
        # A step has as many micro-batches of one shape as the step before, but for a dry-run step.
        self._schedule_for = functools.lru_cache(maxsize=1)(self._build_schedule)
        # What the loss of the current step is divided by, and what is called before each
        # micro-batch: the schedule's functions take no arguments of ours.
        self._divisor = 1.0
        self._before: Callable[[int], None] = lambda number: None
        if mesh.tp_size > 1:
            # While embedding and head are both here: they may be one matrix.
            split_vocabulary(model, device_mesh["tp"])
        self.stage = ModelStage(model, self.index, self.count, self)
        if mesh.tp_size > 1:
            split_matrices(model, device_mesh["tp"])
        self._replace_forward(model)
        model.to(cast(Any, self.device))
        if self.is_sharded:
            self._shard(model)
        cast(Any, accelerator).pipeline = self

    def named_tensors(self) -> dict[str, Any]:
        """Parameters and saved buffers of this stage by their names in the whole model, as on
        disk: a tied head is the embedding.
        """
        return {
            self.stage.tied_name if name == self.stage.tied_here else name: parameter
            for name, parameter in self.model.named_parameters()
        } | saved_buffers(self.model)

    def gather(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather the weights of all stages on the main process's CPU; {} on others. `weights`: the
        whole ones of this stage, on its first process.
        """
        if not self.is_main_of_stage:
            return {}
        if self.index:
            # One by one, since a device may hold what is sent; None is the end.
            for item in (*weights.items(), None):
                dist.send_object_list([item], group=self.pp_group, group_dst=0)
            return {}
        for source in range(1, self.count):
            received: list[Any] = [True]
            while received[0]:
                dist.recv_object_list(received, group=self.pp_group, group_src=source)
                if received[0]:
                    # A tied head is here already, as the first stage's embedding.
                    weights.setdefault(*received[0])
        return weights

    def _shard(self, model: PreTrainedModel) -> None:
        """Shard each block, and the rest, over the data-parallel ranks of this stage by FSDP2."""
        plugin: Any = self.accelerator.state.fsdp_plugin
        options: dict[str, Any] = {
            "mesh": self.dp_mesh,
            "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            "offload_policy": plugin.cpu_offload,
        }
        # Each call makes one group of parameters, which are gathered together. The last call takes
        # what is in no block: embedding, final norm, head.
        for block in own_blocks(architecture_of(model).blocks(model)):
            fully_shard(block, reshard_after_forward=plugin.reshard_after_forward, **options)
        fully_shard(model, **options)

    def _replace_forward(self, model: PreTrainedModel) -> None:
        """Let the model's forward pass run one stage if the schedule calls it, else the whole
        pipeline.
        """
        whole = model.forward

        @functools.wraps(whole)
        def forward(*args, number: torch.Tensor | None = None, **batch):
            # FSDP2 gathers the weights in the precision that is set, and needs no autocast.
            with nullcontext() if self.is_sharded else self.accelerator.autocast():
                if number is None:
                    return whole(*args, **batch)
                self._before(int(number))
                return self.stage.micro_batch(args[0], **batch)

        vars(model)["forward"] = forward

    # The links of evaluations and generation, outside of a schedule. Hidden states travel in
    # float32, which represents bf16 exactly.

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
        # torch's schedules take the whole step, (micro-batches * B, T), and cut it again.
        batch: dict[str, Any] = {
            name: torch.cat([batch[name] for batch in micro_batches]).to(
                self.device, non_blocking=True
            )
            for name in micro_batches[0]
        }
        # The gradient is the one of the summed loss / num_targets. FSDP2 takes the mean over
        # ranks, so each loss is multiplied by their number; without it they are summed below.
        scale = self.dp_size if self.is_sharded else 1
        self._divisor = num_targets / scale
        self._before = before
        input_ids = batch.pop("input_ids")
        targets = batch["shift_labels"]
        if not self.stage.is_last:
            del batch["shift_labels"]
        schedule = self._schedule_for(len(micro_batches), input_ids.shape)
        losses: list[torch.Tensor] = []
        schedule.step(
            *([input_ids] if self.stage.is_first else []),
            target=targets,
            losses=losses,
            return_outputs=False,
            # cut like the batch: a micro-batch gets its own number
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

    def _build_schedule(
        self, count: int, shape: torch.Size
    ) -> Schedule1F1B | ScheduleInterleavedZeroBubble:
        stage = PipelineStage(self.model, self.index, self.count, self.device, group=self.pp_group)
        options: Any = {
            # by the number of micro-batches: the loss is divided by the targets of the step already
            "scale_grads": False,
            "loss_fn": lambda summed_loss, targets: summed_loss / self._divisor,
        }
        if self.schedule == "zero_bubble":
            return ScheduleInterleavedZeroBubble([stage], count, **options)
        return Schedule1F1B(stage, count, **options)

    def _sum_gradients(self) -> None:
        """Sum the gradients over data-parallel ranks.

        DDP would overlap this with the last backward pass only.
        """
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(local_part(parameter.grad), group=self.dp_mesh.get_group())

    def _add_tied_gradient(self, parameter: nn.Parameter) -> None:
        """Add the gradients of the two copies of a tied matrix, on first and last stage; both
        get the same sum.
        """
        gradient = local_part(cast(torch.Tensor, parameter.grad))
        other = torch.empty_like(gradient)
        peer = self.count - 1 if self.stage.is_first else 0
        # In one batch, so that neither stage waits for the other to receive first.
        operations = [
            dist.P2POp(dist.isend, gradient.clone(), group=self.pp_group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self.pp_group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        # A sum of two is the same in either order: the copies stay equal bit for bit.
        gradient += other

    def norm(self, parameters: list[nn.Parameter]) -> torch.Tensor:
        """Norm of the gradients of all stages; the copy of a tied matrix counts once."""
        copied = self.stage.is_last and self.stage.tied_here
        copy = self.model.get_parameter(copied) if copied else None
        counted = [cast(torch.Tensor, p.grad) for p in parameters if p is not copy]
        # |g|² of the whole is the sum of the stages' |g|².
        square = total_norm(counted).square()
        dist.all_reduce(square, group=self.pp_group)
        return square.sqrt()


def pipeline_of(accelerator: Accelerator) -> Pipeline | None:
    """Pipeline that the prepared model is a stage of; None without pipeline parallelism."""
    return getattr(accelerator, "pipeline", None)


def merged_over_stages(pipeline: Pipeline | None, values: dict[str, float]) -> dict[str, float]:
    """Values of all stages by name, on all of them."""
    if pipeline is None:
        return values
    gathered: list[dict[str, float]] = [{}] * pipeline.count
    dist.all_gather_object(gathered, values, group=pipeline.pp_group)
    return {name: value for part in gathered for name, value in part.items()}
