"""What a recipe and the command line state: their knobs, converted, and what is wrong with them."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanogpt_hf.config.aliases import suggestion
from nanogpt_hf.config.names import find_recipe, shipped_recipes
from nanogpt_hf.config.schema import KNOBS, SECTIONS, Config, replace_knobs
from nanogpt_hf.config.sources import read_sources
from nanogpt_hf.config.stages import read_stages
from nanogpt_hf.config.values import (
    RecipeLoader,
    convert,
    is_null,
    parse_field,
    parse_settings,
    read_settings,
)
from nanogpt_hf.errors import ConfigError, did_you_mean, one_line

# Knobs and their values as text.
Overrides = list[tuple[str, str]]
# The origin of an override, as a message names it.
COMMAND_LINE = "--"
# Knobs whose lists of mappings have a schema of their own, and what reads the lists.
_READERS = {"data.source": read_sources, "train.stages": read_stages}


def _read_recipe(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The dotted keys and values of a recipe, and its errors of structure."""
    if not os.path.lexists(path):
        near = did_you_mean(path.stem, shipped_recipes())
        raise ConfigError([f"{path}: no such recipe{near}"])
    if os.path.isfile(path / "recipe.yaml"):
        raise ConfigError([f"{path}: is a run folder; give its recipe: {path / 'recipe.yaml'}"])
    try:
        tree = parse_settings(read_settings(path), RecipeLoader) or {}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError([f"{path}: cannot be read as a recipe in YAML: {reason}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: expected sections ({', '.join(SECTIONS)}), got {tree!r:.80}"])
    values = {}
    problems = []
    for section, body in tree.items():
        body = body or {}
        if section not in SECTIONS:
            near = suggestion(str(section), SECTIONS)
            problems.append(f"{path}: {section!s:.80}: unknown section{near}")
        elif not isinstance(body, dict):
            problems.append(f"{path}: {section}: expected knobs under it, got {body!r:.80}")
        else:
            values |= {f"{section}.{name}": value for name, value in body.items()}
    return values, problems


def recipe_name(path: Path) -> str:
    """`recipes/gpt2_124m.yaml` -> gpt2_124m; a run folder's own recipe.yaml is named after its
    folder.
    """
    return path.resolve().parent.name if path.stem == "recipe" else path.stem


def stated_knobs(
    recipe: Path | str | None, overrides: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """Dotted key -> value as the recipe or the command line states it, unchecked; without nulls.

    Raises ConfigError if the recipe cannot be read.
    """
    stated = (_read_recipe(find_recipe(recipe))[0] if recipe else {}) | dict(overrides)
    return {key: value for key, value in stated.items() if not is_null(value)}


def _convert_all(
    stated: Iterable[tuple[str, str, Any]], values: dict[str, Any], problems: list[str]
) -> tuple[dict[str, str], set[str]]:
    """Convert what recipe and command line state, (origin, key, value) in order, into `values`.

    Returns where each knob was set, as a message names it, and the knobs with a problem.
    """
    origins: dict[str, str] = {}
    bad: set[str] = set()
    for origin, key, value in stated:
        mapping, _, field = key.rpartition(".")
        is_field = mapping in KNOBS and KNOBS[mapping].kind == dict[str, Any]
        if is_field:
            key = mapping
        if key not in KNOBS:
            problems.append(f"{origin}{key}: unknown key{suggestion(key, KNOBS)}")
            continue
        origins[key] = origin
        try:
            if is_field:
                # --model.extra.NAME VALUE sets one field of the mapping
                value = values.get(mapping, {}) | {field: parse_field(value)}
            value = convert(KNOBS[key], value)
            is_list = key in _READERS and isinstance(value, list)
            values[key] = _READERS[key](value) if is_list else value
        except ValueError as error:
            problems.append(f"{origin}{key}: {error}")
            bad.add(key)
    return origins, bad


def as_overrides(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Values of knobs as the command line states them; lists and mappings as they are."""
    return [
        (key, value if isinstance(value, str | list | dict) else json.dumps(value))
        for key, value in values.items()
    ]


@dataclass
class Stated:
    """What a recipe and the command line state, and what is wrong with it."""

    path: Path | None
    # The knobs of the recipe, as the file states them.
    recipe: dict[str, Any]
    overrides: Overrides
    # The name of the config.
    name: str
    defaults: dict[str, Any]
    # The values of the defaults and of all stated knobs, converted.
    values: dict[str, Any]
    # Lines for the user.
    problems: list[str]
    # Where each knob was stated, as a message about it begins.
    origins: dict[str, str] = field(default_factory=dict)
    # The knobs with a problem.
    bad: set[str] = field(default_factory=set)

    @property
    def source(self) -> str:
        """The origin of what no override states."""
        return f"{self.path}: " if self.path else COMMAND_LINE

    @property
    def config(self) -> Config:
        return replace_knobs(Config(name=self.name), self.values)

    @property
    def is_of_a_run(self) -> bool:
        """Whether a run wrote the recipe: it states all sections, and every knob of them."""
        return {key.partition(".")[0] for key in self.recipe}.issuperset(SECTIONS)


def read_stated(
    recipe: Path | str | None,
    overrides: Sequence[tuple[str, str]] | Mapping[str, Any],
    defaults: dict[str, Any],
    name: str,
) -> Stated:
    """Read a recipe and overrides, and convert their values."""
    path = find_recipe(recipe) if recipe else None
    overrides = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    in_recipe: dict[str, Any] = {}
    problems: list[str] = []
    if path:
        in_recipe, problems = _read_recipe(path)
    name = recipe_name(path) if path else name
    stated = Stated(path, in_recipe, overrides, name, defaults, dict(defaults), problems)
    # A run of an earlier version has recorded knobs that are gone. Without a value they asked for
    # nothing.
    gone = {key for key, value in in_recipe.items() if is_null(value)} - KNOBS.keys()
    left_out = gone if stated.is_of_a_run else set()
    # The command line comes last, so that its values replace those in the recipe.
    pairs = [(stated.source, *pair) for pair in in_recipe.items() if pair[0] not in left_out]
    pairs += [(COMMAND_LINE, *pair) for pair in overrides]
    stated.origins, stated.bad = _convert_all(pairs, stated.values, problems)
    return stated
