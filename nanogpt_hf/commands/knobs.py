"""List every knob of a recipe: its meaning, choices and default.

`--json FILE` writes the schema: types, choices, default, bounds and meaning of each knob.
"""

import argparse

from nanogpt_hf.commands.arguments import add_json_argument
from nanogpt_hf.config.knobs import knob_lines, knob_schema
from nanogpt_hf.console import show
from nanogpt_hf.runs.files import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser, "the schema")


def run(arguments: argparse.Namespace) -> None:
    if arguments.json:
        write_json(arguments.json, knob_schema())
    show(*knob_lines(), sep="\n")
