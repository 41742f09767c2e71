"""Batches of a step and the memory that they need: a check before the model is built, a dry-run
step, and advice.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from nanogpt_hf.config.optimizers import OPTIMIZERS
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.stages import naming, stages_of
from nanogpt_hf.config.step_size import divisors
from nanogpt_hf.data.batches import Batches, blocks_read
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.distributed.full_state import reset_optimizer_state
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.mesh import mesh_of
from nanogpt_hf.distributed.updates import micro_batches_not_counted
from nanogpt_hf.errors import NotEnoughMemoryError, UserError, is_out_of_memory
from nanogpt_hf.formatting import format_bytes
from nanogpt_hf.methods.run import Run
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.build import model_of_run
from nanogpt_hf.planning.footprint import footprint, useless_checkpointing
from nanogpt_hf.planning.hardware import free_memory
from nanogpt_hf.planning.steps import footprint_arguments
from nanogpt_hf.program import program
from nanogpt_hf.training.step import train_step

logger = logging.getLogger(__name__)


def build_batches(
    config: Config, accelerator: Accelerator, blocks: Blocks, micro_batch_size: int
) -> Batches:
    """Build this rank's batches with the accelerator's current accumulation."""
    # Accelerate has the accumulation, which follows from tokens per step.
    mesh = mesh_of(accelerator)
    accumulation = accelerator.gradient_accumulation_steps
    turn = 1
    # Gradient groups sum consecutive sequences, so a process takes several in a row.
    if groups := config.train.gradient_groups:
        a_group = max(1, accumulation * mesh.dp_size // groups)
        turn = a_group if mesh.is_sharded else accumulation
    return Batches(
        blocks,
        order=config.data.order,
        seed=config.train.seed,
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        pin_memory=accelerator.device.type == "cuda",
        turn=turn,
        first_step=config.first_step,
        read=blocks_read(config, config.first_step),
    )


@contextlib.contextmanager
def without_a_trace(run: Run, micro_batches: int) -> Iterator[None]:
    """Context for steps of `micro_batches` micro-batches at learning rate 0, which change nothing
    in the run.
    """
    accelerator = run.accelerator
    # The scaler of fp16 halves its scale after an overflow, also after one in a dry-run step.
    scaler = accelerator.scaler
    scale = scaler and scaler.state_dict()
    try:
        with micro_batches_not_counted(accelerator, micro_batches):
            yield
    except Exception:
        # If memory was too little, a smaller size may be tried: it must not add to gradients.
        run.model.zero_grad()
        raise
    # At learning rate 0 no weight changed, but the optimizer has averages of the gradient.
    reset_optimizer_state(accelerator, run.optimizer)
    if scaler and scale:
        scaler.load_state_dict(scale)


def dry_run_step(run: Run, micro_batch_size: int) -> None:
    """Take one step at learning rate 0, which changes nothing in the run, of as many micro-batches
    as it takes to need the memory of a whole step.

    It shows that a step fits in memory before anything is written. It also makes DDP rebuild its
    buckets, which happens after the first backward pass and changes how sums over three or more
    processes are rounded: without it the first step after a resume would differ from the same
    step of an uninterrupted run.
    """
    accelerator = run.accelerator
    mesh = run.mesh
    config = run.config
    sequences = config.train.tokens_per_step // (config.data.block_size * mesh.dp_size)
    count = sequences // micro_batch_size
    # The second micro-batch finds the gradients of the first in memory, and later ones need no
    # more. A pipeline stage has a buffer for every micro-batch of the step.
    if mesh.pp_size == 1:
        count = min(count, 2)
    with without_a_trace(run, count):
        batches = build_batches(config, accelerator, run.data.train, micro_batch_size)
        dry_run = dataclasses.replace(run, batches=batches)
        train_step(dry_run, config.first_step, learning_rate=0.0)


def check_memory(config: Config, accelerator: Accelerator, vocab_size: int) -> None:
    """Raises UserError if a step of one of the stages needs more memory than this machine has free;
    a collective before a model is built. Logs a warning if activation checkpointing saves none.

    It raises only with the model on CPUs: there the system kills a process that takes more than
    there is, and a kill leaves no line. A GPU runs out of memory in the dry-run step, with one.
    """
    mesh = mesh_of(accelerator)
    # The estimate has no frozen weights in 8 bits.
    is_limited = mesh.on_cpu and not config.lora.quantize
    if not (is_limited or mesh.checkpointing):
        return
    # Stages train the same model, with batches of their own.
    model = model_of_run(config, vocab_size)
    for stage in stages_of(config):
        with naming(stage):
            launch = launch_of_one(mesh)
            step = one_micro_batch(stage.config)
            if mesh.is_main and (line := useless_checkpointing(model, launch, **step)):
                logger.warning(line)
            if is_limited:
                _check_free_memory(stage.config, model, accelerator)


def _check_free_memory(config: Config, model: PreTrainedModel, accelerator: Accelerator) -> None:
    """Raises UserError if a step on this machine's CPUs needs more memory than is free."""
    mesh = mesh_of(accelerator)
    processes = mesh.local_world_size
    unused = (free_memory() + psutil.swap_memory().free) // processes
    free = min(gather_counts(accelerator, unused))
    if mesh.is_sharded:
        # Each process builds the whole model in float32 before it keeps its shard.
        needed = 4.0 * model.num_parameters()
    else:
        step = one_micro_batch(config)
        tokens = step["micro_batch_size"] * step["sequences"] * config.data.block_size
        needed = architecture_of(model).memory_bound(model, tokens, config.data.block_size)
        teacher = step["teacher"]
        # Most machines have more than the bound, which knows no teacher. Only the others need the
        # estimate, which runs the model without values.
        if needed > free or teacher:
            launch = launch_of_one(mesh)
            needed = footprint(model, launch, **step).peak
            # It is in memory already.
            needed -= teacher.kept(launch) if teacher else 0
    if needed > free:
        each = f" for each of {processes} processes" if processes > 1 else ""
        raise UserError(
            f"the run needs about {format_bytes(needed)} of memory and {format_bytes(free)} are "
            f"free{each}; train a smaller model, or on a machine with more memory: "
            f"{memory_advice(config, model, mesh)}"
        )


def launch_of_one(launch: Launch) -> Launch:
    """Device, precision and checkpointing of a process, as if it held the model alone."""
    return Launch(
        device=launch.device, precision=launch.precision, checkpointing=launch.checkpointing
    )


def one_micro_batch(config: Config) -> dict[str, Any]:
    """Return the arguments of `footprint` for a step of one micro-batch, the smallest step."""
    one = {"micro_batch_size": config.train.min_micro_batch_size, "accumulation": 1}
    return footprint_arguments(config) | one


def gather_counts(accelerator: Accelerator, count: int) -> list[int]:
    """A number of each process, on all of them."""
    counts: Any = accelerator.gather(torch.tensor([count], device=accelerator.device))
    return counts.tolist()


@contextlib.contextmanager
def one_line_for_too_little_memory(
    config: Config, vocab_size: int, launch: Launch
) -> Iterator[None]:
    """Context that turns an out-of-memory error into one line of `memory_advice`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        advice = memory_advice(config, model_of_run(config, vocab_size), launch)
        raise NotEnoughMemoryError(f"out of memory: {advice}") from error


def memory_advice(config: Config, model: PreTrainedModel, launch: Launch) -> str:
    """Return the estimated parts of a step's memory, and knobs that reduce them."""
    needed = footprint(model, launch_of_one(launch), **one_micro_batch(config))
    # The parts of the phase with the most bytes, without empty ones.
    parts = needed.phases[needed.peak_phase].items()
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
    # What costs least comes first.
    remedies = []
    if (size := config.train.min_micro_batch_size) > 1:
        # The next smaller size that divides the step as this one does.
        *_, smaller, _ = divisors(size)
        remedies.append(f"train.micro_batch_size {smaller} (same tokens per step)")
    if config.optim.state != "8bit" and "8bit" in OPTIMIZERS[config.optim.name].states:
        remedies.append("optim.state 8bit")
    if not launch.checkpointing:
        remedies.append("fsdp_activation_checkpointing in the accelerate config")
    remedies.append("an accelerate config that shards the model over devices")
    return f"{sizes}; less with {', '.join(remedies)}; `{program()} estimate` shows how much"
