"""Measure all figures of a bench, and format them."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from nanogpt_hf.bench import baselines
from nanogpt_hf.bench.clock import (
    Workload,
    communicated_bytes,
    communication,
    phases_of_step,
    profiler,
    spread,
    synchronize,
    time_of,
    warm_up,
)
from nanogpt_hf.checkpoint.writer import CheckpointWriter
from nanogpt_hf.distributed.accelerator import describe_machine
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import format_bytes, plural
from nanogpt_hf.model.architecture import architecture_of, count_parameters
from nanogpt_hf.planning.hardware import peak_flops
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training.micro_batch import peak_memory

_TRACED_STEPS = 5


def measure_all(work: Workload, windows: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Measure all but the baselines, on all processes. Seconds, tokens per second, bytes."""
    accelerator, config, batches = work.run.accelerator, work.run.config, work.run.batches
    device, train = accelerator.device, config.train
    figures = {
        "recipe": config.name,
        "machine": describe_machine(accelerator),
        "token_source": work.token_source,
        "parameters": count_parameters(work.run.model_config),
        "tokens_per_step": train.tokens_per_step,
        "step_is": f"{train.micro_batch_size} sequences × {config.data.block_size} × "
        f"{work.run.mesh.data_parallel} × {batches.accumulation} accumulated",
    }
    log(f"{config.name}: {figures['parameters']:,} parameters; a step is {figures['step_is']}")
    log(f"tokens      {work.token_source}")
    log(f"machine     {figures['machine']}")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = warm_up(work)
    step = spread([time_of(device, work.step, steps) for _ in range(windows)])
    rate = train.tokens_per_step / step["median"]
    model_config = work.run.model_config
    peak = peak_flops(device)
    flops_per_token = architecture_of(model_config).flops_per_token(
        model_config, config.data.block_size
    )
    per_device = rate / work.run.mesh.world_size
    return figures | {
        "windows": windows,
        "steps_per_window": steps,
        "step_seconds": step,
        "tokens_per_second": rate,
        "tokens_per_second_per_device": per_device,
        "mfu": flops_per_token * per_device / peak if peak else None,
        "flops_per_second_per_device": flops_per_token * per_device,
        "peak_memory": peak_memory(device),
        "phases_seconds": phases_of_step(work, max(5, windows)),
        "communication_seconds": communication(work),
        "communicated_bytes": communicated_bytes(work.step) if work.run.mesh.world_size > 1 else {},
        "checkpoint": _checkpoint_times(work, min(windows, 3)),
    }


def summary_lines(figures: dict[str, Any]) -> list[str]:
    """The measurements as lines of text; n/a for what cannot be measured here."""
    windows = (
        f"{plural(figures['windows'], 'window')} of {plural(figures['steps_per_window'], 'step')}"
    )
    lines = [f"step        {_ms(figures['step_seconds'])} over {windows}"]
    if phases := figures["phases_seconds"]:
        total = sum(phase["median"] for phase in phases.values())
        lines += [
            (f"  {name:<10}{_ms(phase)}, {phase['median'] / total:.1%}")
            for name, phase in phases.items()
        ]
    if figures["communication_seconds"]:
        lines.append(
            f"  collectives {figures['communication_seconds'] * 1e3:.2f} ms, mostly within backward"
        )
    if sent := figures["communicated_bytes"]:
        kinds = ", ".join(f"{kind} {format_bytes(count)}" for kind, count in sent.items())
        lines.append(
            f"sent        {format_bytes(sum(sent.values()))} per step by the main process: {kinds}"
        )
    per_device = figures["tokens_per_second_per_device"]
    lines.append(
        f"throughput  {figures['tokens_per_second']:,.0f} tokens/s, {per_device:,.0f} per device"
    )
    if figures["mfu"] is not None:
        lines.append(f"MFU         {figures['mfu']:.1%}")
    else:
        flops = figures["flops_per_second_per_device"] / 1e9
        lines.append(
            "MFU         n/a: the bf16 peak of this device is unknown; it does "
            f"{flops:,.1f} GFLOP/s"
        )
    memory = figures["peak_memory"]
    lines.append(
        f"memory      peak {memory / 1e9:,.2f} GB" if memory else "memory      n/a on this device"
    )
    lines.append(
        f"checkpoint  {_checkpoint(figures['checkpoint'], figures['step_seconds']['median'])}"
    )
    return lines


def _checkpoint(times: dict[str, Any] | str, step: float) -> str:
    if isinstance(times, str):
        return times
    wait, write, next_step = (
        times[f"{name}_seconds"]["median"] for name in ("wait", "write", "next_step")
    )
    return (
        f"{times['bytes'] / 1e6:,.1f} MB: training waits {wait * 1e3:,.1f} ms, {wait / step:.2f} "
        f"of a step, and not {write * 1e3:,.1f} ms; the next step takes {next_step / step:.2f} of "
        "the median"
    )


def _ms(spread: dict[str, float]) -> str:
    median, low, high = (spread[name] * 1e3 for name in ("median", "low", "high"))
    return f"{median:,.2f} ms ({low:,.2f} to {high:,.2f})"


def compare_with_baseline(
    work: Workload, baseline: str, windows: int
) -> tuple[dict[str, Any], str]:
    """Measurements against a baseline, and a line about them.

    A ratio (ours / baseline) below 1: ours is faster.
    """
    steps = warm_up(work)
    measure = baselines.pairs_with_bare if baseline == "bare" else baselines.pairs_with_trainer
    pairs = measure(work, windows, steps)
    ours, theirs = (spread(list(side)) for side in zip(*pairs, strict=True))
    ratio = spread([ours_seconds / theirs_seconds for ours_seconds, theirs_seconds in pairs])
    line = (
        f"against     {baseline}: {ratio['median']:.3f} of its time per step ({ratio['low']:.3f} "
        f"to {ratio['high']:.3f}); ours {ours['median'] * 1e3:,.2f} ms, theirs "
        f"{theirs['median'] * 1e3:,.2f} ms; {windows} pairs of {steps} steps"
    )
    figures = {"ratio": ratio, "ours_seconds": ours, "theirs_seconds": theirs}
    return figures | {"steps_per_window": steps}, line


def write_trace(work: Workload, path: Path) -> None:
    """Write a Chrome trace of a few steps of the main process; call it on all processes."""
    with profiler(work.run.accelerator.device) as profile:
        for _ in range(_TRACED_STEPS):
            work.step()
        synchronize(work.run.accelerator.device)
    if work.run.accelerator.is_main_process:
        with written_whole(path) as path:
            profile.export_chrome_trace(str(path))


def _checkpoint_times(work: Workload, windows: int) -> dict[str, Any] | str:
    """Bytes of a checkpoint; seconds that training waits for it, of the next step, and until it is
    on the disk: saved into a temporary folder in the current one.

    The first is not counted: it allocates the memory for the copy. Returns the reason if it
    cannot be written.
    """
    run, device = work.run, work.run.accelerator.device
    waits, steps, writes = [], [], []
    try:
        with _temporary_folder(work) as folder:
            writer = CheckpointWriter(run.accelerator, folder, keep=1)
            for number in range(1, windows + 2):
                writer.wait()  # else the one before would count
                state, start = TrainState(step=number, last_finite_step=number), time.perf_counter()
                save = partial(writer.save, run.model, run.optimizer, state)
                waits.append(time_of(device, save))
                # every other one is timed alone: a step would share the machine with the write
                if number % 2:
                    writer.wait()
                    writes.append(time.perf_counter() - start)
                else:
                    steps.append(time_of(device, work.step))
            writer.wait()
            newest = folder.newest_checkpoint()
            size = sum(file.stat().st_size for file in newest.iterdir()) if newest else 0
    except UserError as error:
        return f"n/a: {error}"
    return {
        "bytes": size,
        "wait_seconds": spread(waits[1:]),
        "next_step_seconds": spread(steps),
        "write_seconds": spread(writes),
    }


@contextmanager
def _temporary_folder(work: Workload) -> Iterator[RunFolder]:
    """A folder of the main process, for all processes."""
    is_main = work.run.mesh.is_main
    made = (
        tempfile.TemporaryDirectory(prefix=".bench_", dir="." if os.access(".", os.W_OK) else None)
        if is_main
        else None
    )
    path = [made.name if made else ""]
    try:
        broadcast_object_list(path, from_process=0)
        yield RunFolder(Path(path[0]))
    finally:
        work.run.accelerator.wait_for_everyone()
        if made:
            made.cleanup()
