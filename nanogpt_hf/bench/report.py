"""Measure all figures of a bench, and format them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanogpt_hf.bench.workload import Workload, communicated_bytes
from nanogpt_hf.distributed.accelerator import describe_machine
from nanogpt_hf.formatting import format_bytes, plural
from nanogpt_hf.model.architecture import architecture_of, count_parameters
from nanogpt_hf.planning.hardware import peak_flops, peak_memory
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.training.budget import steps_within
from nanogpt_hf.training.clock import steps_per_window, time_of, time_windows, warm_up

_TRACED_STEPS = 5


def measure_all(work: Workload, windows: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Measure all but the baselines, on all processes. Seconds, tokens per second, bytes."""
    accelerator = work.run.accelerator
    config = work.run.config
    batches = work.run.batches
    device = accelerator.device
    train = config.train
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
    # The peak of the steps, not that of the build.
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = steps_per_window(warm_up(accelerator, work.step))
    step = time_windows(accelerator, work.step, steps, windows)
    rate = train.tokens_per_step / step["median"]
    model_config = work.run.model_config
    peak = peak_flops(device)
    flops_per_token = architecture_of(model_config).flops_per_token(
        model_config, config.data.block_size
    )
    # Model FLOPs utilization: the FLOPs of the model's formula by the peak of the device, without
    # what checkpointing repeats (PaLM, arXiv:2204.02311, appendix B).
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
        "communicated_bytes": communicated_bytes(work.step) if work.run.mesh.world_size > 1 else {},
    }


def summary_lines(figures: dict[str, Any]) -> list[str]:
    """Return the measurements as lines of text; n/a for what cannot be measured here."""
    # One line per figure, its name in a column of twelve letters.
    windows = (
        f"{plural(figures['windows'], 'window')} of {plural(figures['steps_per_window'], 'step')}"
    )
    lines = [f"step        {_ms(figures['step_seconds'])} over {windows}"]
    # A run of this many steps spends its whole schedule within an hour.
    per_hour = steps_within(3600.0, figures["step_seconds"]["median"])
    lines.append(f"an hour     {plural(per_hour, 'step')}, without evaluations and checkpoints")
    if sent := figures["communicated_bytes"]:
        kinds = ", ".join(f"{kind} {format_bytes(count)}" for kind, count in sent.items())
        lines.append(
            f"sent        {format_bytes(sum(sent.values()))} per step by the main process: {kinds}"
        )
    per_device = figures["tokens_per_second_per_device"]
    lines.append(
        f"throughput  {figures['tokens_per_second']:,.0f} tokens/s, {per_device:,.0f} per device"
    )
    flops = f"{figures['flops_per_second_per_device'] / 1e9:,.1f} GFLOP/s"
    mfu = figures["mfu"]
    lines.append(
        f"MFU         {f'{mfu:.1%}' if mfu else 'n/a: the peak of this device is unknown'}; {flops}"
    )
    lines.append(f"memory      peak {figures['peak_memory'] / 1e9:,.2f} GB")
    return lines


def _ms(spread: dict[str, float]) -> str:
    median, low, high = (spread[name] * 1e3 for name in ("median", "low", "high"))
    return f"{median:,.2f} ms ({low:,.2f} to {high:,.2f})"


def write_trace(work: Workload, path: Path) -> None:
    """Write a Chrome trace of a few steps of the main process; call it on all processes."""
    # Without acc_events torch 2.11 warns.
    with torch.profiler.profile(acc_events=True) as profile:
        time_of(work.run.accelerator.device, work.step, _TRACED_STEPS)
    if work.run.accelerator.is_main_process:
        with written_whole(path) as path:
            profile.export_chrome_trace(str(path))
