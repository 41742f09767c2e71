"""How a step divides into micro-batches of processes: accumulation, and sizes that fit."""

import math

from nanogpt_hf.config.schema import Config
from nanogpt_hf.errors import UserError


def accumulation_steps(config: Config, num_processes: int) -> int:
    """Micro-batches that each of `num_processes` data-parallel processes runs in one optimizer
    step; auto counts as 1.

    Raises UserError, with the product and the nearest tokens_per_step that divide, if the
    result is not whole, and if processes have unequal shares of the gradient groups.
    """
    if message := uneven_step(config, num_processes):
        raise UserError(f"train.tokens_per_step: {message}")
    train = config.train
    if (groups := train.gradient_groups) and groups % num_processes:
        raise UserError(
            f"train.gradient_groups: {num_processes} processes do not divide {groups} groups; start"
            " 1, 2, 4, ... up to that many"
        )
    return train.tokens_per_step // (
        train.min_micro_batch_size * config.data.block_size * num_processes
    )


def uneven_step(config: Config, processes: int = 1) -> str:
    """The message if micro-batches do not add up to a step, with the product and values that
    would; otherwise ''.
    """
    tokens = config.train.tokens_per_step
    block = config.data.block_size
    micro = config.train.min_micro_batch_size
    unit = micro * block * processes
    if tokens % unit == 0:
        return ""
    # The nearest products below and above; there is none below if one micro-batch is too large.
    below = tokens // unit * unit
    shared = f" × {processes} processes" if processes > 1 else ""
    nearest = f"{below:,} or {below + unit:,}" if below else f"{unit:,}"
    return (
        f"{tokens:,} is not a multiple of train.micro_batch_size {micro} × data.block_size {block}"
        f"{shared} = {unit:,}; nearest: {nearest}"
    )


def divisors(number: int) -> list[int]:
    """All divisors, smallest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
