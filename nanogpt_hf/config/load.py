"""Load a recipe and overrides into a checked Config, and write a Config as a recipe."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from nanogpt_hf.config.checks import find_conflicts
from nanogpt_hf.config.dial import dial_choices
from nanogpt_hf.config.names import find_recipe, shipped_recipes
from nanogpt_hf.config.schema import KNOBS, SECTIONS, Config, replace_knobs
from nanogpt_hf.config.sources import read_sources
from nanogpt_hf.config.stages import read_stages
from nanogpt_hf.config.values import RecipeLoader, convert, is_null, parse_settings, read_settings
from nanogpt_hf.errors import ConfigError, did_you_mean, one_line

Overrides = list[tuple[str, str]]  # knobs and their values as text
_COMMAND_LINE = "--"  # the origin of an override, as a message names it
_READERS = {"data.source": read_sources, "train.stages": read_stages}  # of lists of mappings


def _read_recipe(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The dotted keys and values of a recipe, and its errors of structure."""
    if not os.path.lexists(path):
        near = did_you_mean(path.stem, shipped_recipes())
        raise ConfigError([f"{path}: no such recipe{near}"])
    try:
        tree = parse_settings(read_settings(path), RecipeLoader) or {}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError([f"{path}: cannot be read as a recipe in YAML: {reason}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: expected sections ({', '.join(SECTIONS)}), got {tree!r:.80}"])
    values, problems = {}, []
    for section, body in tree.items():
        body = body or {}
        if section not in SECTIONS:
            near = did_you_mean(str(section), SECTIONS)
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
        if mapping in KNOBS and KNOBS[mapping].kind == dict[str, Any]:
            # --model.extra.NAME VALUE sets one field of the mapping
            key, value = mapping, values.get(mapping, {}) | {field: value}
        if key not in KNOBS:
            problems.append(f"{origin}{key}: unknown key{did_you_mean(key, KNOBS)}")
            continue
        origins[key] = origin
        try:
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
    overrides = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    stated, problems = _read_recipe(recipe) if recipe else ({}, [])
    source, values = f"{recipe}: " if recipe else _COMMAND_LINE, dict(defaults or {})
    pairs = [(source, *pair) for pair in stated.items()]
    pairs += [(_COMMAND_LINE, *pair) for pair in overrides]
    origins, bad = _convert_all(pairs, values, problems)
    config = replace_knobs(Config(name=recipe_name(recipe) if recipe else name), values)
    if (depth := config.model.depth) is not None and problems:
        bad = set(KNOBS)  # the dial chooses once they are corrected: skip the rules over knobs
    elif depth is not None:
        overriding = {key for key, _ in overrides}
        if stated.get("model.depth") is not None:
            overriding |= stated.keys()
        origin = origins["model.depth"]
        try:
            chosen = dial_choices(config, depth, overriding)
            config = replace_knobs(config, {choice.key: choice.value for choice in chosen})
            config = replace(replace_knobs(config, {"model.depth": None}), dial=chosen)
            origins |= {c.key: origin for c in chosen if c.key not in overriding}
        except ValueError as error:
            problems.append(f"{origin}model.depth: {error}")
            bad = set(KNOBS)  # the knobs are not chosen yet: skip the rules over them
    for keys, message in find_conflicts(config):
        if not bad & set(keys):
            problems.append(f"{origins.get(keys[0], source)}{keys[0]}: {message}")
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
    return {section: asdict(getattr(config.recipe, section)) for section in SECTIONS}


def config_to_yaml(config: Config) -> str:
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)
