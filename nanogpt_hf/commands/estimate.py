"""Estimate what a run needs: memory of a device by part, time on GPUs, tokens per parameter, disk.

With --gpus it proposes how to lay the run out over them, with reasons, and writes the accelerate config. Arithmetic on
recipe and machine; nothing is trained and nothing is measured. docs/machines.md says how far it has been checked.
"""

import argparse
import dataclasses
import re
from typing import TYPE_CHECKING

from nanogpt_hf.commands.arguments import add_json_argument, list_knobs, load_text_recipe, number
from nanogpt_hf.commands.console import show
from nanogpt_hf.commands.training_run import add_depth, depth_override
from nanogpt_hf.config.dial import dial_lines
from nanogpt_hf.config.load import stated_knobs
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError, did_you_mean
from nanogpt_hf.formatting import format_bytes
from nanogpt_hf.runs.files import output_file, output_target, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from nanogpt_hf.config.schema import Config
    from nanogpt_hf.planning.estimate import Estimate
    from nanogpt_hf.planning.placement import Placement
    from nanogpt_hf.planning.proposal import Proposal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe, for example recipes/gpt2_124m.yaml")
    add_depth(parser)
    parser.add_argument("--config_file", metavar="F", help="an accelerate config (default: one process, float32)")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        type=_bytes,
        help="memory of a device, such as 80GB or 16GiB, for the largest micro-batch; of --gpus",
    )
    parser.add_argument(
        "--gpus", metavar="N", type=number(int, 1, 1_000_000), help="propose how to lay the run out over N GPUs"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="of --gpus: H100, A100, 'RTX 4090', ... (default: H100, or by --memory)"
    )
    parser.add_argument(
        "--per-machine", metavar="N", type=number(int, 1, 1024), default=8, help="of --gpus (default 8, or all)"
    )
    parser.add_argument(
        "--network",
        metavar="GBITS",
        type=number(float, 0.001, 100_000),
        help="of --gpus: Gb/s between machines, per GPU and direction (default 400)",
    )
    parser.add_argument(
        "--write-config", metavar="FILE", type=output_file, help="of --gpus: write the accelerate config of the layout"
    )
    parser.add_argument(
        "--mfu", type=_share, default=0.4, help="share of the GPUs' peak FLOPs that is reached (default 0.4)"
    )
    add_json_argument(parser, "the figures")
    list_knobs(parser)


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    if Mesh.from_environment().world_size > 1:
        raise UserError("estimate needs no launch: python cli.py estimate RECIPE --config_file F")
    _check_options(arguments)
    base, overrides = None, depth_override(arguments) + overrides
    start = stated_knobs(arguments.recipe, overrides).get("finetune.model")
    if start and str(start).lower() not in ("null", "none"):
        from nanogpt_hf.training.finetuning import finetune_config

        config, base = finetune_config(arguments.recipe, overrides)
    else:
        config = load_text_recipe("estimate", arguments.recipe, overrides)
    # The imports below take seconds; mistakes above and --help should not wait for them.
    import torch

    from nanogpt_hf.planning.estimate import estimate
    from nanogpt_hf.planning.placement import Placement, read_placement

    proposal = None
    if arguments.gpus:
        proposal = _proposal(arguments, config, base)
        layout = proposal.layout
        if layout is None:
            raise UserError(proposal.reasons[0])
        place, config = layout.place, replace_knobs(config, {"train.micro_batch_size": layout.micro_batch_size})
    elif arguments.config_file:
        place = read_placement(arguments.config_file)
    else:
        place = Placement(on_cpu=not torch.accelerator.is_available())
    found = estimate(config, place, base, mfu=arguments.mfu, memory=arguments.memory)
    for line in dial_lines(config):
        show(line)
    if proposal:
        show(*_layout(proposal, config), "", sep="\n")
    for lines in (_model(found), _memory(found, place), _devices(found, place), _tokens(found), _disk(found)):
        show(*lines, "", sep="\n")
    if config.lora.quantize:
        show(f"lora.quantize {config.lora.quantize} is not counted: the frozen weights are taken as float32\n")
    show("these are estimates; docs/machines.md lists which of them were measured")
    if arguments.json:
        write_json(arguments.json, _figures(found) | ({"layout": _layout_figures(proposal)} if proposal else {}))


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises UserError for options that do not go together, and for GPUs that do not fill machines."""
    if arguments.gpus is None:
        for option in ("gpu", "network", "write_config"):
            if getattr(arguments, option) is not None:
                raise UserError(f"--{option.replace('_', '-')}: only with --gpus, which proposes a layout")
        return
    if arguments.config_file:
        raise UserError("--gpus proposes a layout, and --config_file states one: give one of them")
    if arguments.gpus > arguments.per_machine and arguments.gpus % arguments.per_machine:
        raise UserError(
            f"--gpus {arguments.gpus}: machines of {arguments.per_machine} GPUs are not filled; give a multiple, or "
            "--per-machine"
        )
    from nanogpt_hf.planning.hardware import GPUS

    if arguments.gpu is not None and arguments.gpu not in GPUS:
        raise UserError(
            f"--gpu {arguments.gpu}: not in the table of GPUs, {', '.join(GPUS)}{did_you_mean(arguments.gpu, GPUS)}"
        )


def _proposal(arguments: argparse.Namespace, config: "Config", base: "PreTrainedConfig | None") -> "Proposal":
    """The layout over --gpus, written to --write-config."""
    from nanogpt_hf.planning.estimate import planned_model
    from nanogpt_hf.planning.hardware import NETWORK, gpu_of
    from nanogpt_hf.planning.layout import Cluster
    from nanogpt_hf.planning.machine_config import config_text
    from nanogpt_hf.planning.proposal import propose

    name, gpu = gpu_of(arguments.gpu, arguments.memory)
    per_machine = min(arguments.per_machine, arguments.gpus)
    network = (arguments.network or NETWORK) * 1e9 / 8
    proposal = propose(
        config, planned_model(config, base), Cluster(arguments.gpus, name, gpu, per_machine, network), arguments.mfu
    )
    if arguments.write_config and proposal.layout:
        with output_target(arguments.write_config) as target:
            target.write_text(config_text(proposal.layout), encoding="utf-8")
    return proposal


def _layout(proposal: "Proposal", config: "Config") -> list[str]:
    """The proposed layout, why it is, and what others would cost."""
    from nanogpt_hf.planning.machine_config import shipped_config
    from nanogpt_hf.planning.proposal import seconds

    cluster, layout = proposal.cluster, proposal.layout
    assert layout is not None
    machines = f" in {cluster.gpus // cluster.per_machine} machines" if cluster.gpus > cluster.per_machine else ""
    rates = f"{cluster.gpu.bf16_flops / 1e12:,.0f} TFLOP/s, {cluster.gpu.link / 1e9:,.0f} GB/s to the others"
    rates += f", {cluster.network / 1e9:,.4g} GB/s between machines" if machines else ""
    step = f"{layout.accumulation} per step" if layout.accumulation > 1 else "one per step"
    rows: list[tuple[str, ...]] = [
        ("", "micro-batch", "memory", "sent inside", "between machines", "computes", "waits", "bubble", "step")
    ]
    for other in proposal.best:
        mark = "*" if other is layout else " "
        checkpointing = ", checkpointing" if other.place.checkpointing else ""
        parts = (other.compute_seconds, other.waiting_seconds, other.bubble_seconds, other.step_seconds)
        sent = (format_bytes(other.bytes_sent(between)) for between in (False, True))
        memory = format_bytes(other.memory.peak)
        times = ["does not fit", "", "", ""] if cluster.lacks(other) else [seconds(value) for value in parts]
        rows.append((f"{mark} {other.name}{checkpointing}", str(other.micro_batch_size), memory, *sent, *times))
    shipped = shipped_config(layout)
    return [
        f"layout over {cluster.gpus} × {cluster.name}{machines}: {format_bytes(cluster.gpu.memory)}, {rates}",
        f"  {layout.name}{', activation checkpointing' if layout.place.checkpointing else ''}; micro-batches of "
        f"{layout.micro_batch_size} × {config.data.block_size:,} tokens, {step}",
        *(f"  - {reason}" for reason in proposal.reasons),
        "per GPU and step, the best of each kind:",
        *_table(rows),
        *(f"  {transfer.name}: {format_bytes(transfer.size)} per GPU and step" for transfer in layout.transfers),
        f"to run it: --train.micro_batch_size {layout.micro_batch_size}, and "
        + (f"{shipped} with these numbers, or " if shipped else "")
        + "the config that --write-config FILE writes",
    ]


def _layout_figures(proposal: "Proposal") -> dict:
    layout = proposal.layout
    assert layout is not None
    return {
        "name": layout.name,
        "reasons": proposal.reasons,
        "step_seconds": layout.step_seconds,
        "accumulation": layout.accumulation,
        **{key: value for key, value in dataclasses.asdict(layout).items() if key not in ("memory", "accumulation")},
    }


def _bytes(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected a size such as 80GB or 16GiB, got {text!r}")
    return float(match[1]) * {"GB": 1e9, "GiB": 2**30}[match[2]]


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"expected a share such as 0.4, above 0 and at most 1, got {text!r}")
    return share


def _figures(found: "Estimate") -> dict:
    memory = {"peak": found.memory.peak, "peak_phase": found.memory.peak_phase}
    figures = dataclasses.asdict(found)
    return figures | {"memory": memory | figures["memory"]}


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines, the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([row[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)] for row in rows)
    return ["  " + "  ".join(cell).rstrip() for cell in cells]


def _model(found: "Estimate") -> list[str]:
    trains = "" if found.trainable == found.parameters else f", {found.trainable:,} trainable"
    rows = [(part, f"{count:,}") for part, count in found.by_part.items()]
    return [f"{found.recipe}: {found.parameters:,} parameters{trains}; vocabulary {found.vocabulary}", *_table(rows)]


def _memory(found: "Estimate", place: "Placement") -> list[str]:
    memory, phases = found.memory, found.memory.phases
    unit, name = (1e9, "GB") if memory.peak >= 1e9 else (1e6, "MB")
    rows = [(name, *phases)]
    for part in phases[memory.peak_phase]:
        values = [parts[part] for parts in phases.values()]
        if any(values):
            rows.append((part, *(f"{value / unit:,.2f}" for value in values)))
    rows.append(("sum", *(f"{sum(parts.values()) / unit:,.2f}" for parts in phases.values())))
    lines = [
        f"memory of a device: peak {format_bytes(memory.peak)}, at {memory.peak_phase}",
        f"  {found.machine}; micro-batches of {found.micro_batch_size} × {found.block_size:,} tokens"
        + (f", {found.accumulation} per step" if found.accumulation > 1 else ""),
        *_table(rows),
    ]
    if memory.offloaded:
        lines.append(f"  and {format_bytes(memory.offloaded)} of host memory per process")
    if place.compiles:
        lines.append("  compiled blocks save fewer activations than this")
    return lines


def _devices(found: "Estimate", place: "Placement") -> list[str]:
    gpus = f"{place.processes} GPUs" if place.processes > 1 else "one GPU"
    rows = [("", "memory", "largest micro-batch", f"time at {found.mfu:g} of the peak")]
    for device in found.devices:
        fits = str(device.micro_batch_size) if device.micro_batch_size else "not even 1"
        rows.append((device.name, f"{device.memory / 1e9:.0f} GB", fits, _time(device.seconds)))
    return [
        f"on {gpus}: {found.flops_per_token / 1e9:,.2f} GFLOPs per token, {found.flops:.2e} in total",
        *_muon(found),
        *_table(rows),
        "  a micro-batch fits if a tenth of the memory stays free for fragments and libraries; the time excludes",
        "  evaluations and counts all parameters as trainable",
    ]


def _muon(found: "Estimate") -> list[str]:
    if not found.muon_flops_per_step:
        return []
    share = 1 - found.flops_per_token * found.tokens / found.flops
    return [f"  {share:.2%} of them orthogonalise Muon's updates"]


def _tokens(found: "Estimate") -> list[str]:
    best = found.chinchilla_tokens
    lines = [
        f"tokens: {_amount(found.tokens)}, {found.tokens / found.parameters:,.1f} per parameter",
        f"  compute-optimal is about 20 (Chinchilla, arXiv:2203.15556): {_amount(best)};",
        f"  this is {float(f'{found.tokens / best:.2g}'):,g} times as many",
    ]
    return lines + [f"  {count:,.1f} epochs of {name}" for name, count in found.epochs.items()]


def _disk(found: "Estimate") -> list[str]:
    data = "unknown before `prepare`"
    if found.data_bytes is not None:
        data = format_bytes(found.data_bytes) + (
            ", prepared" if found.data_is_prepared else " at most (not prepared yet)"
        )
    return [f"disk: {format_bytes(found.run_bytes)} at most for the run folder", f"  data: {data}"]


def _amount(count: float) -> str:
    return f"{count / 1e9:,.1f} B" if count >= 1e9 else f"{count / 1e6:,.1f} M"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} seconds" if seconds >= 1 else "under a second"
