"""Knobs that nothing reads: a recipe that states one is refused, unless it has the default.

Each knob declares its readers (config/knobs.py): choices of other knobs, such as a method, an
optimizer or a schedule, without which its value has no effect.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from nanogpt_hf.config.knobs import Reader, read_by_all
from nanogpt_hf.config.schema import KNOBS, Config, get_value, knob_values
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.config.stages import stages_of


class Unread(NamedTuple):
    """A knob whose value nothing reads, and the choice that it lacks."""

    key: str
    reader: Reader
    message: str
    # Whether it is stated for one stage or one source of the recipe; then `key` is the list.
    is_entry: bool = False


def read_knobs(config: Config) -> set[str]:
    """Return the knobs that have an effect in one of the stages of a recipe, for one of its
    sources.
    """
    readers = {key: knob.readers for key, knob in KNOBS.items()}
    read: set[str] = set()
    for stage in stages_of(config):
        for source in sources_of(stage.config.data):
            values = knob_values(replace(stage.config, data=source.data))
            read |= read_by_all(readers, values)
    return read


def unread_knobs(config: Config, stated: Mapping[str, Any]) -> Iterator[Unread]:
    """The stated knobs that nothing reads and that differ from their default.

    Stages and sources are checked entry by entry.
    """
    stages = stages_of(config)
    for key, value in stated.items():
        # The value holds until a stage states the knob again.
        holds = [stages[0].config]
        for stage, entry in zip(stages[1:], config.train.stages or (), strict=True):
            if key in entry:
                break
            holds.append(stage.config)
        if reader := _lacks(key, value, holds):
            yield Unread(key, reader, _message(reader, value))
    yield from _unread_in_stages(config)
    yield from _unread_in_sources(config)


def _unread_in_stages(config: Config) -> Iterator[Unread]:
    """What `train.stages` states and nothing reads from its step on."""
    stages = stages_of(config)[1:]
    entries = config.train.stages or []
    for number, entry in enumerate(entries):
        for key in entry.keys() & KNOBS.keys():
            holds = [stages[number].config]
            for stage, later in zip(stages[number + 1 :], entries[number + 1 :], strict=True):
                if key in later:
                    break
                holds.append(stage.config)
            if reader := _lacks(key, entry[key], holds):
                message = f"at {entry['at']}: {key}: {_message(reader, entry[key])}"
                yield Unread("train.stages", reader, message, is_entry=True)


def _unread_in_sources(config: Config) -> Iterator[Unread]:
    """What an entry of `data.source` states and nothing reads for that source."""
    if not is_mixture(config.data):
        return
    entries: Any = config.data.source
    for number, (entry, source) in enumerate(zip(entries, sources_of(config.data), strict=True), 1):
        alone = replace(config, data=source.data)
        for name, value in entry.items():
            key = f"data.{name}"
            if name in ("source", "dir") or key not in KNOBS:
                # These keys make the entry a source.
                continue
            if reader := _lacks(key, value, [alone]):
                message = f"entry {number}: {name}: {_message(reader, value)}"
                yield Unread("data.source", reader, message, is_entry=True)


def _lacks(key: str, value: Any, configs: Iterable[Config]) -> Reader | None:
    """The choice that a stated value lacks; None if it is read, or asks for nothing."""
    if value == KNOBS[key].default:
        return None
    reader = _missing(key, configs)
    return None if reader is None or value in reader.idle else reader


def _missing(key: str, configs: Iterable[Config]) -> Reader | None:
    """The first reader of a knob that none of the configs chooses; None if one reads the knob."""
    missing = None
    readers = KNOBS[key].readers
    for config in configs if readers else ():
        for source in sources_of(config.data):
            alone = replace(config, data=source.data)
            lacking = [r for r in readers if not r.accepts(get_value(alone, r.key))]
            if not lacking:
                return None
            missing = missing or lacking[0]
    return missing


def _message(reader: Reader, value: Any) -> str:
    how = f"{reader.remedy}, or leave it out" if reader.remedy else "leave it out"
    return f"{value!s:.60} is read only {reader.words}; {how}"
