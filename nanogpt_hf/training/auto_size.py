"""train.micro_batch_size auto: the largest size that fits in memory, found by dry-run steps."""

import gc
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.config.step_size import divisors
from nanogpt_hf.distributed.mesh import mesh_of
from nanogpt_hf.errors import UserError, is_out_of_memory
from nanogpt_hf.formatting import format_bytes
from nanogpt_hf.methods.run import Run
from nanogpt_hf.model.build import model_of_run
from nanogpt_hf.optim.state import local_part
from nanogpt_hf.planning.footprint import footprint
from nanogpt_hf.planning.hardware import USABLE_MEMORY, free_memory, peak_memory
from nanogpt_hf.planning.memory import SAMPLING, start_model_bytes
from nanogpt_hf.planning.steps import footprint_arguments
from nanogpt_hf.runs.recipe import known_recipe
from nanogpt_hf.training.micro_batch import (
    build_batches,
    dry_run_step,
    gather_counts,
    launch_of_one,
    one_micro_batch,
)

logger = logging.getLogger(__name__)
# Each trial compiles the model again, so there are few.
MAX_TRIALS = 3


def choose_micro_batch(run: Run, *, resume: bool) -> None:
    """Take dry-run steps to find the micro-batch size; change the recipe, the accumulation and the
    batches of `run` to it.

    A resumed run keeps the size that was found before if that divides the step, so that it
    continues bit for bit even if more memory is free now.
    """
    config = run.config
    sequences = config.train.tokens_per_step // (config.data.block_size * run.mesh.dp_size)
    # Sizes that divide the sequences of a process in a step, and fill a pipeline.
    sizes = [size for size in divisors(sequences) if run.mesh.fills_pipeline(sequences // size)]
    size = _size_before(run) if resume else None
    if size in sizes:
        dry_run_step(run, size)
    else:
        sizes = _that_can_sample(run, sizes)
        size = largest_micro_batch(
            run.accelerator, sizes, partial(dry_run_step, run), _estimate_of(run), _reserved(run)
        )
    run.accelerator.gradient_accumulation_steps = sequences // size
    run.config = replace_knobs(config, {"train.micro_batch_size": size})
    run.batches = build_batches(run.config, run.accelerator, run.data.train, size)


def _size_before(run: Run) -> int | None:
    """Return the size in the recipe of the run folder, the same on all processes; None if it is
    lost.
    """
    # The main process alone reads the folder, which others may not see.
    found: list[int | None] = [None]
    if run.mesh.is_main and (recipe := known_recipe(run.folder)):
        found = [recipe.train.min_micro_batch_size]
    return broadcast_object_list(found, from_process=0)[0]


def _reserved(run: Run) -> int:
    """Bytes of this process that have to stay free, since they are allocated after the search: the
    model that the run started from, if its method keeps it, and a checkpoint's copy.
    """
    size = 0
    if footprint_arguments(run.config)["keeps_start"]:
        model: Any = run.accelerator.unwrap_model(run.model)
        size = start_model_bytes(model)
    if run.accelerator.device.type != "cpu":
        return size
    for parameter in run.model.parameters():
        # float32 weights, and at most two averages of AdamW
        each = 4 + 8 * parameter.requires_grad
        size += each * local_part(parameter).numel()
    return size


def _that_can_sample(run: Run, sizes: list[int]) -> list[int]:
    """Leave out the sizes with which sampling would need more memory than there is, by its
    estimate; the smallest one stays. A dry-run step samples nothing.
    """
    config = run.config
    # With rl.batch_size the size of a micro-batch does not matter.
    if not config.rl.task or config.rl.batch_size:
        return sizes
    model = model_of_run(config, run.data.vocab_size)
    step = one_micro_batch(config)

    def needed(size: int) -> float:
        step["micro_batch_size"] = size
        # As it is sharded, since no trial corrects the estimate.
        return sum(footprint(model, run.mesh, **step).phases[SAMPLING].values())

    free = min(gather_counts(run.accelerator, available_memory(run.accelerator)))
    fitting = [size for size in sizes if needed(size) <= free] or sizes[:1]
    if len(fitting) < len(sizes):
        logger.info(
            f"micro_batch_size auto: at most {fitting[-1]}, since answers are sampled as many at "
            f"once, in {format_bytes(free)}; rl.batch_size sets their number apart"
        )
    return fitting


def _estimate_of(run: Run) -> Callable[[int], float]:
    """A function that estimates the peak bytes of a step on this process by its micro-batch size.

    A sharded model is taken as whole, so that the first trial is rather too small.
    """
    # Sizes of one launch differ by activations only, so the model is built once.
    launch = launch_of_one(run.mesh)
    model = model_of_run(run.config, run.data.vocab_size)
    # What is measured is a step alone.
    step = one_micro_batch(run.config) | {"keeps_start": False, "sampling": None}

    def estimated(size: int) -> float:
        step["micro_batch_size"] = size
        return footprint(model, launch, **step).peak

    return estimated


def largest_micro_batch(
    accelerator: Accelerator,
    sizes: list[int],
    dry_run: Callable[[int], None],
    estimated: Callable[[int], float],
    reserved: int = 0,
) -> int:
    """Return the largest of `sizes`, smallest first, for which `dry_run` fits in memory.

    All processes call it and get the same answer: the one with the least memory decides. On one
    GPU an out-of-memory error is caught and a smaller size tried; several processes could hang,
    and one on a CPU is killed, so they begin with half of the memory. `reserved`: bytes of this
    process that must stay free. Raises UserError on machines without a memory counter.
    """
    # An error on one process of several leaves the others in a collective.
    is_recoverable = accelerator.num_processes == 1 and accelerator.device.type == "cuda"

    def available() -> int:
        return min(gather_counts(accelerator, available_memory(accelerator) - reserved))

    # The process that needs the most decides.
    def measure(size: int) -> int | None:
        reset_peak_memory(accelerator)
        try:
            dry_run(size)
            return max(gather_counts(accelerator, peak_memory(accelerator.device)))
        except Exception as error:
            if accelerator.num_processes > 1 or not is_out_of_memory(error):
                raise
            # The error must not be kept: its traceback holds the tensors of the step.
            return None

    size = find_size(sizes, available, measure, estimated, 1.0 if is_recoverable else 0.5)
    if size is None:
        raise torch.OutOfMemoryError("a step does not fit with any micro-batch size that was tried")
    return size


def find_size(
    sizes: list[int],
    available: Callable[[], int],
    measure: Callable[[int], int | None],
    estimated: Callable[[int], float],
    share: float,
) -> int | None:
    """Return the largest of `sizes`, smallest first, that was measured to fit, by at most
    MAX_TRIALS trials, each with a line in the log; None if none did.

    `available` are the bytes that a step may take now. `measure` returns the bytes that a step
    of a size took, or None if it did not fit. `next_size` explains the rest.
    """
    # Bytes of the sizes that fitted, and the sizes that did not.
    needed: dict[int, int] = {}
    failed: list[int] = []
    for trial in range(1, MAX_TRIALS + 1):
        free = available()
        size = next_size(sizes, needed, failed, free, estimated, share)
        if size is None:
            break
        taken = measure(size)
        text = f"micro_batch_size auto: trial {trial} with {size}"
        if taken is None:
            failed.append(size)
            logger.info(f"{text} does not fit in {format_bytes(free)}")
        else:
            needed[size] = taken
            logger.info(f"{text} takes {format_bytes(taken)} of {format_bytes(free)}")
        _clean_up()
    return max(needed, default=None)


def next_size(
    sizes: list[int],
    needed: dict[int, int],
    failed: list[int],
    available: int,
    estimated: Callable[[int], float],
    share: float,
) -> int | None:
    """Return the next micro-batch size to try; None if no larger one would fit.

    `needed` are the measured bytes of sizes that fitted, `failed` the sizes that did not. The
    first size is the largest that takes `share` of the available memory by its estimate.
    """
    smallest_failed = min(failed, default=sizes[-1] + 1)
    # What is as large as a size that did not fit does not fit.
    possible = [size for size in sizes if size < smallest_failed]
    if not possible:
        return None
    if not needed:
        limit = available * share
        if failed:
            # The estimate was too low, so go down to half of it.
            limit = estimated(smallest_failed) / 2
        return max((size for size in possible if estimated(size) <= limit), default=possible[0])
    best = max(needed)

    # Memory is linear in the micro-batch size. Two measurements give the line; one gives a point,
    # and the estimate its slope, in proportion.
    def predicted(size: int) -> float:
        if len(needed) > 1:
            before = sorted(needed)[-2]
            slope = max(0, needed[best] - needed[before]) / (best - before)
            return needed[best] + slope * (size - best)
        error = needed[best] / estimated(best)
        return needed[best] + error * (estimated(size) - estimated(best))

    # Without a larger size that would fit, the search ends with the best one.
    larger = (size for size in possible if size > best and predicted(size) <= available)
    return max(larger, default=None)


def _clean_up() -> None:
    """Free what a trial left, so that the next one is measured alone."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    # A graph for all sizes would be slower than one for the last size.
    torch.compiler.reset()


def available_memory(accelerator: Accelerator) -> int:
    """Bytes that this process may use in total, including those it uses now."""
    if accelerator.device.type == "cuda":
        return int(USABLE_MEMORY * (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()))
    # The processes of a machine share what is free.
    processes = mesh_of(accelerator).local_world_size
    return int(USABLE_MEMORY * (free_memory() / processes + psutil.Process().memory_info().rss))


def reset_peak_memory(accelerator: Accelerator) -> None:
    """Make `peak_memory` begin again. Raises UserError if this machine has no such counter."""
    if accelerator.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        # Linux sets the process's peak, VmHWM, to what it uses now: man 5 proc, clear_refs.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        device = accelerator.device.type
        raise UserError(
            f"train.micro_batch_size: auto cannot measure memory on this machine's {device}; set "
            "a number"
        ) from None
