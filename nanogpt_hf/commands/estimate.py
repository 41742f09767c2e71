"""Estimate what a run needs: memory of a device by part, time on GPUs, tokens per parameter, disk.

Arithmetic on the recipe and on an accelerate config; nothing is trained and nothing is measured. docs/machines.md says
how far it has been checked.
"""

import argparse
import dataclasses
import re
from typing import TYPE_CHECKING

from nanogpt_hf.commands.arguments import add_json_argument, list_knobs
from nanogpt_hf.commands.console import show
from nanogpt_hf.commands.training_run import add_depth, depth_override
from nanogpt_hf.config.dial import dial_lines
from nanogpt_hf.config.load import load_config, stated_knobs
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import format_bytes
from nanogpt_hf.runs.files import write_json

if TYPE_CHECKING:
    from nanogpt_hf.planning.estimate import Estimate
    from nanogpt_hf.planning.placement import Placement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe, for example recipes/gpt2_124m.yaml")
    add_depth(parser)
    parser.add_argument("--config_file", metavar="F", help="an accelerate config (default: one process, float32)")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        type=_bytes,
        help="memory of a device, such as 80GB or 16GiB, for the largest micro-batch",
    )
    parser.add_argument(
        "--mfu", type=_share, default=0.4, help="share of the GPUs' peak FLOPs that is reached (default 0.4)"
    )
    add_json_argument(parser, "the figures")
    list_knobs(parser)


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    if Mesh.from_environment().world_size > 1:
        raise UserError("estimate needs no launch: python cli.py estimate RECIPE --config_file F")
    base, overrides = None, depth_override(arguments) + overrides
    start = stated_knobs(arguments.recipe, overrides).get("finetune.model")
    if start and str(start).lower() not in ("null", "none"):
        from nanogpt_hf.training.finetuning import finetune_config

        config, base = finetune_config(arguments.recipe, overrides)
    else:
        config = load_config(arguments.recipe, overrides)
    # The imports below take seconds; mistakes above and --help should not wait for them.
    import torch

    from nanogpt_hf.planning.estimate import estimate
    from nanogpt_hf.planning.placement import Placement, read_placement

    if arguments.config_file:
        place = read_placement(arguments.config_file)
    else:
        place = Placement(on_cpu=not torch.accelerator.is_available())
    found = estimate(config, place, base, mfu=arguments.mfu, memory=arguments.memory)
    for line in dial_lines(config):
        show(line)
    for lines in (_model(found), _memory(found, place), _devices(found, place), _tokens(found), _disk(found)):
        show(*lines, "", sep="\n")
    if config.lora.quantize:
        show(f"lora.quantize {config.lora.quantize} is not counted: the frozen weights are taken as float32\n")
    show("these are estimates; docs/machines.md lists which of them were measured")
    if arguments.json:
        write_json(arguments.json, _figures(found))


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
