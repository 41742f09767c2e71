"""References of a recipe's loss, as JSON in recipes/reference/: a band over several seeds, or a
published loss. The verdict compares the validation loss of a run with a reference.
"""

import json
import os
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from nanogpt_hf.config.names import shipped_folder
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.sources import is_mixture
from nanogpt_hf.config.unread import read_knobs
from nanogpt_hf.data.manifest import find_manifest
from nanogpt_hf.errors import DataError, UserError
from nanogpt_hf.own_files import warn_once
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import Event, column, is_number, read_metrics
from nanogpt_hf.runs.provenance import versions
from nanogpt_hf.runs.recipe import read_recipe
from nanogpt_hf.runs.state import is_fixed

SHIPPED = shipped_folder("recipes/reference")
# Half the width of a band in standard deviations, which are estimated from a few seeds only: with
# 5 seeds, 99% of further runs are inside.
_WIDTH = 5
# With at most this number of differences that forbid a comparison, a reference is near enough to be
# named. Another text differs in the numbers of its training and its validation tokens.
_NEAR = 2
# Losses of runs that differ in these knobs can be compared. The knobs are the first suspects.
_SHIFTING = ("optim.", "train.", "eval.", "data.order", "model.dropout", "model.init")
# These may differ in any way: the loss is the same but for noise.
_IRRELEVANT = ("train.seed", "data.sha256", "model.pad_vocab_to_multiple_of", "optim.state")
# If the tokens of both runs are known, they are compared instead of the knobs of data that made
# them: the same text may have another path. These knobs are compared anyway.
_NOT_TEXT = ("data.format", "data.block_size", "data.packing", "data.order")
_CAUSES = (
    "the precision: compare with a run in full precision (mixed_precision: no)",
    "the code and the versions: `git diff`, and Machine in report.html",
    "the machine: `doctor`",
)
# The mean of the validation loss by step, and the band around it: step, mean, low, high.
Curve = dict[str, list[Any]]


@dataclass(frozen=True)
class Reference:
    name: str  # the recipe's
    experiment: dict[str, Any]  # the knobs that affect the loss and differ from the defaults
    curve: Curve
    text: dict[str, Any] | None = None  # facts about the tokens; see `text_facts`
    seeds: list[int] = field(default_factory=list)
    published: str = ""  # the loss and its source, instead of seeds
    made: dict[str, str] = field(default_factory=dict)  # date, versions, how the band was computed

    @property
    def runs(self) -> str:
        return self.published or f"{len(self.seeds)} reference runs of {self.name}"


@dataclass(frozen=True)
class Verdict:
    kind: str  # normal, above, below, early; none without a reference
    sentence: str  # starts with the verdict
    causes: tuple[str, ...] = ()  # things to check, the likeliest first


def make_reference(runs: list[RunFolder], name: str) -> Reference:
    """Make a reference of three or more finished runs that differ only in their seed."""
    configs = [read_recipe(run) for run in runs]
    losses = []
    steps = column(read_metrics(runs[0]), "val/loss")[0]
    reference = Reference(
        name,
        experiment_of(configs[0]),
        {},
        text_facts(configs[0]),
        seeds=[config.train.seed for config in configs],
        made={
            "date": date.today().isoformat(),
            "band": f"mean ± {_WIDTH} standard deviations over the seeds",
            **versions(),
        },
    )
    for run, config in zip(runs, configs, strict=True):
        # Raises DataError if the text is not known: a reference is made of text that is.
        text = text_facts(config)
        incomparable, shifting = differences(reference, config, text)
        different = [*incomparable, *shifting]
        if different:
            raise UserError(f"{run.path}: differs in {', '.join(different)}; only the seed may")
        evaluated, values = column(read_metrics(run), "val/loss")
        if list(evaluated) != list(steps) or config.train.max_steps not in steps:
            raise UserError(f"{run.path}: not finished, or not evaluated as {runs[0].path} is")
        losses.append(values)
    if len(set(reference.seeds)) < max(3, len(runs)):
        seeds = ", ".join(map(str, reference.seeds))
        raise UserError(f"a reference needs three runs with different seeds; these have {seeds}")
    # (runs, evaluations) -> (evaluations,)
    mean = np.mean(losses, axis=0)
    reach = _WIDTH * np.std(losses, axis=0, ddof=1)
    band = {"step": steps.astype(int), "mean": mean, "low": mean - reach, "high": mean + reach}
    curve = {name: values.round(4).tolist() for name, values in band.items()}
    return replace(reference, curve=curve)


def text_facts(config: Config) -> dict[str, Any] | None:
    """Facts that identify the prepared tokens of a recipe; None if they are not on this machine."""
    manifest = find_manifest(config.data)
    return manifest and {
        "tokenizer_hash": manifest.tokenizer_hash,
        "vocab_size": manifest.vocab_size,
        "train_tokens": manifest.train.tokens,
        "validation_tokens": manifest.validation.tokens,
    }


def experiment_of(config: Config) -> dict[str, Any]:
    """The knobs that affect the loss and differ from the defaults, but no path: it is private."""
    experiment = {}
    read = read_knobs(config)
    for key, knob in KNOBS.items():
        # A resume may change these three, but they change the loss.
        affects = is_fixed(key) or key.startswith("optim.")
        affects = affects or key in ("train.max_steps", "eval.tokens")
        value = get_value(config, key)
        if affects and key in read and key not in _IRRELEVANT and value != knob.default:
            experiment[key] = value
    # A path says nothing on another machine, and may tell a user's name.
    if not is_mixture(config.data):
        source = Path(os.path.expanduser(config.data.one_source))
        if source.is_absolute() or source.exists():
            experiment["data.source"] = None
    return experiment


def _text_if_readable(config: Config) -> dict[str, Any] | None:
    """`text_facts`, or None with a warning if the prepared data is damaged: a run's losses are
    known without it.
    """
    try:
        return text_facts(config)
    except DataError as error:
        warn_once(f"{error}; the reference is compared without facts of the text")
        return None


def differences(
    reference: Reference, config: Config, text: dict[str, Any] | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Compare an experiment with the reference's. Return messages by knob, or by fact of the
    `text`: differences that forbid a comparison, and differences that only shift the loss.
    """
    ours = experiment_of(config)
    theirs = dict(reference.experiment)
    if text and reference.text:
        ours = _with_text(ours, text)
        theirs = _with_text(theirs, reference.text)
    incomparable = {}
    shifting = {}
    for key in dict.fromkeys((*KNOBS, *ours)):
        default = KNOBS[key].default if key in KNOBS else None
        here = ours.get(key, default)
        there = theirs.get(key, default)
        # A source of None is a private path, which may name any text.
        if here != there and not (key == "data.source" and None in (here, there)):
            found = shifting if key.startswith(_SHIFTING) else incomparable
            found[key] = f"{key} is {here} here, {there} in the reference"
    return incomparable, shifting


def _with_text(experiment: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Put facts of the text in the place of the knobs that made it."""
    kept = {
        key: value
        for key, value in experiment.items()
        if not key.startswith("data.") or key in _NOT_TEXT
    }
    return kept | {f"text.{name}": value for name, value in facts.items()}


def find_reference(config: Config) -> Reference | None:
    """Find the reference for this experiment: among several, the one with the fewest differences.
    None without any.
    """
    found = [(len(shifting), ref) for ref, (never, shifting) in _shipped(config) if not never]
    return min(found, key=lambda row: row[0], default=(0, None))[1]


def _shipped(config: Config) -> list[tuple[Reference, tuple[dict[str, str], dict[str, str]]]]:
    """The references that ship, each with its `differences` from a run."""
    text = _text_if_readable(config)
    files = sorted(SHIPPED.glob("*.json"))
    references = [Reference(**json.loads(path.read_text(encoding="utf-8"))) for path in files]
    return [(reference, differences(reference, config, text)) for reference in references]


def _why_none(config: Config) -> str:
    """Why no reference can be compared: what differs in the nearest, or that none is near."""
    nearest, (different, _) = min(_shipped(config), key=lambda row: len(row[1][0]))
    if len(different) > _NEAR:
        return "none ships for this experiment"
    return f"the nearest, {nearest.name}, cannot be compared: {', '.join(different.values())}"


def judge(reference: Reference | None, config: Config, events: list[Event]) -> Verdict:
    """Judge the validation losses in a run's `events` against the reference, if there is one."""
    if reference is None:
        remedy = "`compare RUN RUN RUN --make-reference FILE` makes one of three or more seeds"
        return Verdict("none", f"no reference: {_why_none(config)}; {remedy}")
    shifting = differences(reference, config, _text_if_readable(config))[1]
    kind, sentence = _place(reference, events)
    # Other knobs are likelier causes of a high loss than the machine.
    if kind == "above":
        return Verdict(kind, sentence, (*shifting.values(), *_CAUSES)[:3])
    if shifting and kind != "early":
        sentence += f"; this run has another {', '.join(shifting)} than the reference"
    return Verdict(kind, sentence)


def _place(reference: Reference, events: list[Event]) -> tuple[Any, str]:
    """Place a loss in the band: above, below, normal or early; a sentence says since when. For a
    published loss the lowest loss so far counts.
    """
    for event in events:
        if "val/loss" in event and not is_number(event["val/loss"]):
            return "above", f"diverged: the loss was not finite at step {event['step']:,}"
    curve = reference.curve
    steps, losses = column(events, "val/loss")
    if not reference.seeds:
        losses = np.minimum.accumulate(losses)
    ours = dict(zip(steps, losses, strict=True))
    kind = "early"
    since = 0
    last = ""
    for step, low, high in zip(curve["step"], curve["low"], curve["high"], strict=True):
        loss = ours.get(step)
        # At step 0 a model knows nothing yet, and all losses are alike.
        if step and loss is not None:
            now = "normal"
            if loss > high:
                now = "above"
            elif loss < low:
                now = "below"
            if now != kind:
                since = step
            kind = now
            last = f"validation loss {loss:.3f} at step {step:,} against {low:.3f} to {high:.3f}"
    if kind == "early":
        first = next(step for step in curve["step"] if step)
        return kind, f"too early to judge: of {reference.runs} step {first:,} can be compared first"
    band = f"the band of {reference.runs} from step {since:,} on: {last}"
    if kind == "below":
        band += "; is validation text in training?"
    if kind == "normal":
        return kind, f"normal: inside {band}"
    return kind, f"{kind} {band}"
