"""Lines that `estimate` prints and figures that it writes as JSON: the proposed layout, memory,
time, tokens, disk.
"""

import dataclasses

from nanogpt_hf.config.schema import Config
from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.formatting import align, format_bytes, format_duration
from nanogpt_hf.planning.candidates import MILLISECONDS, NEARLY, Proposal
from nanogpt_hf.planning.estimate import Estimate


def layout_lines(proposal: Proposal, config: Config) -> list[str]:
    """Return the proposed layout, and what others would cost."""
    cluster = proposal.cluster
    layout = proposal.layout
    rates = (
        f"{cluster.gpu.bf16_flops / 1e12:,.0f} TFLOP/s, {cluster.gpu.link / 1e9:,.0f} GB/s to "
        "the others"
    )
    machines = ""
    if cluster.gpus > cluster.per_machine:
        machines = f" in {cluster.gpus // cluster.per_machine} machines"
        rates += f", {cluster.network / 1e9:,.4g} GB/s between machines"
    step = f"{layout.accumulation} per step" if layout.accumulation > 1 else "one per step"
    # Bytes and seconds of one GPU and step.
    header = "micro-batch|memory|sent inside|between machines|computes|waits|bubble|step"
    # One row per kind of parallelism; the proposed layout is marked.
    rows = [["", *header.split("|")]]
    for other in proposal.best:
        # Estimates of time mean nothing for what does not fit.
        mark = "*" if other is layout else " "
        times = other.compute_seconds, other.waiting_seconds, other.bubble_seconds
        times = [f"{seconds:,.3f} s" for seconds in (*times, other.step_seconds)]
        sent = (format_bytes(other.bytes_sent(between)) for between in (False, True))
        rows.append(
            [
                f"{mark} {other.launch.name}{', checkpointing' * bool(other.launch.checkpointing)}",
                str(other.micro_batch_size),
                format_bytes(other.memory.peak),
                *sent,
                *(["does not fit", "", "", ""] if cluster.lacks(other) else times),
            ]
        )
    checkpointing = ", activation checkpointing" if layout.launch.checkpointing else ""
    return [
        f"layout over {cluster.gpus} × {cluster.name}{machines}: "
        f"{format_bytes(cluster.gpu.memory)}, {rates}",
        f"  {layout.launch.name}{checkpointing}; "
        f"micro-batches of {layout.micro_batch_size} × {config.data.block_size:,} tokens, {step}",
        f"  the simplest that fits into {format_bytes(cluster.usable_memory)} of each GPU and "
        f"takes up to {NEARLY} of the fastest's time, or {MILLISECONDS:g} ms more",
        "per GPU and step, the best of each kind:",
        *_table(rows),
        *(
            f"  {transfer.name}: {format_bytes(transfer.size)} per GPU and step"
            for transfer in layout.transfers
        ),
        f"to run it: --train.micro_batch_size {layout.micro_batch_size}, and the config that "
        "--write-config FILE writes",
    ]


def estimate_figures(estimate: Estimate, proposal: Proposal | None) -> dict:
    """All figures by name, with those of the layout if one is proposed."""
    memory = {"peak": estimate.memory.peak, "peak_phase": estimate.memory.peak_phase}
    values = dataclasses.asdict(estimate)
    values["memory"] = memory | values["memory"]
    if proposal:
        layout = proposal.layout
        costs = {"name": layout.launch.name, "step_seconds": layout.step_seconds}
        values["layout"] = dataclasses.asdict(layout) | costs
    return values


def estimate_lines(estimate: Estimate, launch: Launch) -> list[str]:
    """Model, memory, devices, tokens and disk, with an empty line after each."""
    parts = (
        _model(estimate),
        _memory(estimate, launch),
        _devices(estimate, launch),
        _tokens(estimate),
        _disk(estimate),
    )
    return [line for lines in parts for line in [*lines, ""]]


def _table(rows: list[list[str]]) -> list[str]:
    """Rows as lines, the first column to the left, the others to the right."""
    return [f"  {line}" for line in align(rows, range(1, len(rows[0]))).splitlines()]


def _model(estimate: Estimate) -> list[str]:
    # What is equal to the number of parameters is not said.
    trains = f", {estimate.trainable:,} trainable"
    active = f", {estimate.active:,} active per token"
    return [
        f"{estimate.recipe}: {estimate.parameters:,} parameters"
        f"{active * (estimate.active != estimate.parameters)}"
        f"{trains * (estimate.trainable != estimate.parameters)}; vocabulary "
        f"{estimate.vocabulary}",
        *_table([[part, f"{count:,}"] for part, count in estimate.by_part.items()]),
    ]


def _memory(estimate: Estimate, launch: Launch) -> list[str]:
    memory = estimate.memory
    phases = memory.phases
    # One unit for the whole table.
    unit, name = (1e9, "GB") if memory.peak >= 1e9 else (1e6, "MB")
    # A row per part and a column per phase; parts that no phase has are left out.
    rows = [[name, *phases]]
    for part in phases[memory.peak_phase]:
        values = [parts[part] for parts in phases.values()]
        if any(values):
            rows.append([part, *(f"{value / unit:,.2f}" for value in values)])
    rows.append(["sum", *(f"{sum(parts.values()) / unit:,.2f}" for parts in phases.values())])
    several = f", {estimate.accumulation} per step" if estimate.accumulation > 1 else ""
    sequences = f" × {estimate.sequences}" if estimate.sequences > 1 else ""
    lines = [
        f"memory of a device: peak {format_bytes(memory.peak)}, at {memory.peak_phase}",
        f"  {estimate.machine}; micro-batches of {estimate.micro_batch_size}{sequences} × "
        f"{estimate.block_size:,} tokens{several}",
        *_table(rows),
    ]
    if memory.host_copy:
        # torch rounds each pinned tensor up to a power of two, at most twice its size.
        low = format_bytes(memory.host_copy)
        high = format_bytes(2 * memory.host_copy)
        lines.append(
            f"  and {low} to {high} of host memory per machine, for the copy of a checkpoint"
        )
    if launch.compiles:
        lines.append("  compiled blocks save fewer activations than this")
    return lines


def _devices(estimate: Estimate, launch: Launch) -> list[str]:
    gpus = f"{launch.world_size} GPUs" if launch.world_size > 1 else "one GPU"
    rows = [["", "memory", "largest micro-batch", f"time at {estimate.mfu:g} of the peak"]]
    for device in estimate.devices:
        fits = str(device.micro_batch_size) if device.micro_batch_size else "not even 1"
        time = "-" if device.seconds is None else format_duration(device.seconds)
        rows.append([device.name, f"{device.memory / 1e9:.0f} GB", fits, time])
    return [
        f"on {gpus}: {estimate.flops_per_token / 1e9:,.2f} GFLOPs per token, "
        f"{estimate.flops:.2e} in total",
        *_table(rows),
        "  a micro-batch fits if a tenth of the memory stays free for fragments and libraries; "
        "the time excludes",
        "  evaluations and counts all parameters as trainable",
    ]


def _tokens(estimate: Estimate) -> list[str]:
    # Other methods than the next token's have nothing to compare with.
    if not estimate.uses_prepared_data:
        amount = f"{_amount(estimate.tokens)} tokens if every answer fills a block"
        return [f"{estimate.noun}: {estimate.blocks:,}, with {amount}"]
    # The tokens that train a model of this size to the lowest loss for its compute.
    best = estimate.chinchilla_tokens
    lines = [
        f"tokens: {_amount(estimate.tokens)}, {estimate.tokens / estimate.active:,.1f} per "
        f"{'active ' * (estimate.active != estimate.parameters)}parameter",
        f"  compute-optimal is about 20 (Chinchilla, arXiv:2203.15556): {_amount(best)};",
        f"  this is {float(f'{estimate.tokens / best:.2g}'):,g} times as many",
    ]
    return lines + [f"  {count:,.1f} epochs of {name}" for name, count in estimate.epochs.items()]


def _disk(estimate: Estimate) -> list[str]:
    size = estimate.data_bytes
    lines = [f"disk: {format_bytes(estimate.run_bytes)} at most for the run folder"]
    if estimate.uses_prepared_data:
        data = (
            "not prepared yet with these knobs"
            if size is None
            else f"{format_bytes(size)}, prepared"
        )
        lines.append(f"  data: {data}")
    return lines


def _amount(count: float) -> str:
    if count < 1e5:
        return f"{count:,.0f}"
    return f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"
