"""How fast a run of RECIPE would be here, and where its time goes: medians and quartiles of
repeated windows, after warm-up, of the loop's own step. Without RECIPE: a model of 0.8 M parameters
on synthetic tokens.

Nothing is trained: no run folder is written. On the machine of an accelerate config:
cli.py launch [--config_file F] bench RECIPE. With several processes the main one reports.
"""

import argparse
import dataclasses
from pathlib import Path

from nanogpt_hf.commands.arguments import (
    add_json_argument,
    add_option,
    add_optional_recipe_argument,
    load_optional_recipe,
)
from nanogpt_hf.commands.console import show
from nanogpt_hf.config.values import bounded
from nanogpt_hf.cpu import allowed_cores
from nanogpt_hf.errors import UserError, did_you_mean
from nanogpt_hf.runs.files import output_file, output_target, write_json

_PROCESSES_PER_CORE = 4  # more would fill the memory and measure nothing
BASELINES = ("bare", "trainer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_optional_recipe_argument(parser)
    count = bounded(int, 1, 10_000)
    add_option(parser, "--windows N", "measurements of each figure", type=count, default=10)
    baselines = (
        "alternate with baselines in this process: bare (the same model in a loop of plain "
        "PyTorch), trainer (transformers' Trainer on its own class), or bare,trainer"
    )
    add_option(parser, "--against BASELINES", baselines)
    trace = "write a trace of a few steps there, for Perfetto"
    add_option(parser, "--profile FILE", trace, type=output_file)
    scaling = (
        "measure several numbers of processes: the same step shared (strong), or the same work "
        "per process (weak)"
    )
    add_option(parser, "--scaling", scaling, choices=["strong", "weak"])
    split = (
        "of --scaling: how processes share the work (default ddp); tp: each matrix, pp: the layers"
    )
    add_option(parser, "--split", split, choices=["ddp", "fsdp2", "tp", "pp"])
    add_option(parser, "--processes N,N,...", "of --scaling", default="1,2")
    plot = "of --scaling (default scaling_<kind>.png)"
    add_option(parser, "--plot FILE", plot, type=output_file)
    add_json_argument(parser, "the figures")


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    baselines, counts = _check(arguments)
    config = load_optional_recipe("bench", arguments.recipe, overrides)
    # The imports below take seconds; mistakes above and --help should not wait for them.
    from transformers.utils import logging

    from nanogpt_hf.data.synthetic import small_config

    logging.disable_progress_bar()
    if config is None:
        config = small_config("bench", arguments.mesh.world_size)
    if arguments.scaling:
        _scale(arguments, config, overrides, counts)
    else:
        _measure(arguments, config, baselines)


def _check(arguments: argparse.Namespace) -> tuple[list[str], list[int]]:
    """The requested baselines and numbers of processes. Raises UserError for invalid ones."""
    baselines = arguments.against.split(",") if arguments.against else []
    words, cores = arguments.processes.split(","), allowed_cores()
    for name in baselines:
        if name not in BASELINES:
            near = did_you_mean(name, BASELINES)
            raise UserError(f"--against: {name!r} is none of {', '.join(BASELINES)}{near}")
    if not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"--processes {arguments.processes}: expected numbers such as 1,2,4")
    if max(map(int, words)) > _PROCESSES_PER_CORE * cores:
        raise UserError(
            f"--processes {arguments.processes:.80}: too many for this machine's {cores} cores"
        )
    if arguments.split and not arguments.scaling:
        raise UserError(
            "--split: only with --scaling; for one measurement name a config: launch "
            "--config_file F bench"
        )
    if arguments.scaling:
        if arguments.mesh.world_size > 1:
            raise UserError(
                "--scaling launches its processes itself; start it without accelerate launch"
            )
        if not arguments.recipe:
            raise UserError("--scaling: name a RECIPE, whose step is to be shared")
        if baselines or arguments.profile:
            raise UserError("--scaling goes without --against and --profile")
    return baselines, sorted({1, *map(int, words)})


def _measure(arguments: argparse.Namespace, config, baselines: list[str]) -> None:
    from nanogpt_hf.bench.baselines import check_comparable
    from nanogpt_hf.bench.report import (
        compare_with_baseline,
        measure_all,
        summary_lines,
        write_trace,
    )
    from nanogpt_hf.bench.workload import build_workload
    from nanogpt_hf.distributed.accelerator import build_accelerator
    from nanogpt_hf.runs.folder import RunFolder

    accelerator = build_accelerator(config, RunFolder("runs"), arguments.mesh)
    work = build_workload(accelerator, config, use_prepared=arguments.recipe is not None)

    def log(line: str) -> None:
        if accelerator.is_main_process:
            show(line)

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
    if arguments.profile:
        with output_target(arguments.profile) as target:
            write_trace(work, target)
        log(f"trace       {arguments.profile}: open it at https://ui.perfetto.dev")
    if arguments.json and accelerator.is_main_process:
        write_json(arguments.json, figures)


def _scale(
    arguments: argparse.Namespace, config, overrides: list[tuple[str, str]], counts: list[int]
) -> None:
    from nanogpt_hf.bench import scaling
    from nanogpt_hf.bench.workload import strong_scaling, weak_scaling

    split = arguments.split or "ddp"
    if arguments.scaling == "weak":
        shared = {count: weak_scaling(config, count) for count in counts}
    else:
        # tensor-parallel processes work on the same sequences; a pipeline needs as many
        # micro-batches as stages
        shared = {count: strong_scaling(config, 1 if split == "tp" else count) for count in counts}

    def words(count: int) -> list[str]:
        train = shared[count].train
        ours = [
            ("train.tokens_per_step", train.tokens_per_step),
            ("train.micro_batch_size", train.micro_batch_size),
        ]
        knobs = [word for key, value in (*overrides, *ours) for word in (f"--{key}", str(value))]
        return [arguments.recipe, *knobs, "--windows", str(arguments.windows)]

    points = scaling.measure(counts, words, show, split)
    show("\n".join(scaling.table(points)))
    plot = arguments.plot or Path(f"scaling_{arguments.scaling}.png")
    with output_target(plot) as target:
        scaling.draw(points, f"{config.name}: {arguments.scaling} scaling, {split}", target)
    show(f"plot: {plot}")
    if arguments.json:
        write_json(
            arguments.json,
            {
                "scaling": arguments.scaling,
                "split": split,
                "points": [dataclasses.asdict(p) for p in points],
            },
        )
