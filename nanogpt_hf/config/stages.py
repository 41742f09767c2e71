"""Stages of a recipe (train.stages): knobs that change at a step, and the recipe that holds at one.

At the step of a stage the run saves a checkpoint and starts again from it, as a resumed run does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from nanogpt_hf.config.schedules import SCHEDULES
from nanogpt_hf.config.schema import KNOBS, Config, Knob, get_value, knob_values, replace_knobs
from nanogpt_hf.config.sources import is_mixture, sources_of
from nanogpt_hf.config.values import convert_entries
from nanogpt_hf.errors import UserError, did_you_mean

# The key for the weights of the sources of a mixture, by name. A source that is left out keeps its
# weight.
_WEIGHTS = "weights"
# These decide what the optimizer state of a checkpoint holds, so they may not change at a step.
_KINDS = ("optim.name", "optim.state")
# What may change at a step. The text, the model and the seed may not: then the run would be
# another experiment.
CHANGING = ("data.block_size", "train.tokens_per_step", "train.micro_batch_size")
CHANGING += tuple(key for key in KNOBS if key.startswith("optim.") and key not in _KINDS)
_KEYS = {
    "at": Knob("at", int, None, "steps before the stage", 1, None),
    _WEIGHTS: Knob(_WEIGHTS, dict[str, Any], None, "", None, None),
} | {key: KNOBS[key] for key in CHANGING}
_EXAMPLE = "{at: 1000, optim.learning_rate: 1e-4}"


class Stage(NamedTuple):
    """The steps between two changes of the recipe."""

    name: str
    # The steps that are taken before the stage, and until its end.
    first: int
    last: int
    # The recipe during the stage.
    config: Config
    # What differs from the stage before, in words.
    changes: str

    @property
    def tokens(self) -> int:
        return (self.last - self.first) * self.config.train.tokens_per_step


def read_stages(entries: list[Any]) -> list[dict[str, Any]]:
    """The entries of `train.stages`, converted. Raises ValueError for a wrong one."""
    stages = convert_entries(entries, _KEYS, ("at",), _EXAMPLE)
    last = 0
    for number, stage in enumerate(stages, 1):
        at = stage["at"]
        if at <= last:
            raise ValueError(f"entry {number}: at {at} is not after at {last} of the one before")
        if not any(stage[key] != {} for key in stage.keys() - {"at"}):
            raise ValueError(f"entry {number}: at {at}: changes no knob, as in {_EXAMPLE}")
        last = at
    return stages


def stages_of(config: Config) -> list[Stage]:
    """The stages of a run, from step 0 to its end: one if the recipe has none."""
    recipe = config.recipe
    entries = recipe.train.stages or []
    last = recipe.train.max_steps
    # Each entry ends the stage before it and begins one that differs by what the entry states, so
    # changes add up from stage to stage.
    now = recipe
    stages = [Stage("stage 1", 0, last, recipe, "")]
    for number, entry in enumerate(entries, 2):
        values = {key: value for key, value in entry.items() if key in CHANGING}
        if weights := entry.get(_WEIGHTS):
            sources: Any = now.data.source
            values["data.source"] = [
                source | {"weight": weights.get(source["name"], source["weight"])}
                for source in sources
            ]
        changes = [f"{key} {get_value(now, key)} -> {values[key]}" for key in entry if key in KNOBS]
        changes += [f"weight of {name} {weight}" for name, weight in (weights or {}).items()]
        now = replace(replace_knobs(now, values), full_recipe=recipe, first_step=entry["at"])
        stages[-1] = stages[-1]._replace(last=entry["at"])
        stages.append(Stage(f"stage {number}", entry["at"], last, now, ", ".join(changes)))
    return stages


def with_schedule(config: Config) -> Config:
    """The recipe with the warm-up, the lowest learning rate and Muon's rate of every stage as
    numbers: a share becomes a number of steps, and null what follows from the peak.

    The recipe must have no `stage_problem`.
    """
    first, *later = stages_of(config)
    before = _schedule(first.config)
    resolved: dict[str, Any] = dict(before)
    entries = []
    for stage, entry in zip(later, config.train.stages or (), strict=True):
        now = _schedule(stage.config)
        # A stage of another peak has another tenth of it.
        changed = {key: now[key] for key in now if key in entry or now[key] != before.get(key)}
        entries.append(entry | changed)
        before = now
    if entries:
        resolved["train.stages"] = entries
    return replace_knobs(config, resolved)


def with_known_steps(config: Config, steps: int) -> Config:
    """The recipe of a train.budget or of train.epochs with its number of steps."""
    known = {"train.max_steps": steps, "train.budget": None, "train.epochs": None}
    return with_schedule(replace_knobs(config, known))


def _schedule(config: Config) -> dict[str, Any]:
    """The knobs of the schedule that follow from others. One without an end has no lowest rate."""
    optim = config.optim
    values: dict[str, Any] = {}
    if optim.name == "muon":
        values["optim.muon_learning_rate"] = optim.peak_muon_rate
    # Else the number of steps is found when the run starts.
    if config.train.steps_from is None:
        values["optim.warmup_steps"] = optim.warmup_in(config.train.max_steps)
    if SCHEDULES[optim.schedule].ends:
        values["optim.min_learning_rate"] = optim.lowest_learning_rate
    return values


def config_at(config: Config, step: int) -> Config:
    """The recipe that holds when `step` steps are done: knobs of the last stage that has begun."""
    return next(s.config for s in reversed(stages_of(config)) if s.first <= step)


def next_stage(config: Config, step: int) -> int | None:
    """The step at which the next stage begins, or None."""
    return next((stage.first for stage in stages_of(config) if stage.first > step), None)


def planned_tokens(config: Config) -> int:
    """The tokens of all steps of a run."""
    return sum(stage.tokens for stage in stages_of(config))


def tokens_by_source(config: Config) -> dict[str, float]:
    """The tokens of each source in all steps of a run."""
    totals = {source.name: 0.0 for source in sources_of(config.recipe.data)}
    for stage in stages_of(config):
        sources = sources_of(stage.config.data)
        period = sum(source.weight for source in sources)
        for source in sources:
            totals[source.name] += stage.tokens * source.weight / period
    return totals


def largest_stage(config: Config) -> Config:
    """The recipe of the stage whose micro-batches have the most tokens."""
    configs = (stage.config for stage in stages_of(config))
    return max(configs, key=lambda c: c.train.min_micro_batch_size * c.data.block_size)


def stage_lines(config: Config) -> list[str]:
    """A line for each stage of a recipe that has several."""
    stages = stages_of(config)
    return [
        f"{stage.name}: steps {stage.first + 1:,} to {stage.last:,}, {stage.tokens:,} tokens"
        + (f": {stage.changes}" if stage.changes else "")
        for stage in stages
        if len(stages) > 1
    ]


def comparable(config: Config) -> dict[str, Any]:
    """The values of all knobs, in a form that is equal for equal runs.

    A mixture is without the folders of its texts, which may move. Its weights, and the weights
    of stages, are integers without a common divisor.
    """
    values = knob_values(config)
    if is_mixture(config.data):
        sources = []
        for entry, weight in zip(values["data.source"], _weights(config).values(), strict=True):
            fields = {name: value for name, value in entry.items() if name != "dir"}
            sources.append(fields | {"weight": weight})
        values["data.source"] = sources
    if entries := values["train.stages"]:
        changes = []
        for entry, stage in zip(entries, stages_of(config)[1:], strict=True):
            if _WEIGHTS in entry:
                changes.append(entry | {_WEIGHTS: _weights(stage.config)})
            else:
                changes.append(entry)
        values["train.stages"] = changes
    return values


def _weights(config: Config) -> dict[str, int]:
    return {source.name: source.weight for source in sources_of(config.data)}


def stage_problem(config: Config) -> str:
    """What makes it impossible to list the stages of a recipe, or ''."""
    steps = config.train.max_steps
    sources = config.data.source
    names = [source["name"] for source in sources] if isinstance(sources, list) else []
    for entry in config.train.stages or ():
        if entry["at"] >= steps:
            return f"at {entry['at']}: is not before train.max_steps {steps}"
        for name in entry.get(_WEIGHTS, {}):
            if name not in names:
                near = did_you_mean(name, names)
                return f"at {entry['at']}: {_WEIGHTS}: no source is named {name!r:.80}{near}"
    for stage in stages_of(config)[1:]:
        try:
            sources_of(stage.config.data)
        except ValueError as error:
            return f"at {stage.first}: {_WEIGHTS}: {error}"
    return ""


@contextmanager
def naming(stage: Stage) -> Iterator[None]:
    """Context whose UserErrors name the stage, unless it is the first."""
    try:
        yield
    except UserError as error:
        if not stage.first:
            raise
        raise UserError(f"train.stages: at {stage.first}: {error}") from None
