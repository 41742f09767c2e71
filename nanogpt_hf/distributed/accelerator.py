"""Build the Accelerator from the accelerate config, compile blocks, stop on signals.

The values of ACCELERATE_* are read only here.
"""

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, cast

import psutil
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    LoggerType,
    ProjectConfiguration,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

from nanogpt_hf.config.checks import accumulation_steps
from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed import rendezvous
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError, did_you_mean
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.optim.adamw_8bit import check_8bit
from nanogpt_hf.optim.muon import Muon
from nanogpt_hf.optim.optimizer import NO_MUON_UNDER_ZERO
from nanogpt_hf.runs.folder import RunFolder


def check_launch(config: Config) -> int:
    """Gradient accumulation steps of `config` on this launch's processes.

    Raises UserError if the tokens per step do not divide, if the accelerate config sets another accumulation, if a
    tracker, DeepSpeed, bitsandbytes or torchao is needed but not installed, and if `check_config` does.
    """
    check_config()
    if _requested("DEEPSPEED") and find_spec("deepspeed") is None:
        raise UserError("the accelerate config sets DeepSpeed, which is not installed; run `pip install deepspeed`")
    if _requested("DEEPSPEED") and config.finetune.unfreeze_every:
        raise UserError(
            "finetune.unfreeze_every: DeepSpeed has one step count for all parameters, but unfrozen ones would start "
            "at 0; leave it out, or use accelerate_configs/fsdp2.yaml"
        )
    if _requested("DEEPSPEED") and config.tracking.layers:
        raise UserError(
            "tracking.layers: DeepSpeed gives no access to gradients and weights; leave it out, or use "
            "accelerate_configs/fsdp2.yaml"
        )
    if _requested("DEEPSPEED") and config.optim.name == "muon":
        raise UserError(NO_MUON_UNDER_ZERO)
    if config.optim.state == "8bit":
        check_8bit(zero=_requested("DEEPSPEED"))
    if config.lora.quantize and find_spec("bitsandbytes") is None:
        raise UserError(
            f"lora.quantize {config.lora.quantize}: bitsandbytes is not installed; run `pip install bitsandbytes`"
        )
    if config.lora.quantize and (_requested("DEEPSPEED") or _requested("FSDP")):
        raise UserError("lora.quantize: weights in 8 or 4 bits cannot be sharded; use accelerate_configs/ddp.yaml")
    for tracker in config.tracking.trackers:
        if tracker not in LOGGER_TYPE_TO_CLASS:
            near = did_you_mean(tracker, LOGGER_TYPE_TO_CLASS)
            raise UserError(f"tracking.trackers: accelerate has no tracker {tracker!r}{near}")
        if tracker in LoggerType.list() and tracker not in map(str, get_available_trackers()):
            raise UserError(f"tracking.trackers: {tracker} is not installed; run `pip install {tracker}`")
    try:
        accumulation = accumulation_steps(config, _world_size())
    except ValueError as error:
        raise UserError(str(error)) from None
    stated = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if stated not in ("auto", str(accumulation)):
        raise UserError(_conflict("gradient_accumulation_steps", stated, accumulation, "train.tokens_per_step"))
    return accumulation


def requested_precision() -> str:
    """The mixed precision of the accelerate config: no, bf16, fp16 or fp8."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")


def check_config() -> None:
    """Raises UserError if the accelerate config sets a precision or several processes that the run would not get."""
    precision = requested_precision()
    if precision == "fp8":
        raise UserError(
            "the accelerate config sets mixed_precision fp8, which is not supported: its layers replace weights of "
            "the optimizer, so they would neither train nor be saved; set bf16"
        )
    if precision == "fp16" and _on_the_cpu() and not _requested("DEEPSPEED"):
        raise UserError(
            "the accelerate config sets mixed_precision fp16, which accelerate ignores on a CPU; set bf16 or 'no'"
        )
    if _started_alone():
        raise UserError(
            "the accelerate config sets several processes, but accelerate started one: its MULTI_CPU and NO never "
            "start more; set distributed_type MULTI_GPU with use_cpu: true, as accelerate_configs/cpu_ddp.yaml does, "
            "or num_processes: 1"
        )


def _on_the_cpu() -> bool:
    requested = _requested("CPU") or os.environ.get("ACCELERATE_TORCH_DEVICE") == "cpu"
    return requested or not torch.accelerator.is_available()


def _started_alone() -> bool:
    """Whether accelerate should have started several processes but started only this one.

    Its launcher for one process sets MASTER_PORT if the config has several, but no WORLD_SIZE. A MASTER_PORT that the
    launcher itself got from its environment, as on clusters, proves nothing.
    """
    if "MASTER_PORT" not in os.environ or "WORLD_SIZE" in os.environ or "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return False
    try:
        return "MASTER_PORT" not in psutil.Process(os.getppid()).environ()
    except psutil.Error:
        return False


def _requested(kind: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{kind}", "false").lower() == "true"


def _conflict(key: str, stated: object, ours: object, knob: str) -> str:
    return (
        f"the accelerate config (or a DeepSpeed config it names) sets {key} {stated}, but {knob} of the recipe needs "
        f"{ours}: set auto there"
    )


def _world_size() -> int:
    return Mesh.from_environment().world_size


def _default_to_cpu() -> None:
    if _world_size() > 1 and not (torch.accelerator.is_available() or "ACCELERATE_TORCH_DEVICE" in os.environ):
        # The launcher does not pass `use_cpu` on; without it each process would start as the only one.
        os.environ["ACCELERATE_USE_CPU"] = "true"


def _check_processes(accelerator: Accelerator) -> None:
    if accelerator.num_processes != _world_size():
        raise UserError(
            f"the launcher started {_world_size()} processes, but accelerate sees {accelerator.num_processes}: each "
            "would work alone; check distributed_type and use_cpu in the accelerate config"
        )


def build_evaluation_accelerator() -> Accelerator:
    """Build the Accelerator of a process that only evaluates: device, precision and process group.

    Raises UserError if `check_config` does, and if accelerate sees fewer processes than the launcher started.
    """
    check_config()
    _default_to_cpu()
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=rendezvous.PEER_TIMEOUT)])
    _check_processes(accelerator)
    return accelerator


def build_accelerator(config: Config, run: RunFolder) -> Accelerator:
    """Build the Accelerator of this process, with the accumulation that the recipe's tokens per step imply.

    Raises UserError if `check_launch` does, and if this machine does not provide what the accelerate config sets.
    """
    accumulation = check_launch(config)
    _default_to_cpu()
    # No dataloader is prepared, so none may end an accumulation early.
    plugin = GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False)
    accelerator = Accelerator(
        gradient_accumulation_plugin=plugin,
        log_with=list(config.tracking.trackers) or None,
        project_config=ProjectConfiguration(project_dir=str(run.path), logging_dir=str(run.trackers)),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=rendezvous.PEER_TIMEOUT)],
    )
    _check_processes(accelerator)
    for kind in ("FSDP", "DEEPSPEED"):
        if _requested(kind) and accelerator.distributed_type != kind:
            raise UserError(
                f"the accelerate config sets {kind}, but this machine provides {accelerator.distributed_type.value} on "
                f"{accelerator.device.type}; use a config without it, such as accelerate_configs/cpu_ddp.yaml"
            )
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None:
        if fsdp.fsdp_version != 2:
            raise UserError("the accelerate config sets FSDP 1; set fsdp_version: 2 in its fsdp_config")
        if accelerator.mixed_precision == "bf16":
            # accelerate's own policy also sums gradients in bf16, and loses their small parts
            fsdp.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        plugin: Any = accelerator.deepspeed_plugin
        _configure_deepspeed(plugin.deepspeed_config, config, accumulation)
    if accelerator.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 where float32 remains
    return accelerator


def _configure_deepspeed(deepspeed_config: dict, config: Config, accumulation: int) -> None:
    """Set what DeepSpeed's engine does itself: accumulation, clipping, and the dtype of gradient sums."""
    # it calls functions that torch 2.13 has renamed, with a warning at every call
    warnings.filterwarnings("ignore", r"`torch\.distributed\..*is deprecated", FutureWarning)
    stage = deepspeed_config["zero_optimization"]["stage"]
    if stage not in (2, 3):
        raise UserError(f"DeepSpeed's ZeRO stage {stage} is not supported: use 2 or 3, or accelerate_configs/ddp.yaml")
    for name in ("offload_optimizer", "offload_param"):
        if (deepspeed_config["zero_optimization"].get(name) or {}).get("device") == "nvme":
            raise UserError(f"DeepSpeed's {name} to nvme is not supported, since its state cannot be saved: use cpu")
    ours = {
        "gradient_accumulation_steps": (accumulation, "train.tokens_per_step"),
        "gradient_clipping": (config.optim.max_grad_norm, "optim.max_grad_norm"),
    }
    if config.train.micro_batch_size == "auto":
        deepspeed_config["train_micro_batch_size_per_gpu"] = 1  # until the largest that fits is known
    else:
        ours["train_micro_batch_size_per_gpu"] = (config.train.micro_batch_size, "train.micro_batch_size")
    for key, (value, knob) in ours.items():
        stated = deepspeed_config.get(key, "auto")
        if stated not in ("auto", value):
            raise UserError(_conflict(key, stated, value, knob))
        deepspeed_config[key] = value
    # without these, gradients of a bf16 model are summed in bf16, and lose their small parts
    deepspeed_config.setdefault("communication_data_type", "fp32")
    deepspeed_config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")


def sum_over_ranks(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all processes, on all of them."""
    return cast(torch.Tensor, accelerator.reduce(tensor, "sum"))


def describe_device(device: torch.device) -> str:
    """The name of a device, such as `NVIDIA H200`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU with {threads} thread{'s' * (threads > 1)}"
    return device.type.upper()


def precision_of(accelerator: Accelerator) -> str:
    """fp32, bf16 or fp16."""
    return "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision


def describe_machine(accelerator: Accelerator) -> str:
    """One line such as `8 × NVIDIA H200, MULTI_GPU, bf16`."""
    kind = "" if accelerator.distributed_type == DistributedType.NO else f", {accelerator.distributed_type.value}"
    return f"{accelerator.num_processes} × {describe_device(accelerator.device)}{kind}, {precision_of(accelerator)}"


def requested_and_actual(accelerator: Accelerator) -> tuple[dict[str, str], dict[str, str]]:
    """Settings of the accelerate config that the launcher passes on, and those of this process, by name."""
    obtained = {
        "device": accelerator.device.type,
        "distributed type": accelerator.distributed_type.value,
        "precision": accelerator.mixed_precision,
        "dynamo": cast(Any, accelerator.state.dynamo_plugin).backend.value.lower(),
    }
    variables = {"precision": "ACCELERATE_MIXED_PRECISION", "dynamo": "ACCELERATE_DYNAMO_BACKEND"}
    return {name: os.environ[key] for name, key in variables.items() if os.environ.get(key)}, obtained


@contextmanager
def prepared_blocks(
    model: PreTrainedModel, accelerator: Accelerator, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """Compile blocks, loss and Muon's iteration, and checkpoint activations, if the accelerate config sets it.

    A context for `accelerator.prepare`, inside which accelerate's own versions are off. Compiled in place, block by
    block, parameters keep their names and one graph serves all blocks. Accelerate's checkpointing draws new dropout
    masks in the backward pass, which makes the gradient wrong; that of transformers repeats them.
    """
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    checkpointing = fsdp is not None and fsdp.activation_checkpointing
    if fsdp is not None and checkpointing:
        fsdp.activation_checkpointing = False
        # the name until transformers 5.2x
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    plugin: Any = accelerator.state.dynamo_plugin
    backend, plugin.backend = plugin.backend, DynamoBackend.NO
    if backend != DynamoBackend.NO:
        mode = None if plugin.mode == "default" else plugin.mode
        architecture, options = architecture_of(model), {"backend": backend.value.lower(), "mode": mode}
        for block in architecture.blocks(model):
            block.compile(**options)
        architecture.compile_loss(model, **options)
        if isinstance(optimizer, Muon):
            optimizer.compile(**options)
    try:
        yield
    finally:  # for the next model of this run, after unfreezing
        plugin.backend = backend
        if checkpointing and fsdp is not None:
            fsdp.activation_checkpointing = True


class StopRequest:
    """Request to end the run after the current step, by a signal or because train.max_time is up."""

    def __init__(self, max_seconds: float | None = None):
        self.reason: str | None = None
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds

    def on_any_process(self, accelerator: Accelerator) -> bool:
        """True on all processes once one of them should end. A collective: with several processes, all must call it."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.reason = self.reason or "train.max_time is up"
        if accelerator.num_processes == 1:
            return self.reason is not None
        if self.reason is not None:
            accelerator.set_trigger()
        return accelerator.check_trigger()


@contextmanager
def stop_on_signals(max_seconds: float | None = None) -> Iterator[StopRequest]:
    """Context that turns SIGTERM, SIGINT, SIGUSR1, SIGHUP and a time limit into a stop request.

    A second SIGINT interrupts at once. A SIGHUP that is ignored, as under nohup, stays ignored.
    """
    request = StopRequest(max_seconds)

    def handle(number, frame):
        if request.reason is None:  # a cluster may send several
            request.reason = f"received {signal.Signals(number).name}"
            with contextlib.suppress(OSError):  # the signal may interrupt a print()
                os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is not threading.main_thread():
        yield request  # Python allows handlers in the main thread only
        return
    names = ["SIGTERM", "SIGINT", "SIGUSR1"]  # the last is SLURM's warning; Windows has none, and no SIGHUP
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        names.append("SIGHUP")  # the terminal was closed
    before = {n: signal.signal(n, handle) for n in (getattr(signal, name, None) for name in names) if n is not None}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
