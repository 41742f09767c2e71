"""Find faults of this machine and its network: versions, devices, memory, disk, launch, and time
and bandwidth of an all-reduce with its equality on all processes.

Each line is ok, a warning (works, but slower or with a risk) or a fault (a run would fail, or
differ from what the config states). Exit status: 0 without a fault, 1 with one, 2 for an error
on the command line or in the recipe.
"""

import argparse

from nanogpt_hf.commands.arguments import (
    add_json_argument,
    add_option,
    add_optional_recipe_argument,
    load_optional_recipe,
)
from nanogpt_hf.console import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_optional_recipe_argument(parser)
    folder = "the run folder of the run to come (default runs/<recipe name>)"
    add_option(parser, "--run-dir DIR", folder)
    add_json_argument(parser, "the findings and their figures")


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    recipe = load_optional_recipe("doctor", arguments.recipe, overrides)
    # These imports take seconds; mistakes above and --help should not wait for them.
    from nanogpt_hf.doctor.diagnose import Report, diagnose

    mesh = arguments.mesh
    return diagnose(recipe, arguments.run_dir, Report(show, arguments.json, mesh), mesh)
