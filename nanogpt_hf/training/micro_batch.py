"""Memory of a step: a check before it, a dry-run step, the largest micro-batch that fits, and
advice.
"""

import contextlib
import dataclasses
import gc
import logging
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from nanogpt_hf.config.checks import divisors
from nanogpt_hf.config.schema import Config, replace_knobs
from nanogpt_hf.data.batches import Batches, blocks_read
from nanogpt_hf.data.blocks import Blocks
from nanogpt_hf.distributed.accelerate_config import requested_precision
from nanogpt_hf.distributed.accelerator import is_sharded, micro_batches_not_counted
from nanogpt_hf.distributed.full_state import reset_optimizer_state
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.distributed.mesh import Mesh, mesh_of
from nanogpt_hf.errors import NotEnoughMemoryError, UserError, is_out_of_memory
from nanogpt_hf.formatting import format_bytes
from nanogpt_hf.model.build import model_of_run
from nanogpt_hf.optim.state import local_part
from nanogpt_hf.planning.footprint import footprint, useless_checkpointing
from nanogpt_hf.planning.hardware import USABLE_MEMORY, free_memory
from nanogpt_hf.program import program
from nanogpt_hf.training.run import Run
from nanogpt_hf.training.step import train_step

logger = logging.getLogger(__name__)
# Each trial compiles the model again.
MAX_TRIALS = 3


def build_batches(
    config: Config, accelerator: Accelerator, blocks: Blocks, micro_batch_size: int
) -> Batches:
    """Build this rank's batches with the accelerator's current accumulation."""
    mesh = mesh_of(accelerator)
    accumulation, turn = accelerator.gradient_accumulation_steps, 1
    if groups := config.train.gradient_groups:  # see distributed/gradient_tree.py
        a_group = max(1, accumulation * mesh.dp_size // groups)
        turn = a_group if is_sharded(accelerator) else accumulation
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
        first_step=config.begins,
        read=blocks_read(config, config.begins),
    )


def dry_run_step(run: Run, micro_batch_size: int) -> None:
    """Take one step at learning rate 0, which changes nothing in the run, of one micro-batch per
    pipeline stage.

    It shows that a step fits in memory before anything is written. It also makes DDP rebuild its
    buckets, which happens after the first backward pass and changes how sums over three or more
    processes are rounded: without it the first step after a resume would differ from the same
    step of an uninterrupted run.
    """
    accelerator, optimizer = run.accelerator, run.optimizer
    scaler = accelerator.scaler  # of fp16
    scale = scaler and scaler.state_dict()
    batches = build_batches(run.config, accelerator, run.data.train, micro_batch_size)
    try:
        with micro_batches_not_counted(accelerator, run.mesh.pp_size):
            step = run.config.begins
            train_step(dataclasses.replace(run, batches=batches), step, learning_rate=0.0)
    except Exception:  # too little memory: a smaller size may be tried
        run.model.zero_grad()
        raise
    reset_optimizer_state(accelerator, optimizer)
    if scaler and scale:
        scaler.load_state_dict(scale)


def choose_micro_batch(run: Run, *, resume: bool = False) -> None:
    """Take a dry-run step; turn `auto` into the largest micro-batch size that fits, with the
    accumulation it implies.

    A resumed run keeps the size that was found before if that divides the step, so that it
    continues bit for bit even if more memory is free now.
    """
    config, accelerator = run.config, run.accelerator
    size = config.train.micro_batch_size
    if size != "auto":
        dry_run_step(run, size)
        return
    sequences = config.train.tokens_per_step // (config.data.block_size * run.mesh.dp_size)
    previous: list[Any] = [None]
    if resume and run.mesh.is_main:  # the run's recipe has the number
        recipe = run.folder.known_recipe()
        previous = [recipe and recipe.train.micro_batch_size]
    size = broadcast_object_list(previous, from_process=0)[0]
    sizes = [size for size in divisors(sequences) if run.mesh.fills_pipeline(sequences // size)]
    if size in sizes:
        dry_run_step(run, size)
    else:
        # a checkpoint's copy, weights and at most AdamW's state, is allocated after the search
        reserved = 0
        if accelerator.device.type == "cpu":
            for parameter in run.model.parameters():
                reserved += local_part(parameter).numel() * (12 if parameter.requires_grad else 4)
        trial = partial(dry_run_step, run)
        size = largest_micro_batch(accelerator, sizes, trial, _estimate_of(run), reserved)
    accelerator.gradient_accumulation_steps = sequences // size
    run.config = replace_knobs(config, {"train.micro_batch_size": size})
    run.batches = build_batches(run.config, accelerator, run.data.train, size)


def _estimate_of(run: Run) -> Callable[[int], float]:
    """A function that estimates the peak bytes of a step on this process by its micro-batch size.

    A sharded model is taken as whole, so that the first trial is rather too small.
    """
    launch = Launch(
        device=run.accelerator.device.type,
        precision=str(run.accelerator.mixed_precision),
        checkpointing=run.mesh.checkpointing,
    )
    model = model_of_run(run.config, run.data.vocab_size)
    step = _one_micro_batch(run.config)

    def estimated(size: int) -> float:
        step["micro_batch_size"] = size
        return footprint(model, launch, **step).peak

    return estimated


def check_memory(config: Config, accelerator: Accelerator, vocab_size: int) -> None:
    """Raises UserError if a step needs more memory than this machine has free; a collective before
    a model is built. Logs a warning if activation checkpointing saves none.

    It raises only with the model on CPUs: a process that takes more than there is would be killed
    without a line.
    """
    model = model_of_run(config, vocab_size)
    on_cpu = accelerator.device.type == "cpu"
    launch = Launch(
        device=accelerator.device.type,
        precision=str(accelerator.mixed_precision),
        checkpointing=mesh_of(accelerator).checkpointing,
    )
    step = _one_micro_batch(config)
    if accelerator.is_main_process and (line := useless_checkpointing(model, launch, **step)):
        logger.warning(line)
    # whose frozen weights are not counted in 8 bits
    if not on_cpu or config.lora.quantize:
        return
    needed = 4.0 * model.num_parameters()  # a sharded model, too, is built whole in each process
    if not is_sharded(accelerator):
        needed = footprint(model, launch, **step).peak
    processes = mesh_of(accelerator).local_world_size
    free = min(_gather(accelerator, (free_memory() + psutil.swap_memory().free) // processes))
    if needed > free:
        each = f" for each of {processes} processes" if processes > 1 else ""
        raise UserError(
            f"the run needs about {format_bytes(needed)} of memory and {format_bytes(free)} are "
            f"free{each}; train a smaller model, or on a machine with more memory: "
            f"{memory_advice(config, vocab_size, launch)}"
        )


def _one_micro_batch(config: Config) -> dict[str, Any]:
    return {
        "micro_batch_size": config.train.min_micro_batch_size,
        "block_size": config.data.block_size,
        "accumulation": 1,
        "optim": config.optim,
    }


def largest_micro_batch(
    accelerator: Accelerator,
    sizes: list[int],
    dry_run: Callable[[int], None],
    estimated: Callable[[int], float],
    reserved: int = 0,
) -> int:
    """The largest of `sizes`, smallest first, for which `dry_run` fits in memory, by at most
    MAX_TRIALS dry runs, each with a line.

    All processes call it and get the same answer: the one with the least memory decides. The
    first trial is the largest size that fits by the `estimated` bytes of a step. On one GPU an
    out-of-memory error is caught and a smaller size tried; several processes could hang, and one
    on a CPU is killed, so they begin with half of the memory. `reserved`: bytes of this process
    that must stay free. Raises UserError on machines without a memory counter.
    """
    is_recoverable = accelerator.num_processes == 1 and accelerator.device.type == "cuda"
    share = 1.0 if is_recoverable else 0.5
    needed: dict[int, int] = {}
    failed: list[int] = []
    for trial in range(1, MAX_TRIALS + 1):
        available = min(_gather(accelerator, available_memory(accelerator) - reserved))
        size = next_size(sizes, needed, failed, available, estimated, share)
        if size is None:
            break
        reset_peak_memory(accelerator)
        text = f"micro_batch_size auto: trial {trial} with {size}"
        try:
            dry_run(size)
            needed[size] = max(_gather(accelerator, peak_memory(accelerator.device)))
            logger.info(f"{text} takes {format_bytes(needed[size])} of {format_bytes(available)}")
        except Exception as error:
            is_last = trial == MAX_TRIALS and not needed
            if accelerator.num_processes > 1 or is_last or not is_out_of_memory(error):
                raise
            failed.append(size)
            logger.info(f"{text} does not fit in {format_bytes(available)}")
        gc.collect()
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
        torch.compiler.reset()  # a graph for all sizes would be slower than one for the last size
    return max(needed)


def next_size(
    sizes: list[int],
    needed: dict[int, int],
    failed: list[int],
    available: int,
    estimated: Callable[[int], float],
    share: float = 1.0,
) -> int | None:
    """The next micro-batch size to try; None if no larger one would fit.

    `needed` are the measured bytes of sizes that fitted, `failed` the sizes that did not. The
    first one may take `share` of the available memory by its estimate.
    """
    possible = [size for size in sizes if size < min([*failed, sizes[-1] + 1])]
    if not possible:
        return None
    if not needed:
        # The estimate was too low if a size has failed.
        limit = estimated(min(failed)) / 2 if failed else available * share
        return max((size for size in possible if estimated(size) <= limit), default=possible[0])
    best = max(needed)

    def predicted(size: int) -> float:
        """Memory is linear in the micro-batch size: by two measurements, or one and the slope of
        the estimate.
        """
        if len(needed) > 1:
            before = sorted(needed)[-2]
            slope = max(0, needed[best] - needed[before]) / (best - before)
            return needed[best] + slope * (size - best)
        error = needed[best] / estimated(best)
        return needed[best] + error * (estimated(size) - estimated(best))

    larger = (size for size in possible if size > best and predicted(size) <= available)
    return max(larger, default=None)


def _gather(accelerator: Accelerator, count: int) -> list[int]:
    counts: Any = accelerator.gather(torch.tensor([count], device=accelerator.device))
    return counts.tolist()


def available_memory(accelerator: Accelerator) -> int:
    """Bytes that this process may use in total, including those it uses now."""
    if accelerator.device.type == "cuda":
        return int(USABLE_MEMORY * (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()))
    processes = mesh_of(accelerator).local_world_size
    return int(USABLE_MEMORY * (free_memory() / processes + psutil.Process().memory_info().rss))


def reset_peak_memory(accelerator: Accelerator) -> None:
    if accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        device = accelerator.device.type
        raise UserError(
            f"train.micro_batch_size: auto cannot measure memory on this machine's {device}; set "
            "a number"
        ) from None


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process since `reset_peak_memory`: tensors on a GPU, else RAM; on MPS the
    bytes in use now.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    with contextlib.suppress(OSError, IndexError):  # a Mac has no /proc
        # the resource module's number keeps the peak of the process that started this one
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextlib.contextmanager
def one_line_for_too_little_memory(config: Config, vocab_size: int) -> Iterator[None]:
    """Context that turns an out-of-memory error into one line of `memory_advice`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        stated = Mesh.from_environment()
        launch = Launch(precision=requested_precision(), checkpointing=stated.checkpointing)
        advice = memory_advice(config, vocab_size, launch)
        raise NotEnoughMemoryError(f"out of memory: {advice}") from error


def memory_advice(config: Config, vocab_size: int, launch: Launch) -> str:
    """What takes the memory of a step, as estimated, and knobs that reduce it."""
    model = model_of_run(config, vocab_size)
    needed = footprint(model, launch, **_one_micro_batch(config))
    parts = needed.phases[needed.peak_phase].items()
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
    remedies = ["an accelerate config that shards the model over devices"]
    if not launch.checkpointing:
        remedies.insert(0, "fsdp_activation_checkpointing in the accelerate config")
    if config.optim.name == "adamw" and config.optim.state != "8bit":
        remedies.insert(0, "optim.state 8bit")
    if (size := config.train.min_micro_batch_size) > 1:
        remedies.insert(0, f"train.micro_batch_size {size // 2} (same tokens per step)")
    return f"{sizes}; less with {', '.join(remedies)}; `{program()} estimate` shows how much"
