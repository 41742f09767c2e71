"""One process of a launch without the others, on tensors without values: a device that only fakes
know, collectives that move nothing, and a meter of the memory.

All that `estimate --rehearse` needs of torch's and accelerate's private interfaces is in this file.
"""

import copy
import os
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from transformers import PreTrainedConfig, PreTrainedModel

import nanogpt_hf
from nanogpt_hf import cpu
from nanogpt_hf.config.method_sections import FinetuneSection
from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed import expert_parallel, pipeline
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError
from nanogpt_hf.methods import run as method_run
from nanogpt_hf.methods.distillation import freeze_teacher
from nanogpt_hf.model import build, loss_decoders, loss_gpt
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.optim import muon
from nanogpt_hf.training import build as run_build

try:
    from torch._subclasses import fake_tensor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from torch.distributed.pipelining import PipelineStage, schedules, stage
    from torch.testing._internal.distributed.fake_pg import FakeStore
except ImportError as error:
    raise UserError(f"--rehearse: torch {torch.__version__} has no fakes: {error}") from None

# Fakes tell it from the CPU, and all else takes it for one.
DEVICE = torch.device("cpu", 1)
# The module of torch with private names of a stage's messages.
_STAGE: Any = stage
# Operations that read a value of a tensor: the host waits for the device.
_SCALARS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)


class Meter(TorchDispatchMode):
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
            if args[0].device == DEVICE:
                self.waits[own_line(traceback.extract_stack())] += 1
            return 1
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor):
                self.note(result.untyped_storage())
        return results


def own_line(stack: traceback.StackSummary) -> str:
    """Return the innermost line of this package in a stack, and its text."""
    root = os.path.dirname(nanogpt_hf.__file__)
    frame = [
        frame
        for frame in stack
        if frame.filename.startswith(root)
        and frame.filename != __file__
        and frame.name not in ("__torch_function__", "__torch_dispatch__")
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
def one_process(
    launch: Launch,
    meter: Meter,
    rank: int,
    sent: dict[type, Any],
    base: PreTrainedConfig | None = None,
) -> Iterator[None]:
    """Context in which this is process `rank` of a launch without the others, with private
    interfaces replaced. `sent`: the shapes and dtypes of the previous stage's output. `base`: the
    config of the model that the run starts from, whose weights are not read.
    """
    with _Replacements() as replacements:
        if base is not None:
            _load_without_values(replacements, base)
        _run_on_a_device(replacements, launch)
        _probe_with_real_tensors(replacements)
        _measure(replacements, meter)
        _talk_to_absent_stages(replacements, sent)
        _join_absent_processes(replacements, launch, rank)
        yield


@contextmanager
def without_values(meter: Meter) -> Iterator[None]:
    """Context in which new tensors have shapes but no values, and the meter counts them."""
    with FakeTensorMode(allow_non_fake_inputs=True), meter:
        yield


def teacher_without_values(
    teacher: PreTrainedConfig, config: Config, launch: Launch
) -> PreTrainedModel:
    """Make a teacher of this configuration, as a run loads it."""
    model = architecture_of(teacher).model_class(teacher)
    freeze_teacher(model, config, launch.precision)
    return _on_device(model)


def _load_without_values(replacements: _Replacements, base: PreTrainedConfig) -> None:
    """Make a model of the config `base` where one would be loaded."""

    def load_start_model(finetune: FinetuneSection, **fields: Any) -> PreTrainedModel:
        config = copy.deepcopy(base)
        vars(config).update(fields)
        return architecture_of(config).model_class(config)

    replacements.replace(build, "load_start_model", load_start_model)

    # The model before training is on the device, too.
    def load_on_device(*arguments: Any) -> PreTrainedModel:
        return _on_device(build.load_resized(*arguments))

    replacements.replace(method_run, "load_resized", load_on_device)


def _on_device(model: Any) -> Any:
    for tensor in (*model.parameters(), *model.buffers()):
        cast(FakeTensor, tensor).fake_device = DEVICE
    return model


def _run_on_a_device(replacements: _Replacements, launch: Launch) -> None:
    """Put the model on a device that only fakes know, and give a GPU's sizes to what asks whether
    it is one.
    """
    start_model = run_build.start_model

    def start_on_device(*arguments: Any) -> Any:
        return _on_device(start_model(*arguments))

    # The first of the two steps of a rehearsal does the same, on tensors without values.
    replacements.replace(run_build, "dry_run_step", lambda *_: None)

    # accelerate finds sharded parameters by the place of their data, which a fake has not.
    def place_of_data(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    replacements.replace(run_build, "start_model", start_on_device)
    make = torch.tensor

    # torch makes a fake from numbers on the first CPU, whatever device is asked for.
    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        made = make(data, **options)
        return made if device is None else made.to(device)

    replacements.replace(torch, "tensor", tensor)
    # A fake of up to one number keeps its value, and stays on the CPU when it is moved.
    replacements.replace(fake_tensor, "CONSTANT_NUMEL_LIMIT", -1)
    # It is there already, and a fake does not move between two CPUs.
    replacements.replace(nn.Module, "to", lambda module, *_, **__: module)
    replacements.replace(_fully_shard, "_get_device_from_mesh", lambda mesh: DEVICE)
    replacements.replace(FakeTensor, "data_ptr", place_of_data)
    # The precision is the launch's, whatever the CPU of this machine computes fast.
    replacements.replace(cpu, "multiplies_bfloat16", lambda: True)
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


def _measure(replacements: _Replacements, meter: Meter) -> None:
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
        meter.waits[own_line(traceback.extract_stack())] += 1
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

    schedule = schedules._PipelineSchedule
    if hasattr(schedule, "_warmup_p2p"):
        replacements.replace(schedule, "_warmup_p2p", infer_shapes)
    else:  # its name from torch 2.15 on
        replacements.replace(schedule, "_initialize_pipeline_distributed_state", infer_shapes)
    replacements.replace(PipelineStage, "_send_meta", send)
    replacements.replace(PipelineStage, "_recv_meta", receive)


def _join_absent_processes(replacements: _Replacements, launch: Launch, rank: int) -> None:
    """Set the environment of process `rank`, and join a process group that moves nothing."""
    # On the CPU and not compiled, since the tensors have no values.
    here = Mesh.of(replace_fields(launch, device="cpu", compiler="no"), rank)
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
