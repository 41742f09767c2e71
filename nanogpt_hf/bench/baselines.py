"""Baselines for the training step, timed alternately with ours in one process: bare PyTorch, and
transformers' Trainer (bench/trainer.py).

On a shared machine the speed changes over time; the ratio of alternating measurements stays
comparable.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from nanogpt_hf.bench.workload import Pair, Workload
from nanogpt_hf.config.sources import learns_parts
from nanogpt_hf.distributed.preparation import prepared_blocks
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.build import start_model
from nanogpt_hf.optim.optimizer import build_optimizer, kind_of
from nanogpt_hf.training.clock import WARM_STEPS, spread, steps_per_window, time_of, warm_up


def check_comparable(work: Workload, baselines: list[str]) -> None:
    """Raises UserError if one of the baselines cannot do the same work."""
    accelerator = work.run.accelerator
    config = work.run.config
    if work.run.mesh.world_size > 1:
        raise UserError(
            "--against needs one process; start it without accelerate launch, or with one process"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise UserError(
            f"--against: needs float32 or bf16, not mixed_precision {accelerator.mixed_precision}"
        )
    if config.finetune.model or learns_parts(config.data):
        raise UserError(
            "--against compares pretraining on text; use a recipe without finetune.model"
        )
    if "trainer" in baselines and kind_of(config.optim).in_trainer is None:
        raise UserError(
            f"--against trainer: transformers' Trainer has no {config.optim.name}; use --against "
            "bare, or optim.name adamw"
        )


def bare_step(work: Workload) -> Callable[[], None]:
    """Plain PyTorch's step with our model and optimizer: draw, forward, backward, clip, step."""
    accelerator = work.run.accelerator
    batches = work.run.batches
    optim = work.run.config.optim
    device = accelerator.device
    # The same start, so that both have the same arithmetic.
    model = start_model(work.run.config, work.run.model_config.vocab_size, None).to(device).train()
    optimizer = build_optimizer(model, optim)
    # It compiles the blocks if the accelerate config does.
    with prepared_blocks(model, accelerator, optimizer):
        pass
    bf16 = accelerator.mixed_precision == "bf16"
    step = 0

    def bare() -> None:
        nonlocal step
        for batch in batches.micro_batches(step):
            batch = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
                loss = model(**batch, use_cache=False).loss
            # The mean over micro-batches, as all have the same number of targets.
            (loss / batches.accumulation).backward()
        if optim.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        step += 1

    return bare


def pairs_with_bare(work: Workload, windows: int, steps: int) -> list[Pair]:
    """Time both alternately, `steps` of each per window; the order changes with each window."""
    device = work.run.accelerator.device
    theirs = bare_step(work)
    # The first steps compile and allocate, and are not timed.
    for _ in range(WARM_STEPS):
        theirs()
        work.step()
    sides = [theirs, work.step]
    pairs = []
    # Who comes second may find warmer caches, or a machine that has become busy: they take turns.
    for _ in range(windows):
        times = {side: time_of(device, side, steps) for side in sides}
        pairs.append((times[work.step], times[theirs]))
        sides.reverse()
    return pairs


def compare_with_baseline(
    work: Workload, baseline: str, windows: int
) -> tuple[dict[str, Any], str]:
    """Measurements against a baseline, and a line about them.

    A ratio (ours / baseline) below 1: ours is faster.
    """
    steps = steps_per_window(warm_up(work.run.accelerator, work.step))
    if baseline == "trainer":
        # Only this baseline waits for the import of the Trainer.
        from nanogpt_hf.bench.trainer import pairs_with_trainer

        pairs = pairs_with_trainer(work, windows, steps)
    else:
        pairs = pairs_with_bare(work, windows, steps)
    ours, theirs = (spread(list(side)) for side in zip(*pairs, strict=True))
    # The ratio of each pair, not of the medians: both sides of a pair had the same machine.
    ratio = spread([ours_seconds / theirs_seconds for ours_seconds, theirs_seconds in pairs])
    # Median and quartiles of the ratio, since single pairs differ by what else the machine does.
    line = (
        f"against     {baseline}: {ratio['median']:.3f} of its time per step ({ratio['low']:.3f} "
        f"to {ratio['high']:.3f}); ours {ours['median'] * 1e3:,.2f} ms, theirs "
        f"{theirs['median'] * 1e3:,.2f} ms; {windows} pairs of {steps} steps"
    )
    figures = {"ratio": ratio, "ours_seconds": ours, "theirs_seconds": theirs}
    return figures | {"steps_per_window": steps}, line
