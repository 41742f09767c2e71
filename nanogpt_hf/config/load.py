"""Load a recipe and overrides into a checked Config, and write a Config as a recipe."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from nanogpt_hf.config.checks import find_conflicts, stage_conflicts
from nanogpt_hf.config.dial import dial_choices
from nanogpt_hf.config.names import data_folder
from nanogpt_hf.config.schema import KNOBS, SECTIONS, Config, replace_knobs
from nanogpt_hf.config.stages import stage_problem, with_schedule
from nanogpt_hf.config.stated import COMMAND_LINE, Stated, read_stated
from nanogpt_hf.config.unread import Unread, read_knobs, unread_knobs
from nanogpt_hf.errors import ConfigError
from nanogpt_hf.own_files import notice_once


def load_config(
    recipe: Path | str | None,
    overrides: Sequence[tuple[str, str]] | Mapping[str, Any] = (),
    defaults: dict[str, Any] | None = None,
    name: str = "",
    *,
    is_recorded: bool = False,
) -> Config:
    """Read a recipe, apply `overrides` to it, and check the result. Unstated knobs have `defaults`,
    or the schema's.

    `overrides` are pairs of dotted key and text, or a mapping such as {"train.max_steps": 200}.

    `model.depth` chooses other knobs (config/dial.py). A recipe that states the depth overrides its
    choices by what else it states; `overrides` always do.

    `recipe` is a file, or the name of a shipped recipe such as quickstart. Without a recipe, the
    config has `name`.

    `is_recorded`: the recipe is a run's own, and is read to look at the run, not to train. Rules
    over several knobs are not applied, since they may be newer than the run.

    Raises ConfigError with every problem: unknown keys, wrong types, values out of bounds,
    knobs that nothing reads, values that conflict. A rule over several knobs is not applied if one
    of them has a problem already. A knob of the recipe whose reader an override takes away, such as
    `lora.dropout` without `lora.rank`, is left out.
    """
    stated = read_stated(recipe, overrides, defaults or {}, name)
    unread = _refused_unread(stated)
    config = _dialled(stated)
    config = _without_higher_minimum(stated, config)
    # Shares and values that follow from others become numbers, so that the recorded recipe says
    # what was used.
    if not stage_problem(config):
        follows = config.optim.muon_learning_rate is None
        config = with_schedule(config)
        if follows:
            config = replace(config, unstated=frozenset({"optim.muon_learning_rate"}))
    wrong = set()
    conflicts_of = stage_conflicts if is_recorded else find_conflicts
    for keys, message in conflicts_of(config):
        if not stated.bad & set(keys):
            wrong.add(keys[0])
            origin = stated.origins.get(keys[0], stated.source)
            stated.problems.append(f"{origin}{keys[0]}: {message}")
    for knob in unread:
        if knob.key not in wrong:
            stated.problems.append(f"{stated.origins[knob.key]}{knob.key}: {knob.message}")
    if stated.problems:
        raise ConfigError(stated.problems)
    # What depends on the name of the recipe is resolved here, so that the recorded recipe says what
    # was used.
    resolved = {
        "data.dir": _data_folder(stated, config),
    }
    if config.model.architecture == "gpt2" and config.model.init == "own":
        resolved["model.init"] = "gpt2"
    return replace_knobs(config, resolved)


def check_knobs(recipe: Path | str | None, overrides: Sequence[tuple[str, str]]) -> None:
    """Raises ConfigError for unknown keys, and for values of a wrong type or out of bounds."""
    if problems := read_stated(recipe, overrides, {}, "").problems:
        raise ConfigError(problems)


def unread_overrides(
    recipe: Path | str | None,
    overrides: Sequence[tuple[str, str]],
    defaults: dict[str, Any],
) -> set[str]:
    """The keys of `overrides` whose knobs nothing reads, whatever their values are. Unstated knobs
    have `defaults`, or the schema's.
    """
    stated = read_stated(recipe, overrides, defaults, "")
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


def _unread(stated: Stated) -> list[Unread]:
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


def _refused_unread(stated: Stated) -> list[Unread]:
    """The knobs to refuse, since nothing reads them.

    A knob of the recipe that is read without the overrides is left out instead: they took its
    reader away. A recipe that a run wrote lists every knob, so its unread ones were not stated.
    """
    unread = _unread(stated)
    by_overrides = [knob for knob in unread if stated.origins[knob.key] == COMMAND_LINE]
    by_recipe = [knob for knob in unread if knob not in by_overrides and not stated.is_of_a_run]
    alone: set[str] = set()
    if by_recipe:
        alone = {knob.key for knob in _unread(read_stated(stated.path, (), stated.defaults, ""))}
    left_out = False
    for knob in by_recipe:
        # An entry of a stage or of a source stays: nothing reads it, and the others are read.
        if knob.key not in alone and not knob.is_entry:
            default = stated.defaults.get(knob.key, KNOBS[knob.key].default)
            stated.values[knob.key] = default
            del stated.origins[knob.key]
            line = f"{stated.source}{knob.key}: left out, {knob.message}"
            notice_once(line, to_stderr=True)
            left_out = True
    # Without them other knobs are read: a share of the text that is held out, instead of a split.
    if left_out:
        return _refused_unread(stated)
    return by_overrides + [knob for knob in by_recipe if knob.key in alone]


def _dialled(stated: Stated) -> Config:
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


def _data_folder(stated: Stated, config: Config) -> str:
    """The folder of the prepared data: the stated one, or one named after the recipe; after the
    text if the command line replaces the recipe's.
    """
    overriding = {key for key, _ in stated.overrides}
    of_recipe = stated.recipe.get("data.source")
    replaced = "data.source" in overriding and of_recipe not in (None, config.data.source)
    if replaced and not config.data.dir:
        return data_folder(config.data.source, config.data.tokenizer)
    return config.data.dir or f"data/{config.name}"


def _without_higher_minimum(stated: Stated, config: Config) -> Config:
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
    line = (
        f"{stated.source}{key}: left out, {optim.lowest_learning_rate} is above "
        f"optim.learning_rate {optim.learning_rate}; a tenth of that holds"
    )
    notice_once(line, to_stderr=True)
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
