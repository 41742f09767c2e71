"""The commands before a run: estimate, bench, doctor and knobs."""

import dataclasses
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from nanogpt_hf.commands.arguments import (
    add_flag,
    add_knobs,
    add_option,
    add_optional_recipe_argument,
    add_output,
    add_recipe_argument,
    check_steps_known,
    load_optional_recipe,
    size,
)
from nanogpt_hf.config.dial import dial_lines
from nanogpt_hf.config.json_schema import recipe_schema
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.methods import POLICY, start_method_of
from nanogpt_hf.config.schema import (
    SECTIONS,
    Config,
    knob_lines,
    knob_values,
    replace_knobs,
)
from nanogpt_hf.config.stages import largest_stage, stage_lines
from nanogpt_hf.config.stated import Overrides, stated_knobs
from nanogpt_hf.config.values import bounded, stated
from nanogpt_hf.console import show
from nanogpt_hf.errors import UserError, did_you_mean
from nanogpt_hf.runs.files import output_target, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from nanogpt_hf.distributed.launch import Launch
    from nanogpt_hf.planning.candidates import Proposal


def add_estimate_arguments(parser: ArgumentParser) -> None:
    add_recipe_argument(parser)
    add_knobs(parser, "depth", "from", "data", "lora", "loss", "task")
    layout: Any = parser.add_mutually_exclusive_group()
    add_option(layout, "--config_file F", "an accelerate config (default: one process, float32)")
    memory = (
        "memory of a device, such as 80GB or 16GiB: names the largest micro-batch that fits; with "
        "--gpus, memory of each GPU"
    )
    add_option(parser, "--memory SIZE", memory, type=size)
    proposal = "propose how to lay the run out over N GPUs"
    add_option(layout, "--gpus N", proposal, type=bounded(int, 1, 1_000_000))
    gpus = "with --gpus: their kind: H100, A100, 'RTX 4090', ... (default: H100, or by --memory)"
    add_option(parser, "--gpu NAME", gpus, type=stated)
    machine = "with --gpus: GPUs in each machine, or all if they are fewer"
    add_option(parser, "--per-machine N", machine, type=bounded(int, 1, 1024), default=8)
    network = "with --gpus: Gb/s between machines, per GPU and direction (default 400)"
    add_option(parser, "--network GBITS", network, type=bounded(float, 0.001, 100_000))
    add_output(
        parser,
        "--write-config",
        "with --gpus: write the accelerate config of the proposed layout to FILE",
    )
    share = "share of the GPUs' peak FLOPs that is reached"
    add_option(parser, "--mfu X", share, type=bounded(float, 1e-6, 1), default=0.4)
    rehearsal = "also take a step of the run on tensors without values"
    add_flag(parser, "--rehearse", rehearsal)
    add_output(parser, "--json", "also write the figures to FILE")


def run_estimate(arguments: Namespace, overrides: Overrides) -> None:
    """Estimate memory of a device by part, time on GPUs, tokens per parameter and disk of a run.

    With --gpus it proposes how to lay the run out over them, and writes the accelerate config.
    The figures are arithmetic on recipe and machine: nothing is trained and nothing is measured.
    docs/machines.md says how far they have been checked.
    """
    _check_options(arguments)
    config, base = _load_planned(arguments, overrides)
    # The imports below take seconds; mistakes above and --help should not wait for them.
    from nanogpt_hf.planning.estimate import estimate
    from nanogpt_hf.planning.estimate_lines import estimate_figures, estimate_lines, layout_lines

    check_steps_known("estimate", knob_values(config))
    lines = [*dial_lines(config), *stage_lines(config)]
    # A machine has to hold the largest of a recipe's stages.
    config = largest_stage(config)
    proposal = _proposal(arguments, config, base) if arguments.gpus else None
    launch = proposal.layout.launch if proposal else _stated_launch(arguments.config_file)
    if proposal:
        size = proposal.layout.micro_batch_size
        config = replace_knobs(config, {"train.micro_batch_size": size})
        lines += [*layout_lines(proposal, config), ""]
    result = estimate(config, launch, base, mfu=arguments.mfu, memory=arguments.memory)
    lines += [*estimate_lines(result, launch), *filter(None, [result.useless])]
    # Its memory depends on a library.
    if config.lora.quantize:
        lines.append("not counted: lora.quantize")
    lines.append("these are estimates; docs/machines.md lists which of them were measured")
    figures = estimate_figures(result, proposal)
    # The rehearsal finds what the arithmetic cannot: errors of the step itself.
    if arguments.rehearse:
        from nanogpt_hf.bench.rehearsal import rehearse

        rehearsal = rehearse(config, launch, base)
        figures["rehearsal"] = dataclasses.asdict(rehearsal)
        lines += ["", *rehearsal.lines()]
    show(*lines, sep="\n")
    write_json(arguments.json, figures)


def _load_planned(
    arguments: Namespace, overrides: Overrides
) -> "tuple[Config, PreTrainedConfig | None]":
    """Resolve the recipe of `estimate`; a model to start from has its own sizes, which are read
    from its folder or the Hub.
    """
    method = start_method_of(stated_knobs(arguments.recipe, overrides).get)
    if method is POLICY and arguments.gpus:
        raise UserError(
            "--gpus: the time in which `rl` samples answers is not estimated, so that no layout is "
            "proposed; give --config_file"
        )
    if method is None:
        return load_config(arguments.recipe, overrides), None
    from nanogpt_hf.methods.finetuning import finetune_config

    return finetune_config(arguments.recipe, overrides, method)


def _stated_launch(config_file: str | None) -> "Launch":
    """The launch of an accelerate config; without one, a process on this machine."""
    import torch

    from nanogpt_hf.distributed.launch import Launch
    from nanogpt_hf.planning.config_files import read_launch

    if config_file:
        return read_launch(config_file)
    return Launch(device="cuda" if torch.accelerator.is_available() else "cpu")


def _check_options(arguments: Namespace) -> None:
    """Raises UserError for options that need --gpus, or GPUs that fill no machines."""
    # Without --gpus these options would have no effect.
    if arguments.gpus is None:
        for option in ("gpu", "network", "write_config"):
            if getattr(arguments, option) is not None:
                raise UserError(
                    f"--{option.replace('_', '-')}: only with --gpus, which proposes a layout"
                )
        return
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
    # A config that a person wrote is not overwritten.
    path = arguments.write_config
    if path and path.is_file() and b"written by `estimate`" not in path.read_bytes()[:100]:
        raise UserError(
            f"--write-config {path}: exists, and `estimate` did not write it; name another file"
        )


def _proposal(arguments: Namespace, config: Config, base: "PreTrainedConfig | None") -> "Proposal":
    """Propose a layout over --gpus, and write it to --write-config."""
    from nanogpt_hf.planning.candidates import Cluster, propose
    from nanogpt_hf.planning.config_files import config_text
    from nanogpt_hf.planning.estimate import planned_model
    from nanogpt_hf.planning.hardware import NETWORK, gpu_of

    name, gpu = gpu_of(arguments.gpu, arguments.memory)
    per_machine = min(arguments.per_machine, arguments.gpus)
    # Gb/s to bytes per second
    network = (arguments.network or NETWORK) * 1e9 / 8
    proposal = propose(
        config,
        planned_model(config, base),
        Cluster(arguments.gpus, name, gpu, per_machine, network),
        arguments.mfu,
    )
    # Written only now, when a layout has been found.
    if arguments.write_config:
        with output_target(arguments.write_config) as target:
            target.write_text(config_text(proposal.layout.launch), encoding="utf-8")
    return proposal


def add_bench_arguments(parser: ArgumentParser) -> None:
    add_optional_recipe_argument(parser)
    count = bounded(int, 1, 10_000)
    add_option(parser, "--windows N", "measurements of each figure", type=count, default=10)
    baselines = (
        "alternate with baselines in this process: bare (the same model in a loop of plain "
        "PyTorch), trainer (transformers' Trainer on its own class), or bare,trainer"
    )
    choices = ("bare", "trainer", "bare,trainer")
    add_option(parser, "--against BASELINES", baselines, choices=choices)
    add_output(parser, "--profile", "write a trace of a few steps to FILE, for Perfetto")
    add_output(parser, "--json", "also write the figures to FILE")


def run_bench(arguments: Namespace, overrides: Overrides) -> None:
    """Measure how fast a run of RECIPE would be here: medians and quartiles of repeated windows,
    after warm-up, of the step of the loop. Without RECIPE: a model of 0.8 M parameters and random
    tokens.

    Nothing is trained, and no run folder is written. To measure the machine of an accelerate
    config: nanogpt-hf launch [--config_file F] bench RECIPE. Of several processes the main one
    reports.
    """
    baselines = arguments.against.split(",") if arguments.against else []
    config = load_optional_recipe("bench", arguments.recipe, overrides)
    # The imports below take seconds; mistakes above and --help should not wait for them.
    from transformers.utils import logging

    from nanogpt_hf.bench.baselines import check_comparable, compare_with_baseline
    from nanogpt_hf.bench.report import measure_all, summary_lines, write_trace
    from nanogpt_hf.bench.workload import build_workload, small_config
    from nanogpt_hf.distributed.accelerate_config import check_launch
    from nanogpt_hf.distributed.accelerator import build_accelerator
    from nanogpt_hf.runs.folder import RunFolder

    logging.disable_progress_bar()
    # Without a recipe, a model that any machine can train in seconds.
    if config is None:
        config = small_config("bench", arguments.mesh.world_size)
    # Nothing is logged, so the recipe's trackers need not be installed.
    config = replace_knobs(config, {"tracking.trackers": []})
    launch = check_launch(config, arguments.mesh)
    accelerator = build_accelerator(launch, RunFolder("runs"))
    work = build_workload(accelerator, config, use_prepared=arguments.recipe is not None)

    # Figures are printed as they are measured.
    def log(line: str) -> None:
        if accelerator.is_main_process:
            show(line)

    # A mistake in --against ends the command before minutes of measurements.
    if baselines:
        check_comparable(work, baselines)
    figures = measure_all(work, arguments.windows, log)
    for line in summary_lines(figures):
        log(line)
    for baseline in baselines:
        figures[f"against_{baseline}"], line = compare_with_baseline(
            work, baseline, arguments.windows
        )
        log(line)
    # The trace comes last: a profiler slows down the steps that it watches.
    if arguments.profile:
        with output_target(arguments.profile) as target:
            write_trace(work, target)
        log(f"trace       {arguments.profile}: open it at https://ui.perfetto.dev")
    if accelerator.is_main_process:
        write_json(arguments.json, figures)


def add_doctor_arguments(parser: ArgumentParser) -> None:
    add_optional_recipe_argument(parser)
    folder = "the run folder of the run to come (default runs/<recipe name>)"
    add_option(parser, "--run-dir DIR", folder)


def run_doctor(arguments: Namespace, overrides: Overrides) -> int:
    """Find faults of this machine and its network: versions, devices, memory, disk, launch, and
    time and bandwidth of an all-reduce with its equality on all processes.

    Each line is ok, a warning (works, but slower or with a risk) or a fault (a run would fail, or
    differ from what the config states). Exit status: 0 without a fault, 1 with one, 2 for an error
    on the command line or in the recipe.
    """
    recipe = load_optional_recipe("doctor", arguments.recipe, overrides)
    # These imports take seconds; mistakes above and --help should not wait for them.
    from nanogpt_hf.doctor.diagnose import Findings, diagnose

    mesh = arguments.mesh
    return diagnose(recipe, arguments.run_dir, Findings(show, mesh), mesh)


def add_knobs_arguments(parser: ArgumentParser) -> None:
    sections = "a section of a recipe (default: all)"
    add_option(parser, "section SECTION", sections, nargs="?", choices=list(SECTIONS))
    add_output(parser, "--json", "also write a JSON schema of recipes to FILE")


def run_knobs(arguments: Namespace) -> None:
    """List every knob of a recipe, or of one section: its meaning, choices and default.

    `--json FILE` writes a JSON schema of recipes, with which editors complete and check them.
    """
    write_json(arguments.json, recipe_schema())
    show(*knob_lines(arguments.section), sep="\n")
