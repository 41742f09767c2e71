"""The recipe in a run folder: read it, and compare the recipe of a resumed run with it."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.config.optim_section import OptimSection
from nanogpt_hf.config.schema import SECTIONS, Config
from nanogpt_hf.config.stages import comparable
from nanogpt_hf.config.unread import read_knobs
from nanogpt_hf.config.values import RecipeLoader, parse_settings, read_settings
from nanogpt_hf.errors import ConfigError, DamagedFileError, RunFolderError
from nanogpt_hf.own_files import notice_once, reading
from nanogpt_hf.runs.folder import RunFolder, run_of_model
from nanogpt_hf.runs.state import is_fixed

# The last line of a run's recipe: YAML's mark of the end of a document. A file that was cut has not
# got it.
_END = "...\n"
# Runs of earlier versions wrote no mark. Their recipes end with this knob.
_LAST_KNOB_WITHOUT_END = "hub.license"


def recipe_text(config: Config) -> str:
    """The recipe of a run as its folder has it: every knob, and the mark of its end."""
    return config_to_yaml(config) + _END


def read_recipe(run: RunFolder, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """Return the run's recipe, with other knobs, to look at the run: it may break rules that are
    newer. Raises RunFolderError, with the remedy, if the file is missing or damaged.
    """
    try:
        # A file that was cut is still a recipe, but lacks a section: all are written.
        with reading(run.recipe):
            config = load_config(run.recipe, is_recorded=True)
            text = read_settings(run.recipe)
            stated = parse_settings(text, RecipeLoader)
            if missing := [name for name in SECTIONS if name not in stated]:
                raise ValueError(f"it has no section {missing[0]}")
            _check_end(text, stated)
    except (ConfigError, DamagedFileError) as error:
        raise RunFolderError(
            error.fault,
            "the command that trained the run, with the same recipe and knobs and with --run-dir "
            f"{run.path} --resume, writes it again",
        ) from None
    return load_config(run.recipe, overrides, is_recorded=True) if overrides else config


def read_recipe_to_train(run: RunFolder, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """Return the run's recipe, with other knobs, to train with it. Raises ConfigError for the rules
    that it breaks, and what `read_recipe` raises.
    """
    read_recipe(run)
    return load_config(run.recipe, overrides)


def _check_end(text: str, stated: dict[str, Any]) -> None:
    """Raises ValueError if the last section of a run's recipe was cut."""
    # An editor may leave out the last newline.
    if text.rstrip("\n").endswith("\n" + _END.rstrip("\n")):
        return
    section, _, name = _LAST_KNOB_WITHOUT_END.partition(".")
    if name not in (stated[section] or {}):
        raise ValueError(f"it has no {_LAST_KNOB_WITHOUT_END}, and no end ({_END.strip()})")
    # A value that was cut may be a value, too.
    if not text.endswith(("\n", "null")):
        raise ValueError(f"it ends within a line, after {_LAST_KNOB_WITHOUT_END}")


def recipe_that_trained(model: str) -> Config | None:
    """Return the recipe of the run that a model folder is in, as its best/ or final/; None for any
    other model, and, with a warning, for a run whose recipe cannot be read.
    """
    # A Hub id may be named like a folder.
    if not os.path.isdir(model):
        return None
    # `.` in best/, and a link to it.
    for path in (os.path.abspath(model), os.path.realpath(model)):
        if run := run_of_model(Path(path)):
            try:
                return read_recipe(run)
            except RunFolderError as error:
                line = f"{error.fault}; the default rates do not follow from it"
                notice_once(line, logging.WARNING)
                return None
    return None


def known_recipe(run: RunFolder) -> Config | None:
    """Return the recipe of a run that is resumed; None, with a warning, if it is missing or
    damaged: its checkpoints have all that may not change.
    """
    try:
        return read_recipe(run)
    except RunFolderError as error:
        line = f"{error.fault}; it is written again from this recipe"
        notice_once(line, logging.WARNING)
        return None


def recipe_differences(before: Config, now: Config) -> list[str]:
    """Knobs with another value in `now` that one of them reads, as `key: before -> now`."""
    old = comparable(before)
    # What nothing reads changes no experiment. Runs of earlier versions may have stated it.
    read = read_knobs(before) | read_knobs(now)
    # The run's recipe has the number that was found, and a resumed run keeps it.
    auto = ("train.micro_batch_size", "auto")
    # It also has the steps that were found to fit into a time, or to make the epochs.
    kept: tuple[str, ...] = ()
    if now.train.steps_from:
        kept = (now.train.steps_from, "train.max_steps")
        # A share of them was recorded as a number.
        if 0 < now.optim.warmup_steps < 1:
            kept += ("optim.warmup_steps",)
    return [
        f"{key}: {old[key]} -> {new}"
        for key, new in comparable(now).items()
        if key in read and old[key] != new and (key, new) != auto and key not in kept
    ]


def changed_knobs(run: RunFolder, config: Config) -> list[str]:
    """Knobs of `config` that changed since the run began, for a run that is resumed.

    Raises RunFolderError if one of them makes it another experiment: another model, text, order or
    step.
    """
    before = known_recipe(run)
    lines = recipe_differences(before, config) if before else []
    read = read_knobs(config)
    other = [line for line in lines if is_fixed(line) and line.split(":")[0] in read]
    if other:
        raise RunFolderError(
            f"{run.path}: --resume continues the same experiment, but the recipe has "
            f"changed: {'; '.join(other)}"
        )
    if before:
        _check_muon_rate(run, before.optim, config)
    return lines


def _check_muon_rate(run: RunFolder, before: OptimSection, config: Config) -> None:
    """Raises RunFolderError if the run had a rate of Muon that the recipe does not state, and that
    is not the default of its scale: earlier versions had one number for both scales.
    """
    key = "optim.muon_learning_rate"
    now = config.optim
    follows = before.muon_scale == now.muon_scale == "match_rms_adamw"
    rate = before.peak_muon_rate
    other = rate not in (before.learning_rate, now.peak_muon_rate)
    if follows and key in config.unstated and other:
        raise RunFolderError(
            f"{run.path}: was trained with {key} {rate:g}, which the recipe does not state; its "
            f"default is optim.learning_rate, {now.learning_rate:g}; to continue as before, set "
            f"--{key} {rate:g}"
        )
