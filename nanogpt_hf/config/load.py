"""Load a recipe and overrides into a checked Config, and write a Config as a recipe."""

import functools
import json
import logging
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from nanogpt_hf.config.aliases import suggestion
from nanogpt_hf.config.checks import find_conflicts
from nanogpt_hf.config.dial import dial_choices
from nanogpt_hf.config.names import data_folder, find_recipe, shipped_recipes
from nanogpt_hf.config.schema import KNOBS, SECTIONS, Config, replace_knobs
from nanogpt_hf.config.sources import read_sources
from nanogpt_hf.config.stages import read_stages, stage_problem, with_schedule
from nanogpt_hf.config.unread import Unread, read_knobs, unread_knobs
from nanogpt_hf.config.values import (
    RecipeLoader,
    convert,
    is_null,
    parse_field,
    parse_settings,
    read_settings,
)
from nanogpt_hf.errors import ConfigError, did_you_mean, one_line

logger = logging.getLogger(__name__)
# Knobs and their values as text.
Overrides = list[tuple[str, str]]
# The origin of an override, as a message names it.
_COMMAND_LINE = "--"
# Knobs whose lists of mappings have a schema of their own, and what reads the lists.
_READERS = {"data.source": read_sources, "train.stages": read_stages}


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
    knobs that nothing reads, values that conflict. A rule over several knobs is not applied if one
    of them has a problem already. A knob of the recipe whose reader an override takes away, such as
    `lora.dropout` without `lora.rank`, is left out.
    """
    stated = _read(recipe, overrides, defaults or {}, name)
    unread = _refused_unread(stated)
    config = _dialled(stated)
    config = _without_higher_minimum(stated, config)
    # Shares and values that follow from others become numbers, so that the recorded recipe says
    # what was used.
    if not stage_problem(config):
        config = with_schedule(config)
    wrong = set()
    for keys, message in find_conflicts(config):
        if not stated.bad & set(keys):
            wrong.add(keys[0])
            origin = stated.origins.get(keys[0], stated.source)
            stated.problems.append(f"{origin}{keys[0]}: {message}")
    for knob in unread:
        if knob.key not in wrong:
            stated.problems.append(f"{stated.origins[knob.key]}{knob.key}: {knob.message}")
    if stated.problems:
        raise ConfigError(stated.problems)
    # Values that depend on the name of the recipe or on this machine's home folder are resolved
    # here, so that the recorded recipe says what was used.
    resolved = {
        "data.dir": os.path.expanduser(_data_folder(stated, config)),
        "data.tokenizer": os.path.expanduser(config.data.tokenizer),
    }
    if config.model.architecture == "gpt2" and config.model.init == "own":
        resolved["model.init"] = "gpt2"
    return replace_knobs(config, resolved)


def check_knobs(recipe: Path | str | None, overrides: Sequence[tuple[str, str]]) -> None:
    """Raises ConfigError for unknown keys, and for values of a wrong type or out of bounds."""
    if problems := _read(recipe, overrides, {}, "").problems:
        raise ConfigError(problems)


def unread_overrides(
    recipe: Path | str | None,
    overrides: Sequence[tuple[str, str]],
    defaults: dict[str, Any],
) -> set[str]:
    """The keys of `overrides` whose knobs nothing reads, whatever their values are. Unstated knobs
    have `defaults`, or the schema's.
    """
    stated = _read(recipe, overrides, defaults, "")
    config = stated.config
    if stated.problems or stage_problem(config):
        return set()
    read = read_knobs(config)
    unread = set()
    for key, _ in overrides:
        # A key is a knob, or one field of a mapping such as `model.extra.head_dim`.
        knob = key if key in KNOBS else key.rpartition(".")[0]
        if knob not in read:
            unread.add(key)
    return unread


@dataclass
class _Stated:
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
        return f"{self.path}: " if self.path else _COMMAND_LINE

    @property
    def config(self) -> Config:
        return replace_knobs(Config(name=self.name), self.values)

    @property
    def is_of_a_run(self) -> bool:
        """Whether a run wrote the recipe: it states all sections, and every knob of them."""
        return {key.partition(".")[0] for key in self.recipe}.issuperset(SECTIONS)


def _read(
    recipe: Path | str | None,
    overrides: Sequence[tuple[str, str]] | Mapping[str, Any],
    defaults: dict[str, Any],
    name: str,
) -> _Stated:
    """Read a recipe and overrides, and convert their values."""
    path = find_recipe(recipe) if recipe else None
    overrides = list(overrides.items() if isinstance(overrides, Mapping) else overrides)
    in_recipe: dict[str, Any] = {}
    problems: list[str] = []
    if path:
        in_recipe, problems = _read_recipe(path)
    name = recipe_name(path) if path else name
    stated = _Stated(path, in_recipe, overrides, name, defaults, dict(defaults), problems)
    # The command line comes last, so that its values replace those in the recipe.
    pairs = [(stated.source, *pair) for pair in in_recipe.items()]
    pairs += [(_COMMAND_LINE, *pair) for pair in overrides]
    stated.origins, stated.bad = _convert_all(pairs, stated.values, problems)
    return stated


def _unread(stated: _Stated) -> list[Unread]:
    """The stated knobs that nothing reads; none if values are wrong, which might hide a reader."""
    config = stated.config
    if stated.problems or stage_problem(config):
        return []
    known = {
        key: stated.values[key]
        for key in stated.origins
        if key not in stated.defaults or stated.values[key] != stated.defaults[key]
    }
    return list(unread_knobs(config, known))


def _refused_unread(stated: _Stated) -> list[Unread]:
    """The knobs to refuse, since nothing reads them.

    A knob of the recipe that is read without the overrides is left out instead: they took its
    reader away. A recipe that a run wrote lists every knob, so its unread ones were not stated.
    """
    unread = _unread(stated)
    by_overrides = [knob for knob in unread if stated.origins[knob.key] == _COMMAND_LINE]
    by_recipe = [knob for knob in unread if knob not in by_overrides and not stated.is_of_a_run]
    alone: set[str] = set()
    if by_recipe:
        alone = {knob.key for knob in _unread(_read(stated.path, (), stated.defaults, ""))}
    left_out = False
    for knob in by_recipe:
        # An entry of a stage or of a source stays: nothing reads it, and the others are read.
        if knob.key not in alone and not knob.is_entry:
            default = stated.defaults.get(knob.key, KNOBS[knob.key].default)
            stated.values[knob.key] = default
            del stated.origins[knob.key]
            _announce_left_out(f"{stated.source}{knob.key}: left out, {knob.message}")
            left_out = True
    # Without them other knobs are read: a share of the text that is held out, instead of a split.
    if left_out:
        return _refused_unread(stated)
    return by_overrides + [knob for knob in by_recipe if knob.key in alone]


@functools.cache
def _announce_left_out(line: str) -> None:
    """Log a line once, however often a command loads the recipe."""
    logger.info(line, extra={"to_stderr": True})


def _dialled(stated: _Stated) -> Config:
    """The stated config with the choices of `model.depth`, if it has one."""
    config = stated.config
    depth = config.model.depth
    if depth is None:
        return config
    if stated.problems:
        # The dial chooses when they are corrected: until then, skip the rules over knobs.
        stated.bad = set(KNOBS)
        return config
    # Without a depth of its own, the recipe's sizes are those of another model: the dial replaces
    # them. A recipe that states the depth means what else it states.
    overriding = {key for key, _ in stated.overrides}
    if stated.recipe.get("model.depth") is not None:
        overriding |= stated.recipe.keys()
    origin = stated.origins["model.depth"]
    try:
        chosen = dial_choices(config, depth, overriding)
    except ValueError as error:
        stated.problems.append(f"{origin}model.depth: {error}")
        stated.bad = set(KNOBS)
        return config
    stated.origins |= {choice.key: origin for choice in chosen if choice.key not in overriding}
    values = {choice.key: choice.value for choice in chosen} | {"model.depth": None}
    return replace(replace_knobs(config, values), derived=chosen)


def _data_folder(stated: _Stated, config: Config) -> str:
    """The folder of the prepared data: the stated one, or one named after the recipe; after the
    text if the command line replaces the recipe's.
    """
    overriding = {key for key, _ in stated.overrides}
    of_recipe = stated.recipe.get("data.source")
    replaced = "data.source" in overriding and of_recipe not in (None, config.data.source)
    if replaced and not config.data.dir:
        return data_folder(config.data.source, config.data.tokenizer)
    return config.data.dir or f"data/{config.name}"


def _without_higher_minimum(stated: _Stated, config: Config) -> Config:
    """The config without a lowest learning rate of the recipe that is above the peak of the command
    line: the recipe's is that of another peak.
    """
    key = "optim.min_learning_rate"
    overriding = {name for name, _ in stated.overrides}
    optim = config.optim
    of_recipe = stated.recipe.get(key) is not None and key not in overriding
    above = optim.lowest_learning_rate > optim.learning_rate
    if not (of_recipe and above and "optim.learning_rate" in overriding) or stated.problems:
        return config
    _announce_left_out(
        f"{stated.source}{key}: left out, {optim.lowest_learning_rate} is above "
        f"optim.learning_rate {optim.learning_rate}; a tenth of that holds"
    )
    return replace_knobs(config, {key: None})


def config_to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Section -> knob -> value, every knob resolved."""
    return {section: asdict(getattr(config.recipe, section)) for section in SECTIONS}


def config_to_yaml(config: Config, keys: Container[str] = KNOBS) -> str:
    """The recipe as YAML: every knob, or the ones of `keys`."""
    tree = {
        section: {name: value for name, value in knobs.items() if f"{section}.{name}" in keys}
        for section, knobs in config_to_dict(config).items()
    }
    stated = {section: knobs for section, knobs in tree.items() if knobs}
    return yaml.safe_dump(stated, sort_keys=False, allow_unicode=True)
