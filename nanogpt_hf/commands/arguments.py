"""Arguments that several commands share, and their types for argparse."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from nanogpt_hf.config.load import knob_lines, load_config, stated_knobs
from nanogpt_hf.config.schema import Config
from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.files import output_file


def load_text_recipe(command: str, recipe: str, overrides: list[tuple[str, str]]) -> Config:
    """The resolved recipe of a command that reads text. Raises UserError for one of reinforcement learning."""
    if stated_knobs(recipe, overrides).get("rl.task"):
        raise UserError(f"cli.py {command}: {recipe}: has an rl.task, and so no text; its command is `cli.py rl`")
    return load_config(recipe, overrides)


def number(kind: type[int] | type[float], low: float, high: float = math.inf) -> Callable[[str], int | float]:
    """An argparse type: a number within inclusive bounds."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            expected = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None
        if not low <= value <= high:
            bounds = f"at least {low}" if high == math.inf else f"at least {low} and at most {high}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {text}")
        return value

    return parse


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a run folder (its best model), a model folder, or a Hub id")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How the next token is sampled."""
    parser.add_argument("--temperature", type=number(float, 0), default=0.8, help="0 is greedy; default %(default)s")
    parser.add_argument("--top-k", type=number(int, 1), default=None, help="sample from the k likeliest tokens only")
    parser.add_argument(
        "--top-p", type=number(float, 0, 1), default=None, help="sample from the likeliest tokens that add up to p only"
    )
    parser.add_argument("--seed", type=number(int, 0, 2**62), default=1337, help="default %(default)s")


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `generate_tokens` that `add_sampling_arguments` states, but for the seed."""
    return {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")}


def add_json_argument(parser: argparse.ArgumentParser, content: str) -> None:
    parser.add_argument("--json", metavar="FILE", type=output_file, help=f"also write {content} to FILE; - is stdout")


def list_knobs(parser: argparse.ArgumentParser) -> None:
    """End the help of a command that reads a recipe with every knob."""
    parser.epilog = "Set any knob of the recipe by its name:\n\n" + "\n".join(knob_lines())
