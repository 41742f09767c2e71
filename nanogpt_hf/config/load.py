"""Load a recipe and overrides into a checked Config, and write a Config as a recipe."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from nanogpt_hf.config.checks import find_conflicts
from nanogpt_hf.config.dial import DIAL_INPUTS, dial_choices
from nanogpt_hf.config.schema import (
    KNOBS,
    SECTIONS,
    Config,
    replace_knobs,
)
from nanogpt_hf.config.shipped import find_recipe, shipped_recipes
from nanogpt_hf.config.sources import read_sources
from nanogpt_hf.config.values import SHORT, RecipeLoader, convert
from nanogpt_hf.errors import ConfigError, did_you_mean, one_line

_LARGEST_RECIPE = 1_000_000  # characters
_COMMAND_LINE = "--"  # the origin of an override, as a message names it


def _read_recipe(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The dotted keys and values of a recipe, and its errors of structure."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_LARGEST_RECIPE + 1)
        if len(text) > _LARGEST_RECIPE:  # such as the text to train on
            raise OSError(f"it has over {_LARGEST_RECIPE:,} characters")
        tree = yaml.load(text, Loader=RecipeLoader) or {}
    except FileNotFoundError:
        near = did_you_mean(path.name, (p.name for p in path.parent.glob("[!.]*.y*ml")))
        near = near or did_you_mean(path.stem, shipped_recipes())
        raise ConfigError([f"{path}: no such recipe{near}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError([f"{path}: cannot be read as a recipe: {reason}"]) from None
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        reason = one_line(str(getattr(error, "problem", error)))
        raise ConfigError([f"{path}: {line}not valid YAML: {reason}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            [f"{path}: expected sections ({', '.join(SECTIONS)}), got {type(tree).__name__}"]
        )
    values, problems = {}, []
    for section, body in tree.items():
        if section not in SECTIONS:
            near = did_you_mean(str(section), SECTIONS)
            problems.append(f"{path}: {section!s:.80}: unknown section{near}")
        elif body is not None and not isinstance(body, dict):
            problems.append(f"{path}: {section}: expected knobs under it, got {SHORT.repr(body)}")
        else:
            values |= {f"{section}.{name}": value for name, value in (body or {}).items()}
    return values, problems


def recipe_name(path: Path) -> str:
    """`recipes/gpt2_124m.yaml` -> gpt2_124m; a run folder's own recipe.yaml is named after its
    folder.
    """
    name = path.resolve().parent.name if path.stem == "recipe" else path.stem
    if name.strip(".") == "":
        raise ConfigError(
            [f"{path}: a run named after this file would have no name; rename the recipe"]
        )
    return name


def stated_knobs(
    recipe: Path | str | None, overrides: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
    """Dotted key -> value as the recipe or the command line states it, unchecked.

    Raises ConfigError if the recipe cannot be read.
    """
    return (_read_recipe(find_recipe(recipe))[0] if recipe else {}) | dict(overrides)


@dataclasses.dataclass
class _Reading:
    """The knobs as read from defaults, recipe and command line in turn, with all problems."""

    values: dict[str, Any]
    # where a knob was set, as a message names it
    origins: dict[str, str] = dataclasses.field(default_factory=dict)
    bad: set[str] = dataclasses.field(default_factory=set)  # knobs whose last value is a problem
    problems: list[str] = dataclasses.field(default_factory=list)

    def apply(self, origin: str, pairs: Iterable[tuple[str, Any]]) -> None:
        """Convert the values from one origin; they replace those from earlier ones."""
        for key, value in pairs:
            section, _, field = key.rpartition(".")
            if section in KNOBS and KNOBS[section].kind == dict[str, Any]:
                # --model.extra.NAME VALUE sets one field of the mapping
                key, value = section, self.values.get(section, {}) | {field: value}
            if key not in KNOBS:
                self.problems.append(f"{origin}{key}: unknown key{did_you_mean(key, KNOBS)}")
                continue
            self.origins[key] = origin
            self.bad.discard(key)
            try:
                value = convert(KNOBS[key], value)
                is_mixture = key == "data.source" and isinstance(value, list)
                self.values[key] = read_sources(value) if is_mixture else value
            except ValueError as error:
                self.problems.append(f"{origin}{key}: {error}")
                self.bad.add(key)

    def apply_dial(self, config: Config, depth: int, overriding: set[str]) -> Config:
        """`config` with the knobs that `model.depth` chooses, except `overriding` ones."""
        try:
            chosen = dial_choices(config, depth, overriding)
        except ValueError as error:
            self.problems.append(f"{self.origins['model.depth']}model.depth: {error}")
            self.bad |= set(KNOBS)  # the knobs are not chosen yet: skip the rules over them
            return config
        self.origins |= {
            c.key: self.origins["model.depth"] for c in chosen if c.key not in overriding
        }
        config = replace_knobs(
            config, {choice.key: choice.value for choice in chosen} | {"model.depth": None}
        )
        return dataclasses.replace(config, dial=chosen)


def load_config(
    recipe: Path | str | None,
    overrides: Sequence[tuple[str, str]] | Mapping[str, Any] = (),
    defaults: dict[str, Any] | None = None,
    name: str = "",
) -> Config:
    """Read a recipe, apply `overrides` to it, and check the result. Unstated knobs have `defaults`,
    or the schema's.

    `overrides` are pairs of dotted key and text, or a mapping such as {"train.max_steps": 200}.

    `model.depth` chooses other knobs (config/dial.py). A recipe that states the depth overrides its
    choices by what else it states; `overrides` always do.

    `recipe` is a file, or the name of a shipped recipe such as quickstart. Without a recipe, the
    config has `name`.

    Raises ConfigError with every problem: unknown keys, wrong types, values out of bounds,
    values that conflict. A rule over several knobs is not applied if one of them has a problem
    already.
    """
    recipe = find_recipe(recipe) if recipe else None
    if isinstance(overrides, Mapping):
        as_text = {
            key: str(value)
            for key, value in overrides.items()
            if not isinstance(value, list | dict | None)
        }
        overrides = list((dict(overrides) | as_text).items())
    stated, problems = _read_recipe(recipe) if recipe else ({}, [])
    reading = _Reading(dict(defaults or {}), problems=problems)
    reading.apply(f"{recipe}: ", stated.items())
    overriding = {key for key, _ in overrides}  # knobs that override the size dial
    if reading.values.get("model.depth") is not None:
        overriding |= set(stated)
    reading.apply(_COMMAND_LINE, overrides)
    config = replace_knobs(Config(name=recipe_name(recipe) if recipe else name), reading.values)
    if (depth := config.model.depth) is not None and not reading.bad & DIAL_INPUTS:
        config = reading.apply_dial(config, depth, overriding)
    for conflict in find_conflicts(config):
        if not reading.bad & set(conflict.keys):
            key = conflict.keys[0]
            origin = reading.origins.get(key, f"{recipe}: " if recipe else _COMMAND_LINE)
            problems.append(f"{origin}{key}: {conflict.message}")
    if problems:
        raise ConfigError(problems)
    resolved = {
        "data.dir": os.path.expanduser(config.data.dir or f"data/{config.name}"),
        "data.tokenizer": os.path.expanduser(config.data.tokenizer),
    }
    if config.model.architecture == "gpt2" and config.model.init == "own":
        resolved["model.init"] = "gpt2"
    return replace_knobs(config, resolved)


def config_to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Section -> knob -> value, every knob resolved."""
    return {section: dataclasses.asdict(getattr(config, section)) for section in SECTIONS}


def config_to_yaml(config: Config) -> str:
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)
