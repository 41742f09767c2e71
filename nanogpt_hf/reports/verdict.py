"""Judge a run's validation loss against a reference: a sentence, and likely causes if the loss is too high."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nanogpt_hf.config.schema import Config
from nanogpt_hf.reports.reference import Reference, differences, text_facts
from nanogpt_hf.runs.metrics import Event, column, is_number

_NONE = (
    "no reference: none ships for this recipe; `compare RUN RUN RUN --make-reference FILE` makes one of three or more "
    "seeds"
)
# How a difference from the reference shows.
_SYMPTOMS = {
    "optim.learning_rate": "if too high, the gradient norm grows; if too low, the loss falls slowly from the start",
    "train.tokens_per_step": "fewer tokens per step learn less per step",
    "train.max_steps": "the learning rate decays over another length, so only the final losses compare",
    "eval.tokens": "the loss is measured on other tokens",
}
_OTHER_CAUSES = [
    "the precision: compare with a run in full precision (mixed_precision: no in the accelerate config)",
    "the code and the versions: `git diff`, and Machine in report.html",
    "the machine: `python cli.py doctor RECIPE`",
]


@dataclass(frozen=True)
class Verdict:
    """`sentence` starts with the verdict; `causes` are at most three things to check, the likeliest first."""

    kind: Literal["normal", "above", "below", "early", "other", "none"]
    sentence: str
    causes: tuple[str, ...] = ()


def judge(reference: Reference | None, config: Config, events: list[Event]) -> Verdict:
    """Judge the validation losses in a run's `events` against the reference, if there is one."""
    if reference is None:
        return Verdict("none", _NONE)
    incomparable, shifting = differences(reference, config)
    if incomparable:
        return Verdict("other", f"not comparable with reference {reference.name}: {'; '.join(incomparable.values())}")
    verdict = judge_curve(reference, events) if reference.curves else judge_points(reference, events)
    if verdict.kind == "above":
        text_unknown = reference.text is not None and text_facts(config) is None
        return Verdict(verdict.kind, verdict.sentence, _causes(shifting, events, text_unknown))
    if shifting and verdict.kind in ("normal", "below"):
        return Verdict(
            verdict.kind, f"{verdict.sentence}; this run has another {', '.join(shifting)} than the reference"
        )
    return verdict


def judge_curve(reference: Reference, events: list[Event]) -> Verdict:
    """Judge against the band over seeds, at the steps of evaluations that both have."""
    curve, runs = reference.curves["val/loss"], f"{len(reference.seeds)} reference runs of {reference.name}"
    if not_finite := [event["step"] for event in events if "val/loss" in event and not is_number(event["val/loss"])]:
        return Verdict("above", f"diverged: the validation loss was not finite at step {not_finite[0]:,}")
    steps, losses = column(events, "val/loss")
    common, ours, theirs = np.intersect1d(steps, curve.step, return_indices=True)
    if len(common) == 0 or common[-1] == 0:
        first = next((step for step in curve.step if step > 0), 0)
        hint = "" if first in steps or len(steps) < 3 else f"; `--eval.every {first}` evaluates at the same steps"
        return Verdict("early", f"too early to judge: the reference's first evaluation is at step {first:,}{hint}")
    losses, low, high = losses[ours], np.array(curve.low)[theirs], np.array(curve.high)[theirs]
    side = np.where(losses > high, 1, np.where(losses < low, -1, 0))
    last = f"{losses[-1]:.3f} at step {int(common[-1]):,}"
    if side[-1] == 0:
        outside = [f"{int(step):,}" for step in common[side != 0]]
        sentence = f"normal: validation loss {last} is inside the band {low[-1]:.3f} to {high[-1]:.3f} of {runs}"
        if outside:
            sentence += f"; it was outside at {'step' if len(outside) == 1 else 'steps'} {', '.join(outside)}"
        return Verdict("normal", sentence)
    others = np.flatnonzero(side != side[-1])
    since = int(common[others[-1] + 1 if len(others) else 0])
    kind = "above" if side[-1] > 0 else "below"
    sentence = f"{kind} the band of {runs} from step {since:,} on: validation loss {last} against "
    sentence += f"{low[-1]:.3f} to {high[-1]:.3f}"
    if kind == "below":
        sentence += "; unless you meant to improve it, check that the training text has no validation text"
    return Verdict(kind, sentence)


def judge_points(reference: Reference, events: list[Event]) -> Verdict:
    """Judge the best validation loss against published losses, usually only those of finished runs."""
    steps, losses = column(events, "val/loss")
    published = "; ".join(
        f"{point.loss:g}" + (f" at step {point.step:,}" if point.step else "") + f" ({point.what})"
        for point in reference.points
    )
    if len(steps) == 0:
        return Verdict("early", f"too early to judge: no evaluation yet; published: {published}")
    best = losses.argmin()
    at = f"best validation loss {losses[best]:.3f} at step {int(steps[best]):,} of {int(steps[-1]):,}"
    passed = [
        f"below {point.loss:g} since step {int(steps[losses <= point.loss][0]):,}"
        for point in reference.points
        if (losses <= point.loss).any()
    ]
    reached = [point for point in reference.points if point.step is not None and steps[-1] >= point.step]
    if not reached:
        return Verdict("early", f"too early to judge: {', '.join([at, *passed])}; published: {published}")
    goal = max(reached, key=lambda point: point.step or 0)
    if losses[best] > goal.loss + goal.tolerance:
        return Verdict("above", f"above the published loss: {at}; published: {published}")
    return Verdict("normal", f"normal: {', '.join([at, *passed])}; published: {published}")


def _causes(shifting: dict[str, str], events: list[Event], text_unknown: bool) -> tuple[str, ...]:
    """Known differences first: the usual causes are learning rate, text and tokens per step."""
    causes = [f"{message}: {_SYMPTOMS[key]}" if key in _SYMPTOMS else message for key, message in shifting.items()]
    if text_unknown:
        causes.append("the text: the prepared tokens (data.dir) are missing, so they cannot be compared")
    if skipped := sum(event.get("train/skipped_steps") or 0 for event in events):
        causes.append(f"{skipped:,} steps had no finite gradient and were skipped: lower optim.learning_rate")
    if not causes:
        equal = "learning rate, text and tokens per step equal the reference's, so the cause is not the recipe:"
        return (f"{equal} {_OTHER_CAUSES[0]}", *_OTHER_CAUSES[1:])
    return tuple((causes + _OTHER_CAUSES)[:3])
