"""Find faults of this machine and its network: versions, devices, memory, disk, launch, and time
and bandwidth of an all-reduce with its equality on all processes. With a RECIPE, also the disk
that it needs.

Each line is ok, a warning (works, but slower or with a risk) or a fault (a run would fail, or
differ from what the config states). Exit status: 0 without a fault, 1 with one, 2 for an error
on the command line or in the recipe.
"""

import argparse

from nanogpt_hf.commands.arguments import add_json_argument, load_text_recipe
from nanogpt_hf.commands.console import show
from nanogpt_hf.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="default: a model of 0.8 M parameters"
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help="the run folder of the run to come (default runs/<recipe name>)",
    )
    add_json_argument(parser, "the findings and their figures")
    parser.epilog = "Set any knob of RECIPE by its name, as for `pretrain`."


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    if overrides and not arguments.recipe:
        raise UserError(
            f"cli.py doctor: --{overrides[0][0]}: a knob of a recipe, but no RECIPE is given"
        )
    recipe = load_text_recipe("doctor", arguments.recipe, overrides) if arguments.recipe else None
    # These imports take seconds; mistakes above and --help should not wait for them.
    from nanogpt_hf.doctor.diagnose import Report, diagnose

    mesh = arguments.mesh
    return diagnose(recipe, arguments.run_dir, Report(show, arguments.json, mesh), mesh)
