"""Estimate what a run needs: memory of a device by part, time on GPUs, tokens per parameter, disk.

With --gpus it proposes how to lay the run out over them, and writes the accelerate config.
Arithmetic on recipe and machine; nothing is trained and nothing is measured. How far it has been
checked: docs/machines.md.
"""

import argparse
import dataclasses
import re
from typing import TYPE_CHECKING

from nanogpt_hf.commands.arguments import (
    add_flags,
    add_json_argument,
    add_knobs,
    add_option,
    add_recipe_argument,
    list_knobs,
    load_text_recipe,
)
from nanogpt_hf.config.dial import dial_lines
from nanogpt_hf.config.load import stated_knobs
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.config.stages import largest_stage, stage_lines
from nanogpt_hf.config.values import bounded
from nanogpt_hf.console import show
from nanogpt_hf.errors import UserError, did_you_mean
from nanogpt_hf.formatting import format_bytes
from nanogpt_hf.runs.files import output_file, output_target, write_json
from nanogpt_hf.runs.find import find_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from nanogpt_hf.config.schema import Config
    from nanogpt_hf.planning.candidates import Proposal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_argument(parser)
    add_knobs(parser, "depth")
    add_option(parser, "--config_file F", "an accelerate config (default: one process, float32)")
    memory = "of a device, such as 80GB or 16GiB, for the largest micro-batch; of --gpus"
    add_option(parser, "--memory SIZE", memory, type=_bytes)
    layout = "propose how to lay the run out over N GPUs"
    add_option(parser, "--gpus N", layout, type=bounded(int, 1, 1_000_000))
    gpus = "of --gpus: H100, A100, 'RTX 4090', ... (default: H100, or by --memory)"
    add_option(parser, "--gpu NAME", gpus)
    machine = "of --gpus, or all if they are fewer"
    add_option(parser, "--per-machine N", machine, type=bounded(int, 1, 1024), default=8)
    network = "of --gpus: Gb/s between machines, per GPU and direction (default 400)"
    add_option(parser, "--network GBITS", network, type=bounded(float, 0.001, 100_000))
    written = "of --gpus: write the accelerate config of the layout"
    add_option(parser, "--write-config FILE", written, type=output_file)
    share = "share of the GPUs' peak FLOPs that is reached"
    add_option(parser, "--mfu X", share, type=bounded(float, 1e-6, 1), default=0.4)
    rehearsal = "also build the run and take a step of it on tensors without values"
    add_flags(parser, {"--rehearse": rehearsal})
    add_json_argument(parser, "the figures")
    list_knobs(parser)


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    _check_options(arguments)
    base = None
    start = stated_knobs(arguments.recipe, overrides).get("finetune.model")
    if start and str(start).lower() not in ("null", "none"):
        from nanogpt_hf.training.finetuning import finetune_config

        config, base = finetune_config(arguments.recipe, overrides)
    else:
        config = load_text_recipe("estimate", arguments.recipe, overrides)
    # The imports below take seconds; mistakes above and --help should not wait for them.
    import torch

    from nanogpt_hf.planning.estimate import estimate
    from nanogpt_hf.planning.estimate_lines import estimate_figures, estimate_lines, layout_lines
    from nanogpt_hf.planning.placement import Placement, read_placement

    config, proposal = largest_stage(config), None
    if arguments.gpus:
        proposal = _proposal(arguments, config, base)
        place, size = proposal.layout.place, proposal.layout.micro_batch_size
        config = replace_knobs(config, {"train.micro_batch_size": size})
    elif arguments.config_file:
        place = read_placement(arguments.config_file)
    else:
        place = Placement(on_cpu=not torch.accelerator.is_available())
    result = estimate(config, place, base, mfu=arguments.mfu, memory=arguments.memory)
    for line in (*dial_lines(config), *stage_lines(config)):
        show(line)
    if proposal:
        show(*layout_lines(proposal, config), "", sep="\n")
    show(*estimate_lines(result, place), sep="\n")
    if result.useless:
        show(result.useless)
    if config.lora.quantize:
        show(
            f"lora.quantize {config.lora.quantize} is not counted: the frozen weights are taken "
            "as float32\n"
        )
    if config.distill.teacher:
        from nanogpt_hf.model.architecture import count_parameters
        from nanogpt_hf.model.build import load_base_config

        teacher, _ = load_base_config(find_model(config.distill.teacher), config.distill.revision)
        size = format_bytes(place.compute_bytes * count_parameters(teacher))
        show(f"distill.teacher takes {size} more on each device, and is not counted above\n")
    show("these are estimates; docs/machines.md lists which of them were measured")
    figures = estimate_figures(result, proposal)
    if arguments.rehearse:
        from nanogpt_hf.bench.rehearsal import rehearse

        rehearsal = rehearse(config, place)
        figures["rehearsal"] = dataclasses.asdict(rehearsal)
        show("", *rehearsal.lines(), sep="\n")
    if arguments.json:
        write_json(arguments.json, figures)


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises UserError for options that exclude each other, or GPUs that fill no machines."""
    if arguments.gpus is None:
        for option in ("gpu", "network", "write_config"):
            if getattr(arguments, option) is not None:
                raise UserError(
                    f"--{option.replace('_', '-')}: only with --gpus, which proposes a layout"
                )
        return
    if arguments.config_file:
        raise UserError("--gpus proposes a layout, and --config_file states one: give one of them")
    if arguments.gpus > arguments.per_machine and arguments.gpus % arguments.per_machine:
        raise UserError(
            f"--gpus {arguments.gpus}: machines of {arguments.per_machine} GPUs are not filled; "
            "give a multiple, or --per-machine"
        )
    from nanogpt_hf.planning.hardware import GPUS

    if arguments.gpu is not None and arguments.gpu not in GPUS:
        raise UserError(
            f"--gpu {arguments.gpu}: not in the table of GPUs, "
            f"{', '.join(GPUS)}{did_you_mean(arguments.gpu, GPUS)}"
        )
    if (path := arguments.write_config) and path.is_file():
        from nanogpt_hf.planning.placement import WRITTEN

        if WRITTEN.encode() not in path.read_bytes()[:100]:
            raise UserError(
                f"--write-config {path}: exists, and `estimate` did not write it; name another file"
            )


def _proposal(
    arguments: argparse.Namespace, config: "Config", base: "PreTrainedConfig | None"
) -> "Proposal":
    """The layout over --gpus, written to --write-config."""
    from nanogpt_hf.planning.candidates import Cluster, propose
    from nanogpt_hf.planning.estimate import planned_model
    from nanogpt_hf.planning.hardware import NETWORK, gpu_of
    from nanogpt_hf.planning.placement import config_text

    name, gpu = gpu_of(arguments.gpu, arguments.memory)
    per_machine = min(arguments.per_machine, arguments.gpus)
    network = (arguments.network or NETWORK) * 1e9 / 8
    proposal = propose(
        config,
        planned_model(config, base),
        Cluster(arguments.gpus, name, gpu, per_machine, network),
        arguments.mfu,
    )
    if arguments.write_config:
        with output_target(arguments.write_config) as target:
            target.write_text(config_text(proposal.layout.place), encoding="utf-8")
    return proposal


def _bytes(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB)", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected a size such as 80GB or 16GiB, got {text!r}")
    return float(match[1]) * {"GB": 1e9, "GiB": 2**30}[match[2]]
