"""Rehearse a run at true size: the product's own build and training step as one of N processes, on
tensors without values, with collectives that move nothing.

It finds the peak of the memory, the bytes of each kind of collective, and the places where the
host would wait for a device. All that it needs of torch's and accelerate's private interfaces is in
this file. The run's device is a second CPU that only the fakes know, with what differs on a GPU
replaced.
"""

import os
import re
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import state
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, debug
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import nanogpt_hf
from nanogpt_hf.bench.workload import communicated_bytes, synthetic_data
from nanogpt_hf.config.schema import Config, replace_knobs
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.distributed import expert_parallel, pipeline
from nanogpt_hf.distributed.accelerate_config import check_launch
from nanogpt_hf.distributed.accelerator import build_accelerator
from nanogpt_hf.distributed.context_parallel import needs_ring
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import format_bytes
from nanogpt_hf.model import build, loss_decoders, loss_gpt
from nanogpt_hf.model.experts import shapes_only
from nanogpt_hf.optim import muon
from nanogpt_hf.planning.counts import GpuKernels
from nanogpt_hf.planning.estimate import planned_model
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import build as run_build
from nanogpt_hf.training.step import train_step

try:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from torch.distributed.pipelining import PipelineStage, schedules, stage
    from torch.testing._internal.distributed.fake_pg import FakeStore
except ImportError as error:
    raise UserError(f"--rehearse: torch {torch.__version__} has no fakes: {error}") from None

# The limit of micro-batches in a rehearsed step. A pipeline has one more than it has stages.
MICRO_BATCHES = 2
# Fakes tell it from the CPU, and all else takes it for one.
_DEVICE = torch.device("cpu", 1)
# The module of torch with private names of a stage's messages.
_STAGE: Any = stage
# Operations that read a value of a tensor: the host waits for the device.
_SCALARS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


@dataclass(frozen=True)
class Rehearsal:
    """Bytes that a process of a run needs in a step of `micro_batches`."""

    # The process that was rehearsed, in words, and the micro-batches of its step.
    process: str
    micro_batches: int
    state: int  # bytes before the step: weights and optimizer state
    peak: int  # bytes
    sent: dict[str, int]  # bytes by kind of collective
    waits: dict[str, int]  # lines of code that ask for a value, and how often

    def lines(self) -> list[str]:
        """Format as lines of text."""
        sent = [f"{kind} {format_bytes(size)}" for kind, size in self.sent.items()]
        step = f"a step with accumulation {self.micro_batches}, not compiled"
        memory = f"{format_bytes(self.state)} before it, {format_bytes(self.peak)} at its peak"
        return [
            f"rehearsed as {self.process}, {step}:",
            f"  memory: {memory}",
            f"  sends: {', '.join(sent) or 'nothing'}",
            *(f"  the host waits for a value ({n} ×): {line}" for line, n in self.waits.items()),
            *["  the host waits for no value"] * (not self.waits),
        ]


class _Meter(TorchDispatchMode):
    """Bytes of the storages that are alive, their peak, and the lines that ask for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.waits: Counter[str] = Counter()

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that is new or was resized."""
        key = storage._cdata
        if key not in self.sizes:
            weakref.finalize(storage, self._free, key)
        self.now += storage.nbytes() - self.sizes.get(key, 0)
        self.sizes[key] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _free(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            # Its local operations follow.
            return NotImplemented
        # Tensors without values have none to give.
        if func in _SCALARS:
            if args[0].device == _DEVICE:
                self.waits[_own_line(traceback.extract_stack())] += 1
            return 1
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self.note(result.untyped_storage())
        return results


def _own_line(stack: traceback.StackSummary) -> str:
    """Return the innermost line of this package in a stack, and its text."""
    root = os.path.dirname(nanogpt_hf.__file__)
    frame = [
        frame
        for frame in stack
        if frame.filename.startswith(root)
        and frame.filename != __file__
        and frame.name != "__torch_function__"
    ][-1]
    return f"{os.path.relpath(frame.filename, root)}:{frame.lineno} {frame.line}"


class _Replica(nn.Module):
    """DDP of tensors without values, which its reducer in C++ would read: a bucket as large as each
    gradient, summed when the last micro-batch has it.
    """

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__()
        self.module = module
        self.syncs = True
        # Experts that processes share are not summed here.
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and name not in ignored:
                bucket = torch.empty_like(parameter, requires_grad=False)
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def _hook(self, bucket: torch.Tensor) -> Any:
        return lambda parameter: dist.all_reduce(bucket) if self.syncs else None

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.syncs = False
        yield
        self.syncs = True


class _Replacements(ExitStack):
    """Attributes of modules and classes that are replaced until the context ends."""

    def replace(self, where: Any, name: str, value: Any) -> None:
        self.enter_context(patch.object(where, name, value))


@contextmanager
def _faked(launch: Launch, meter: _Meter, rank: int, sent: dict[type, Any]) -> Iterator[None]:
    """Replace the private interfaces: process `rank` of a launch without the others. `sent`: the
    shapes and dtypes of the previous stage's output.
    """
    with _Replacements() as replacements:
        _run_on_a_device(replacements, launch)
        _probe_with_real_tensors(replacements)
        _measure(replacements, meter)
        _talk_to_absent_stages(replacements, sent)
        _join_absent_processes(replacements, launch, rank)
        yield


def _run_on_a_device(replacements: _Replacements, launch: Launch) -> None:
    """Put the model on a device that only fakes know, and give a GPU's sizes to what asks whether
    it is one.
    """
    start_model = run_build.start_model

    def start_on_device(*arguments: Any) -> Any:
        model = start_model(*arguments)
        for tensor in (*model.parameters(), *model.buffers()):
            cast(FakeTensor, tensor).fake_device = _DEVICE
        return model

    # accelerate finds sharded parameters by the place of their data, which a fake has not.
    def place_of_data(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    replacements.replace(run_build, "start_model", start_on_device)
    # It is there already, and a fake does not move between two CPUs.
    replacements.replace(nn.Module, "to", lambda module, *_, **__: module)
    replacements.replace(_fully_shard, "_get_device_from_mesh", lambda mesh: _DEVICE)
    replacements.replace(FakeTensor, "data_ptr", place_of_data)
    if not launch.on_cpu:
        # Its type is cpu, so training/build.py and the loss would take it for one.
        replacements.replace(run_build, "write_out_attention", lambda model: None)
        chunk = loss_gpt.LOGITS_PER_CHUNK * loss_gpt.CHUNKS_OF_A_GPU
        replacements.replace(loss_gpt, "LOGITS_PER_CHUNK", chunk)


def _probe_with_real_tensors(replacements: _Replacements) -> None:
    """Let what probes a model, or numbers processes, have real tensors: it reads their values."""

    def outside(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            with _disable_current_modes():
                return function(*arguments, **options)

        return call

    for where, name in (
        (build, "build_config"),
        (build, "meta_model"),
        (loss_decoders, "_head_is_linear"),
        (muon, "_replicas"),
        (pipeline, "init_device_mesh"),
        (expert_parallel, "init_device_mesh"),
        (_fully_shard, "_init_default_mesh"),
        (DeviceMesh, "__getitem__"),
        (DeviceMesh, "_concatenate"),
    ):
        replacements.replace(where, name, outside(getattr(where, name)))


def _measure(replacements: _Replacements, meter: _Meter) -> None:
    """Count what no operation shows: storages that are resized, and a wait for numbers of rows."""
    resize = torch.UntypedStorage.resize_

    # FSDP2 frees and allocates gathered weights so.
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        resized = resize(storage, size)
        if storage._cdata in meter.sizes:
            meter.note(storage)
        return resized

    # Each process sends the number of rows for each expert. Without values it is the same for all.
    def balanced(chosen: torch.Tensor, num_experts: int, group: Any) -> Any:
        meter.waits[_own_line(traceback.extract_stack())] += 1
        size = group.size()
        rows = chosen.numel()
        each = [rows // size + (i < rows % size) for i in range(size)]
        return chosen.new_empty(size, num_experts // size), each, each[:1] * size

    replacements.replace(torch.UntypedStorage, "resize_", resize_)
    replacements.replace(expert_parallel, "_rows_by_process", balanced)


def _talk_to_absent_stages(replacements: _Replacements, sent: dict[type, Any]) -> None:
    """Let a pipeline stage know the shapes that it receives, on which stages agree by messages."""

    def infer_shapes(schedule: Any, stages: list[Any], *_: Any) -> None:
        for each in stages:
            each._inference_mode = _STAGE.InferenceMode.DYNAMIC

    def send(self: PipelineStage, meta: Any, _: int) -> None:
        sent[type(meta)] = meta

    def receive(self: PipelineStage, source: int) -> Any:
        # From the stage before: the output that it sent when it was rehearsed.
        if source < self.stage_index:
            return sent[_STAGE._StageForwardMeta]
        # From the stage after: gradients, which have the shapes of this stage's output.
        return _STAGE._StageBackwardMeta(_STAGE._derive_grad_metas(self._stage_meta.outputs))

    replacements.replace(schedules._PipelineSchedule, "_warmup_p2p", infer_shapes)
    replacements.replace(PipelineStage, "_send_meta", send)
    replacements.replace(PipelineStage, "_recv_meta", receive)


def _join_absent_processes(replacements: _Replacements, launch: Launch, rank: int) -> None:
    """Set the environment of process `rank`, and join a process group that moves nothing."""
    # On the CPU and not compiled, since the tensors have no values.
    here = Mesh.of(replace_fields(launch, device="cpu", compiles=False), rank)
    replacements.enter_context(patch.dict(os.environ, here.environment()))
    replacements.replace(nn.parallel, "DistributedDataParallel", _Replica)
    if launch.world_size == 1:
        return
    # accelerate has no FSDP2 on CPUs, and another name of the device for DDP.
    backend = ("gloo", DistributedType.MULTI_GPU)
    replacements.replace(state.PartialState, "_prepare_backend", lambda self, *_, **__: backend)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=launch.world_size)
    replacements.callback(dist.destroy_process_group)
    # DTensor's cache refers to the groups of a mesh.
    replacements.callback(debug._clear_sharding_prop_cache)


def rehearse(config: Config, launch: Launch) -> Rehearsal:
    """Build a run of `config` and take two steps of it as the first process of `launch`; the second
    is measured. Of a pipeline it is the stage with the highest peak.

    Raises UserError for a layout that cannot be rehearsed, or if tensors on two devices meet.
    """
    if config.finetune.model:
        raise UserError("--rehearse: only a model from scratch can be rehearsed")
    is_plain = launch.precision != "fp16" and launch.compression == "no"
    # Ring attention, compressed gradients and a loss scaler read or cast values themselves.
    split = launch.tp_size * launch.cp_size
    if launch.cp_size > 1 and needs_ring(planned_model(config).config, split):
        is_plain = False
    if not is_plain or launch.sharding == "zero":
        kinds = "DDP, FSDP2, HSDP, TP, CP without a ring, PP and EP"
        raise UserError(f"--rehearse: {launch} cannot be rehearsed; only {kinds} can")
    size = config.train.min_micro_batch_size
    each = size * config.data.block_size * launch.dp_size
    wanted = max(MICRO_BATCHES, launch.pp_size + 1)
    micro_batches = min(wanted, config.train.tokens_per_step // each)
    knobs = {
        "train.micro_batch_size": size,
        "train.tokens_per_step": micro_batches * each,
        "train.stages": None,
    }
    # A run of it alone, without the other stages of its recipe.
    config = replace_fields(replace_knobs(config, knobs), whole=None, begins=0)
    # What each stage has sent to the next, which is rehearsed after it.
    shapes: dict[type, Any] = {}
    try:
        found = [_rehearse(config, launch, index, shapes) for index in range(launch.pp_size)]
    except RuntimeError as error:
        # torch has a class for it from 2.13 on only.
        if not re.search("two (different )?devices", str(error)):
            raise
        line = _own_line(traceback.extract_tb(error.__traceback__))
        raise UserError(f"--rehearse: tensors of the CPU and of the device meet: {line}") from error
    return max(found, key=lambda rehearsal: rehearsal.peak)


def _rehearse(config: Config, launch: Launch, index: int, shapes: dict[type, Any]) -> Rehearsal:
    """Rehearse the first process of pipeline stage `index`."""
    meter = _Meter()
    rank = index * launch.world_size // launch.pp_size
    with _faked(launch, meter, rank, shapes):
        here = check_launch(config, Mesh.from_environment())
        accelerator = build_accelerator(here, RunFolder("runs"))
        cast(Any, accelerator.state).device = state.PartialState().device = _DEVICE
        data = cast(PreparedData, synthetic_data(config))
        kernels = nullcontext() if launch.on_cpu else GpuKernels()
        with FakeTensorMode(allow_non_fake_inputs=True), meter, kernels, shapes_only():
            run = run_build.build_at(config, accelerator, data, None, None)
            train_step(run, 0, learning_rate=1e-4)
            # The first step has made the optimizer state; the second is measured.
            before = meter.peak = meter.now
            meter.waits.clear()
            sent = communicated_bytes(lambda: train_step(run, 1, learning_rate=1e-4))
    process = "the first process"
    if launch.pp_size > 1:
        process += f" of stage {index + 1} of {launch.pp_size}, which needs the most"
    micro_batches = accelerator.gradient_accumulation_steps
    return Rehearsal(process, micro_batches, before, meter.peak, sent, dict(meter.waits))
