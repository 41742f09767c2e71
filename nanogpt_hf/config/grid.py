"""Grid of a sweep: `--KNOB a,b,c` on the command line gives one run for each combination of values."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import KNOBS, Config
from nanogpt_hf.config.values import convert, parse_flow_list
from nanogpt_hf.errors import ConfigError, UserError

_LARGEST_GRID = 1000  # runs
_LONGEST_NAME = 120  # of a run folder, in characters
# Knobs of `data` that leave the prepared tokens as they are; runs that differ in any other have separate data folders.
_SAME_TOKENS = ("data.block_size", "data.order", "data.packing", "data.num_proc", "data.dir", "data.max_epochs")
_SAME_TOKENS += ("data.streaming",)

Overrides = list[tuple[str, str]]


@dataclass(frozen=True)
class GridRun:
    """One run of a grid: its folder's name, its value of each swept knob, and how it differs from the recipe."""

    name: str
    values: dict[str, Any]
    overrides: Overrides
    config: Config


def build_grid(recipe: str, overrides: Sequence[tuple[str, str]]) -> list[GridRun]:
    """The runs of all combinations of the values in `overrides`, the last knob varying fastest.

    Raises UserError if no knob has several values, or runs would start from a model or push to the Hub, and ConfigError
    with the problems of all runs.
    """
    axes = {key: _values(key, text) for key, text in dict(overrides).items()}
    swept = [key for key, texts in axes.items() if len(texts) > 1]
    if not swept:
        raise UserError("cli.py sweep: no knob has several values; give one, such as --optim.learning_rate 1e-3,3e-3")
    count = 1
    for texts in axes.values():
        count *= len(texts)
    if count > _LARGEST_GRID:
        raise UserError(f"cli.py sweep: {count:,} runs; at most {_LARGEST_GRID:,} in one grid")
    runs, problems = [], {}
    for texts in itertools.product(*axes.values()):
        try:
            runs.append(_grid_run(recipe, dict(zip(axes, texts, strict=True)), swept))
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems)  # most are the same in all runs
    if problems:
        raise ConfigError(problems)
    for run in runs:
        if start := run.config.finetune.model:
            raise UserError(f"{recipe}: starts from {start}; the runs of a sweep are trained from scratch")
        if run.config.hub.push:
            raise UserError("hub.push: the runs of a sweep would push to one repository; set it to null")
    names = [run.name for run in runs]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise UserError(f"cli.py sweep: several runs would be named {min(repeated)}; give different values")
    return runs


def _values(key: str, text: str) -> list[str]:
    """`1e-3,3e-3` -> its values as the texts that an override has. Raises UserError if they cannot be read."""
    if not re.search(r"[,\[\]'\"]", text):
        return [text]
    try:
        values = [_text(value) for value in parse_flow_list(text)]
    except ValueError as error:
        raise UserError(
            f"--{key}: expected values with commas between them, quoted as YAML if need be: {error}"
        ) from None
    return values or [""]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        raise ValueError("a mapping is no value")
    if isinstance(value, list):
        if any(not isinstance(part, str) or set(part) & set("[],") for part in value):
            raise ValueError("a list holds names without commas or brackets")
        return f"[{', '.join(value)}]"
    return "null" if value is None else value


def _grid_run(recipe: str, texts: dict[str, str], swept: list[str]) -> GridRun:
    overrides = list(texts.items())
    config = load_config(recipe, overrides)
    values = {key: convert(KNOBS[key], texts[key]) for key in swept}
    other_tokens = [key for key in swept if key.startswith("data.") and key not in _SAME_TOKENS]
    if other_tokens and "data.dir" not in swept:
        overrides.append(("data.dir", f"{config.data.dir}-{_label(values, other_tokens)}"))
        config = load_config(recipe, overrides)
    return GridRun(_label(values, swept), values, overrides, config)


def _label(values: dict[str, Any], keys: list[str]) -> str:
    """`depth=2_seed=1`: a name for a folder."""
    last_parts = [key.rpartition(".")[2] for key in keys]
    shown = last_parts if len(set(last_parts)) == len(keys) else keys
    parts = (f"{name}={values[key]}" for name, key in zip(shown, keys, strict=True))
    return re.sub(r"[^\w.+=-]+", "-", "_".join(parts))[:_LONGEST_NAME].strip("-")


def sweep_name(runs: Sequence[GridRun]) -> str:
    """`quickstart-depth`: the recipe and the swept knobs."""
    return "-".join([runs[0].config.name, *(key.rpartition(".")[2] for key in runs[0].values)])
