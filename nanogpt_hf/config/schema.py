"""The schema of a recipe: its sections, and the table of all knobs.

Each section is a dataclass in a file of its owner (*_section.py). A new knob is one line there;
`--help`, the conversion of values, the checks and the resolved recipe follow from it. The machine
(devices, processes, precision, sharding, compilation) is in accelerate's config instead.
"""

# ruff: noqa: RUF009  (the sections are frozen, so that configs may share their defaults)

import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import groupby
from types import NoneType
from typing import Any, Literal

from nanogpt_hf.config.data_section import DataSection
from nanogpt_hf.config.knobs import Reader
from nanogpt_hf.config.method_sections import (
    AlignSection,
    DistillSection,
    FinetuneSection,
    LoraSection,
    RlSection,
)
from nanogpt_hf.config.model_section import ModelSection
from nanogpt_hf.config.optim_section import OptimSection
from nanogpt_hf.config.run_sections import (
    CheckpointSection,
    EvalSection,
    HubSection,
    TrackingSection,
    TrainSection,
)
from nanogpt_hf.config.settings import Setting

# The upper bound of an integer knob that states none, far beyond any count of a run.
LARGEST = 10**15


@dataclass(frozen=True)
class Choice:
    """A knob's value that follows from `model.depth`, and the reason for it (config/dial.py)."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Config:
    """A resolved recipe.

    `name` is the recipe's name, the default name of its run folder and data folder.
    """

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    finetune: FinetuneSection = FinetuneSection()
    lora: LoraSection = LoraSection()
    rl: RlSection = RlSection()
    align: AlignSection = AlignSection()
    distill: DistillSection = DistillSection()
    hub: HubSection = HubSection()
    name: str = "run"
    # What follows from model.depth, for display. It is no part of the recipe.
    derived: tuple[Choice, ...] = ()
    # Knobs whose value follows from others, since nothing states them.
    unstated: frozenset[str] = field(default=frozenset(), compare=False)
    # In the recipe of a later stage (config/stages.py): the recipe with all stages, and the first
    # step of this one.
    full_recipe: "Config | None" = None
    first_step: int = 0

    @property
    def recipe(self) -> "Config":
        """The recipe with all its stages."""
        return self.full_recipe or self


@dataclass(frozen=True)
class Knob:
    """A knob of the schema as `--help` and the conversion of values read it."""

    key: str
    # The annotation: int, float, bool, str, list[str], a Literal, or a union of them.
    kind: Any
    default: Any
    meaning: str
    low: float | None
    high: float | None  # None is LARGEST for integers
    # Choices of other knobs, all of which a recipe needs so that something reads this one.
    readers: tuple[Reader, ...] = ()
    # The layouts that honour the term which this knob adds to the loss. None: it adds no term.
    layouts: tuple[Setting, ...] | None = None


SECTIONS = tuple(f.name for f in fields(Config) if is_dataclass(f.default))


def _knobs() -> dict[str, Knob]:
    """The table of all knobs, in the order of the sections and of their fields."""
    table = {}
    for section in SECTIONS:
        defaults = getattr(Config(), section)
        kinds = typing.get_type_hints(type(defaults))
        chosen_by: Reader | None = getattr(defaults, "READER", None)
        for f in fields(defaults):
            key = f"{section}.{f.name}"
            declared = Knob(key, kinds[f.name], getattr(defaults, f.name), **f.metadata)
            # The choice that chooses the section is no reader of itself, and a knob with a
            # narrower reader of the same choice, such as `align.loss simpo`, needs no second one.
            others = {key, *(reader.key for reader in declared.readers)}
            if chosen_by and chosen_by.key not in others:
                declared = replace(declared, readers=(chosen_by, *declared.readers))
            table[key] = declared
    return table


KNOBS: dict[str, Knob] = _knobs()


def get_value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def knob_values(config: Config) -> dict[str, Any]:
    """The values of all knobs by key."""
    return {key: get_value(config, key) for key in KNOBS}


def replace_knobs(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of `config` with other values of some knobs, such as {"train.seed": 7}."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    changed = {name: replace(getattr(config, name), **body) for name, body in sections.items()}
    return replace(config, **changed)


def kind_options(kind: Any) -> tuple[Any, ...]:
    """The types and literals of an annotation: `int | Literal["all"]` -> (int, "all")."""
    if typing.get_origin(kind) not in (Literal, types.UnionType, typing.Union):
        return (kind,)
    options = []
    for part in typing.get_args(kind):
        options += kind_options(part)
    return tuple(options)


_TYPE_NAMES = {NoneType: "null", list: "list", dict: "mapping"}


def knob_schema() -> dict[str, dict[str, Any]]:
    """Every knob: its types, values that are names, default, inclusive bounds and meaning."""
    schema = {}
    for key, declared in KNOBS.items():
        options = kind_options(declared.kind)
        kinds = [typing.get_origin(o) or o for o in options if not isinstance(o, str)]
        schema[key] = {
            "types": [_TYPE_NAMES.get(kind) or kind.__name__ for kind in kinds],
            "choices": [option for option in options if isinstance(option, str)],
            "default": declared.default,
            "low": declared.low,
            "high": declared.high,
            "meaning": declared.meaning,
        }
    return schema


def section_lines() -> list[str]:
    """The sections of a recipe in `--help`: the name and one line each."""
    return [f"  {name:<11} {section_summary(name)}" for name in SECTIONS]


def knob_lines(section: str | None = None) -> list[str]:
    """The knobs of a section, or of all sections: name, meaning, choices and default."""
    lines = []
    for name, knobs in groupby(knob_schema().items(), lambda item: item[0].partition(".")[0]):
        if section not in (None, name):
            continue
        lines += ["", f"{name}: {section_summary(name)}"]
        for key, described in knobs:
            names = described["choices"]
            choices = f" [{'|'.join(names)}]" if len(names) > 1 else ""
            value = described["default"]
            # An empty value sets nothing; the meaning says what holds then.
            default = "" if value in (None, "", [], {}) else f" (default {value})"
            lines.append(f"  --{key:<32} {described['meaning']}{choices}{default}")
    return lines[1:]


def section_summary(section: str) -> str:
    """The first line of the docstring of a section, without its full stop."""
    docstring = inspect.getdoc(type(getattr(Config(), section))) or ""
    return docstring.partition("\n")[0].rstrip(".")
