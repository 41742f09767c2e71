"""References of a recipe's loss, stored as JSON: a band over several seeds, or published losses;
the verdict on a run's validation loss.

References of our recipes ship in recipes/reference/; `compare RUN RUN RUN --make-reference FILE`
writes a new one.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.names import shipped_folder
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.sources import is_mixture
from nanogpt_hf.data.manifest import find_manifest
from nanogpt_hf.errors import UserError, one_line
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.identity import is_fixed
from nanogpt_hf.runs.metrics import Event, column, is_number, read_metrics

SHIPPED = shipped_folder("recipes/reference")
_WIDTH = 5  # standard deviations; of 5 seeds, 99 % of further ones are inside
# Losses of runs that differ in these can be compared; they are the first suspects.
_SHIFTING = ("optim.", "train.", "eval.", "data.order", "model.dropout", "model.init")
_IRRELEVANT = ("train.seed", "data.sha256", "model.pad_vocab_to_multiple_of", "optim.state")
# Prepared tokens, if there are any, decide about the text, not the other knobs of data.
_NOT_TEXT = ("data.format", "data.block_size", "data.packing", "data.order")
_CAUSES = (
    "the precision: compare with a run in full precision (mixed_precision: no)",
    "the code and the versions: `git diff`, and Machine in report.html",
    "the machine: `python cli.py doctor`",
)


@dataclass(frozen=True)
class Curve:
    """The mean of the validation loss by step, and the band around it."""

    step: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Point:
    """A published loss and its source."""

    loss: float
    what: str
    source: str
    step: int | None = None  # None if the model was not trained by a run like this
    tolerance: float = 0.0  # a loss at most this much higher still counts as reached


@dataclass(frozen=True)
class Reference:
    name: str  # the recipe's
    experiment: dict[str, Any]  # the knobs that affect the loss and differ from the defaults
    text: dict[str, Any] | None = None  # facts about the tokens; see `text_facts`
    seeds: list[int] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)  # date and versions
    band: str = ""
    curve: Curve | None = None
    points: list[Point] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """`sentence` starts with the verdict; `causes` are things to check, the likeliest first."""

    kind: Literal["normal", "above", "below", "early", "other", "none"]
    sentence: str
    causes: tuple[str, ...] = ()


def read_reference(path: Path) -> Reference:
    """Read a reference. Raises UserError if `path` is missing or no reference."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        curve = Curve(**tree["curve"]) if tree.get("curve") else None
        points = [Point(**point) for point in tree.get("points", [])]
        return Reference(**tree | {"curve": curve, "points": points})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: is no reference: {one_line(error)}") from None


def write_reference(reference: Reference, path: Path) -> None:
    tree = {key: value for key, value in dataclasses.asdict(reference).items() if value}
    with written_whole(path) as partial:
        partial.write_text(f"{json.dumps(tree, indent=2, ensure_ascii=False)}\n", encoding="utf-8")


def make_reference(runs: list[RunFolder], name: str) -> Reference:
    """Make a reference of finished runs that differ only in their seed.

    Raises UserError if they are fewer than three, not finished, or differ in another knob.
    """
    configs, curves = [load_config(run.recipe) for run in runs], []
    reference = Reference(name, experiment_of(configs[0]), text_facts(configs[0]))
    for run, config in zip(runs, configs, strict=True):
        if different := [key for knobs in differences(reference, config) for key in knobs]:
            raise UserError(f"{run.path}: differs in {', '.join(different)}; only the seed may")
        steps, losses = column(read_metrics(run), "val/loss")
        curves.append(dict(zip(steps.astype(int).tolist(), losses, strict=True)))
        if list(curves[-1]) != list(curves[0]) or config.train.max_steps not in curves[-1]:
            raise UserError(
                f"{run.path}: not finished, or not evaluated at the steps of {runs[0].path}: its "
                f"last evaluation is of step {max(curves[-1], default=0):,}, of "
                f"{config.train.max_steps:,}"
            )
    seeds = [config.train.seed for config in configs]
    if len(set(seeds)) < max(3, len(seeds)):
        raise UserError(f"a reference needs three runs with different seeds; these have {seeds}")
    packages = ("nanogpt_hf", "torch", "transformers", "accelerate")
    return dataclasses.replace(
        reference,
        seeds=seeds,
        made={"date": date.today().isoformat()} | {name: version(name) for name in packages},
        band=f"mean ± {_WIDTH} standard deviations over the seeds",
        curve=band_of(list(curves[0]), np.array([list(curve.values()) for curve in curves])),
    )


def band_of(steps: list[int], losses: np.ndarray) -> Curve:
    """The mean over seeds and the band around it, for `losses` of shape (seeds, steps)."""
    mean, reach = losses.mean(axis=0), _WIDTH * losses.std(axis=0, ddof=1)
    return Curve(steps, *(part.round(4).tolist() for part in (mean, mean - reach, mean + reach)))


def text_facts(config: Config) -> dict[str, Any] | None:
    """Facts that identify the prepared tokens of a recipe; None if they are not on this machine."""
    manifest = find_manifest(config.data)
    return manifest and {
        "revision": manifest.revision,
        "tokenizer_hash": manifest.tokenizer_hash,
        "vocab_size": manifest.vocab_size,
        "train_tokens": manifest.train.tokens,
        "validation_tokens": manifest.validation.tokens,
    }


def experiment_of(config: Config) -> dict[str, Any]:
    """The knobs that affect the loss and differ from the defaults.

    The path of a local text is omitted: it is private.
    """
    experiment = {
        key: value
        for key, knob in KNOBS.items()
        if (is_fixed(key) or key.startswith("optim.") or key in ("train.max_steps", "eval.tokens"))
        and key not in _IRRELEVANT
        and (value := get_value(config, key)) != knob.default
    }
    if not is_mixture(config.data):
        source = Path(config.data.one_source).expanduser()
        if source.is_absolute() or source.exists():
            experiment["data.source"] = None
    return experiment


def differences(reference: Reference, config: Config) -> tuple[dict[str, str], dict[str, str]]:
    """Messages by knob (or `text`): differences that forbid a comparison, and those that shift."""
    ours, messages = experiment_of(config), {}
    text = reference.text and text_facts(config)
    for key, knob in KNOBS.items():
        here, there = (tree.get(key, knob.default) for tree in (ours, reference.experiment))
        is_text = text and key.startswith("data.") and not key.startswith(_NOT_TEXT)
        if here != there and not is_text and not (key == "data.source" and None in (here, there)):
            messages[key] = f"{key} is {here} here, {there} in the reference"
    if text and reference.text:
        differing = [
            f"{name} {text[name]} here, {value} in the reference"
            for name, value in reference.text.items()
            if name != "revision" and text[name] != value
        ]
        if differing:
            messages["text"] = f"the text is another: {'; '.join(differing)}"
    shifting = {key: line for key, line in messages.items() if key.startswith(_SHIFTING)}
    return {key: messages[key] for key in messages if key not in shifting}, shifting


def find_reference(config: Config, folder: Path = SHIPPED) -> Reference | None:
    """The reference in `folder` for this experiment, or the nearest with at most two incomparable
    knobs, or None.
    """
    ranked = []
    for path in sorted(folder.glob("*.json")):
        reference = read_reference(path)
        incomparable, shifting = map(len, differences(reference, config))
        if incomparable <= 2:
            ranked.append((incomparable, shifting, reference.name, reference))
    return min(ranked, key=lambda row: row[:3])[3] if ranked else None


def judge(reference: Reference | None, config: Config, events: list[Event]) -> Verdict:
    """Judge the validation losses in a run's `events` against the reference, if there is one."""
    if reference is None:
        remedy = "`compare RUN RUN RUN --make-reference FILE` makes one of three or more seeds"
        return Verdict("none", f"no reference: none ships for this recipe; {remedy}")
    incomparable, shifting = differences(reference, config)
    if incomparable:
        reasons = "; ".join(incomparable.values())
        return Verdict("other", f"not comparable with reference {reference.name}: {reasons}")
    kind, sentence = (_judge_curve if reference.curve else _judge_points)(reference, events)
    if kind == "above":
        causes = list(shifting.values())
        if skipped := sum(event.get("train/skipped_steps") or 0 for event in events):
            causes.append(f"{skipped:,} steps had no finite gradient: lower optim.learning_rate")
        return Verdict(kind, sentence, (*causes, *_CAUSES)[:3])
    if shifting and kind in ("normal", "below"):
        sentence += f"; this run has another {', '.join(shifting)} than the reference"
    return Verdict(kind, sentence)


def _judge_curve(reference: Reference, events: list[Event]) -> tuple[Any, str]:
    """Judge against the band over seeds, at the steps of evaluations that both have."""
    curve = reference.curve
    assert curve
    for event in events:
        if "val/loss" in event and not is_number(event["val/loss"]):
            return "above", f"diverged: the loss was not finite at step {event['step']:,}"
    ours = dict(zip(*column(events, "val/loss"), strict=True))
    band = zip(curve.step, curve.low, curve.high, strict=True)
    rows = [(step, ours[step], low, high) for step, low, high in band if step in ours]
    if not any(step for step, *_ in rows):
        first = next((step for step in curve.step if step), 0)
        return "early", (
            f"too early to judge: the reference was evaluated first at step {first:,} "
            f"(`--eval.every {first}`)"
        )
    kinds = [
        "above" if loss > high else "below" if loss < low else "normal"
        for _, loss, low, high in rows
    ]
    step, loss, low, high = rows[-1]
    last, between = f"validation loss {loss:.3f} at step {step:,}", f"{low:.3f} to {high:.3f}"
    runs = f"{len(reference.seeds)} reference runs of {reference.name}"
    others = [i for i, kind in enumerate(kinds) if kind != kinds[-1]]
    if kinds[-1] == "normal":
        outside = ", ".join(f"{rows[i][0]:,}" for i in others)
        end = f"; it was outside at step {outside}" if outside else ""
        return "normal", f"normal: {last} is inside the band {between} of {runs}{end}"
    since = rows[others[-1] + 1 if others else 0][0]
    end = "; is validation text in training?" if kinds[-1] == "below" else ""
    sentence = f"{kinds[-1]} the band of {runs} from step {since:,} on: {last} against {between}"
    return kinds[-1], sentence + end


def _judge_points(reference: Reference, events: list[Event]) -> tuple[Any, str]:
    """Judge the best loss against published losses, usually only those of finished runs."""
    steps, losses = column(events, "val/loss")
    published = "; published: " + "; ".join(
        f"{point.loss:g}{f' at step {point.step:,}' if point.step else ''} ({point.what})"
        for point in reference.points
    )
    if len(steps) == 0:
        return "early", f"too early to judge: no evaluation yet{published}"
    best = losses.argmin()
    at = f"validation loss {losses[best]:.3f} at step {int(steps[best]):,} of {int(steps[-1]):,}"
    for point in reference.points:
        if losses[best] <= point.loss:
            at += f", below {point.loss:g} since step {int(steps[losses <= point.loss][0]):,}"
    goals = {p.step: p.loss + p.tolerance for p in reference.points if p.step}
    reached = [step for step in goals if steps[-1] >= step]
    if not reached:
        return "early", f"too early to judge: best {at}{published}"
    if losses[best] > goals[max(reached)]:
        return "above", f"above the published loss: best {at}{published}"
    return "normal", f"normal: best {at}{published}"
