"""Rehearse a run at true size: the product's own build and training step as one of N processes, on
tensors without values, with collectives that move nothing (bench/fakes.py).

It finds the peak of the memory, the bytes of each kind of collective, and the places where the
host would wait for a device. The run's device is a second CPU that only the fakes know, with what
differs on a GPU replaced.
"""

import re
import traceback
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

from accelerate import state
from transformers import PreTrainedConfig

from nanogpt_hf.bench.fakes import (
    DEVICE,
    Meter,
    one_process,
    own_line,
    teacher_without_values,
    without_values,
)
from nanogpt_hf.bench.workload import communicated_bytes, synthetic_data
from nanogpt_hf.config.finetune import frozen_layers_at
from nanogpt_hf.config.schema import Config, get_value, replace_knobs
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.distributed.accelerate_config import check_launch
from nanogpt_hf.distributed.accelerator import build_accelerator
from nanogpt_hf.distributed.context_parallel import needs_ring
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError
from nanogpt_hf.evaluation.loss import eval_mode
from nanogpt_hf.formatting import format_bytes
from nanogpt_hf.generate import generate_completions
from nanogpt_hf.methods.distillation import read_teacher_config
from nanogpt_hf.methods.run import Run
from nanogpt_hf.model.experts import shapes_only
from nanogpt_hf.planning.estimate import planned_model
from nanogpt_hf.planning.kept_bytes import GpuKernels
from nanogpt_hf.planning.steps import sampling_of
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.build import build_at
from nanogpt_hf.training.step import take_step

# Knobs whose run reads weights before its first step.
NOT_REHEARSED = ("lora.quantize",)
# The limit of micro-batches in a rehearsed step. A pipeline has one more than it has stages.
MICRO_BATCHES = 2


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
    sampling: int | None = None  # bytes at the peak of sampling answers, if the run samples

    def lines(self) -> list[str]:
        """Format as lines of text."""
        sent = [f"{kind} {format_bytes(size)}" for kind, size in self.sent.items()]
        step = f"a step with accumulation {self.micro_batches}, not compiled"
        memory = f"{format_bytes(self.state)} before it, {format_bytes(self.peak)} at its peak"
        return [
            f"rehearsed as {self.process}, {step}:",
            f"  memory: {memory}",
            *([f"  sampling answers: {format_bytes(self.sampling)}"] if self.sampling else []),
            f"  sends: {', '.join(sent) or 'nothing'}",
            *(f"  the host waits for a value ({n} ×): {line}" for line, n in self.waits.items()),
            *["  the host waits for no value"] * (not self.waits),
        ]


def rehearse(config: Config, launch: Launch, base: PreTrainedConfig | None = None) -> Rehearsal:
    """Build a run of `config` and take two steps of it as the first process of `launch`; the second
    is measured. Of a pipeline it is the stage with the highest peak. `base` is the config of the
    model to fine-tune.

    Raises UserError for a run that cannot be rehearsed, or if tensors on two devices meet.
    """
    for key in NOT_REHEARSED:
        if value := get_value(config, key):
            raise UserError(
                f"--rehearse: {key} {value}: it reads weights, and a rehearsal has no values; "
                "leave --rehearse out"
            )
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
    if base is not None:
        # Of layers that unfreeze, the last step trains the most.
        frozen = frozen_layers_at(config.train.max_steps - 1, config.finetune)
        knobs |= {
            "finetune.freeze_layers": None if frozen < 0 else frozen,
            "finetune.unfreeze_every": None,
        }
    # A run of it alone, without the other stages of its recipe.
    config = replace(replace_knobs(config, knobs), full_recipe=None, first_step=0)
    # What each stage has sent to the next, which is rehearsed after it.
    shapes: dict[type, Any] = {}
    try:
        stages = range(launch.pp_size)
        found = [_rehearse(config, launch, index, shapes, base) for index in stages]
    except RuntimeError as error:
        # torch has a class for it from 2.13 on only.
        if not re.search("two (different )?devices", str(error)):
            raise
        line = own_line(traceback.extract_tb(error.__traceback__))
        raise UserError(f"--rehearse: tensors of the CPU and of the device meet: {line}") from error
    return max(found, key=lambda rehearsal: rehearsal.peak)


def _rehearse(
    config: Config,
    launch: Launch,
    index: int,
    shapes: dict[type, Any],
    base: PreTrainedConfig | None,
) -> Rehearsal:
    """Rehearse the first process of pipeline stage `index`."""
    meter = Meter()
    rank = index * launch.world_size // launch.pp_size
    with one_process(launch, meter, rank, shapes, base):
        here = check_launch(config, Mesh.from_environment())
        accelerator = build_accelerator(here, RunFolder("runs"))
        cast(Any, accelerator.state).device = state.PartialState().device = DEVICE
        # A model to fine-tune has the rows of its own vocabulary.
        vocab_size = None if base is None else base.vocab_size
        data = synthetic_data(config, vocab_size)
        kernels = nullcontext() if launch.on_cpu else GpuKernels()
        with without_values(meter), kernels, shapes_only():
            if name := config.distill.teacher:
                teacher = teacher_without_values(read_teacher_config(name), config, launch)
                data = replace(data, teacher=teacher)
            run = build_at(config, accelerator, cast(PreparedData, data), None, None)
            take_step(run, 0, learning_rate=1e-4)
            # The first step has made the optimizer state; the second is measured.
            before = meter.peak = meter.now
            meter.waits.clear()
            sent = communicated_bytes(lambda: take_step(run, 1, learning_rate=1e-4))
            peak = meter.peak
            waits = dict(meter.waits)
            meter.peak = meter.now
            if config.rl.task:
                _sample(run)
            sampling = meter.peak if config.rl.task else None
    process = "the first process"
    if launch.pp_size > 1:
        process += f" of stage {index + 1} of {launch.pp_size}, which needs the most"
    micro_batches = accelerator.gradient_accumulation_steps
    return Rehearsal(process, micro_batches, before, peak, sent, waits, sampling)


def _sample(run: Run) -> None:
    """Sample the last two tokens of as many answers as a process samples at once, and then two
    tokens of the prompts that take their places.
    """
    size = sampling_of(run.config, run.batches.micro_batch_size)
    long = [0] * (size.columns - 2)
    # Different prompts are read together, the same one once.
    prompts = [[number % size.prompts] * size.prompt for number in range(size.rows)]
    rows = [long] * size.rows + prompts
    model: Any = run.accelerator.unwrap_model(run.model)
    with eval_mode(run.model), run.accelerator.autocast():
        generate_completions(
            model,
            rows,
            seeds=range(len(rows)),
            limits=[2] * len(rows),
            temperature=run.config.rl.temperature,
            end_ids=(),
            batch_size=size.rows,
        )
