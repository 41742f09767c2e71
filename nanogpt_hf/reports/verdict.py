"""Is my loss normal? A run against a reference, answered in a sentence, with what to check where it is not."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nanogpt_hf.config.schema import Config
from nanogpt_hf.reports.reference import Reference, differences, text_facts
from nanogpt_hf.runs.metrics import Event, column, is_number

_NONE = (
    "no reference: none ships for a recipe like this one; `compare RUN RUN RUN --make-reference FILE` makes one of "
    "three or more seeds"
)
# What a difference from the reference would look like.
_SIGNS = {
    "optim.learning_rate": "too high shows in a grad norm that grows, too low in a slow fall from the start",
    "train.tokens_per_step": "fewer tokens a step learn less a step",
    "train.max_steps": "the learning rate decays over other steps, so only the ends compare",
    "eval.tokens": "the loss is measured on other tokens",
}
_BEYOND_THE_RECIPE = [
    "the precision: mixed_precision in the accelerate config; a run in full precision (no) tells",
    "the code and the versions: `git diff`, and the machine's part of report.html",
    "the machine: `python cli.py doctor RECIPE`",
]


@dataclass(frozen=True)
class Verdict:
    """`sentence` begins with its kind in words; `causes` are what to check, the likeliest first, at most three."""

    kind: Literal["normal", "above", "below", "early", "other", "none"]
    sentence: str
    causes: tuple[str, ...] = ()


def judge(reference: Reference | None, config: Config, events: list[Event]) -> Verdict:
    """The validation losses of a run (`events` of its metrics.jsonl) against a reference of its recipe, if any."""
    if reference is None:
        return Verdict("none", _NONE)
    defining, moving = differences(reference, config)
    if defining:
        return Verdict("other", f"not comparable with reference {reference.name}: {'; '.join(defining.values())}")
    verdict = judge_curve(reference, events) if reference.curves else judge_points(reference, events)
    if verdict.kind == "above":
        unseen = reference.text is not None and text_facts(config) is None
        return Verdict(verdict.kind, verdict.sentence, _causes(moving, events, unseen))
    if moving and verdict.kind in ("normal", "below"):
        return Verdict(verdict.kind, f"{verdict.sentence}; this run's {', '.join(moving)} is not the reference's")
    return verdict


def judge_curve(reference: Reference, events: list[Event]) -> Verdict:
    """Against the band over seeds, at the steps that both were evaluated at."""
    curve, runs = reference.curves["val/loss"], f"{len(reference.seeds)} reference runs of {reference.name}"
    if broken := [event["step"] for event in events if "val/loss" in event and not is_number(event["val/loss"])]:
        return Verdict("above", f"broken: the validation loss was not finite at step {broken[0]:,}")
    steps, losses = column(events, "val/loss")
    common, ours, theirs = np.intersect1d(steps, curve.step, return_indices=True)
    if len(common) == 0 or common[-1] == 0:
        first = next((step for step in curve.step if step > 0), 0)
        every = "" if first in steps or len(steps) < 3 else f"; `--eval.every {first}` evaluates at the same steps"
        return Verdict("early", f"too early to say: the reference's first evaluation is at step {first:,}{every}")
    losses, low, high = losses[ours], np.array(curve.low)[theirs], np.array(curve.high)[theirs]
    side = np.where(losses > high, 1, np.where(losses < low, -1, 0))
    last = f"{losses[-1]:.3f} at step {int(common[-1]):,}"
    if side[-1] == 0:
        outside = [f"{int(step):,}" for step in common[side != 0]]
        before = f"; it was outside at step{'s' * (len(outside) > 1)} {', '.join(outside)}" if outside else ""
        band = f"{low[-1]:.3f} to {high[-1]:.3f} of {runs}"
        return Verdict("normal", f"normal: validation loss {last} is inside the band {band}{before}")
    others = np.flatnonzero(side != side[-1])
    since = int(common[others[-1] + 1 if len(others) else 0])
    kind = "above" if side[-1] > 0 else "below"
    sentence = f"{kind} the band of {runs} from step {since:,} on: validation loss {last} against "
    sentence += f"{low[-1]:.3f} to {high[-1]:.3f}"
    if kind == "below":
        sentence += "; unless you changed something to that end, see that no validation text is in training"
    return Verdict(kind, sentence)


def judge_points(reference: Reference, events: list[Event]) -> Verdict:
    """The best validation loss against published ones, of which there is seldom more than that of a run's end."""
    steps, losses = column(events, "val/loss")
    published = "; ".join(
        f"{point.loss:g}" + (f" at step {point.step:,}" if point.step else "") + f" ({point.what})"
        for point in reference.points
    )
    if len(steps) == 0:
        return Verdict("early", f"too early to say: no evaluation yet; published: {published}")
    best = losses.argmin()
    at = f"best validation loss {losses[best]:.3f} at step {int(steps[best]):,} of {int(steps[-1]):,}"
    passed = [
        f"below {point.loss:g} since step {int(steps[losses <= point.loss][0]):,}"
        for point in reference.points
        if (losses <= point.loss).any()
    ]
    reached = [point for point in reference.points if point.step is not None and steps[-1] >= point.step]
    if not reached:
        return Verdict("early", f"too early to say: {', '.join([at, *passed])}; published: {published}")
    goal = max(reached, key=lambda point: point.step or 0)
    if losses[best] > goal.loss + goal.tolerance:
        return Verdict("above", f"above what was published: {at}; published: {published}")
    return Verdict("normal", f"normal: {', '.join([at, *passed])}; published: {published}")


def _causes(moving: dict[str, str], events: list[Event], text_unseen: bool) -> tuple[str, ...]:
    """Learning rate, text and tokens per step are the usual three. Which of them it can be is known, mostly."""
    found = [f"{line}: {_SIGNS[key]}" if key in _SIGNS else line for key, line in moving.items()]
    if text_unseen:
        found.append("the text: its prepared tokens (data.dir) are not here to be compared with the reference's")
    if skipped := sum(event.get("train/skipped_steps") or 0 for event in events):
        found.append(f"{skipped:,} steps had no finite gradient and were skipped: lower optim.learning_rate")
    if not found:
        same = "learning rate, text and tokens per step are the reference's, so look beyond the recipe:"
        return (f"{same} {_BEYOND_THE_RECIPE[0]}", *_BEYOND_THE_RECIPE[1:])
    return tuple((found + _BEYOND_THE_RECIPE)[:3])
