"""How fast a run of RECIPE would be here, and where its time goes: medians and quartiles of
repeated windows, after warm-up, of the loop's own step. Without RECIPE: a model of 0.8 M parameters
on synthetic tokens.

Nothing is trained: no run folder is written. On the machine of an accelerate config:
cli.py launch [--config_file F] bench RECIPE. With several processes the main one reports.
"""

import argparse

from nanogpt_hf.commands.arguments import (
    add_json_argument,
    add_option,
    add_optional_recipe_argument,
    load_optional_recipe,
)
from nanogpt_hf.config.values import bounded
from nanogpt_hf.console import show
from nanogpt_hf.errors import UserError, did_you_mean
from nanogpt_hf.runs.files import output_file, output_target, write_json

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
    add_json_argument(parser, "the figures")


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    baselines = arguments.against.split(",") if arguments.against else []
    for name in baselines:
        if name not in BASELINES:
            near = did_you_mean(name, BASELINES)
            raise UserError(f"--against: {name!r} is none of {', '.join(BASELINES)}{near}")
    config = load_optional_recipe("bench", arguments.recipe, overrides)
    # The imports below take seconds; mistakes above and --help should not wait for them.
    from transformers.utils import logging

    from nanogpt_hf.bench.baselines import check_comparable
    from nanogpt_hf.bench.clock import build_workload
    from nanogpt_hf.bench.report import (
        compare_with_baseline,
        measure_all,
        summary_lines,
        write_trace,
    )
    from nanogpt_hf.bench.synthetic import small_config
    from nanogpt_hf.distributed.accelerator import build_accelerator
    from nanogpt_hf.runs.folder import RunFolder

    logging.disable_progress_bar()
    if config is None:
        config = small_config("bench", arguments.mesh.world_size)
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
