"""Progress and identity of a run, as checkpoints store them.

The identity is the knobs that a resume may not change, and the data.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from nanogpt_hf.config.schema import KNOBS, Config, EvalSection, knob_values
from nanogpt_hf.config.sources import source_text
from nanogpt_hf.config.stages import comparable
from nanogpt_hf.config.unread import read_knobs
from nanogpt_hf.data.manifest import TEACHER_CONFIG, Manifest
from nanogpt_hf.own_files import as_type
from nanogpt_hf.runs.files import redact
from nanogpt_hf.runs.origin import changes_of_origin, lost_start, short_digests


@dataclass(frozen=True)
class MeasuredLoss:
    # The mean over the tokens that were predicted, in nats, and their number.
    loss: float
    tokens: int
    # Bytes of text in a predicted token.
    bytes_per_token: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers: all losses in bits, divided by the bytes of the text that
        was predicted; infinite without any.
        """
        if not self.bytes_per_token:
            return math.inf
        return self.loss / math.log(2) / self.bytes_per_token


class KnobChange(TypedDict):
    """Knobs with which a run continued from a step: the first entry has all, later ones what
    changed.
    """

    step: int
    evaluated_step: int  # the last one that was evaluated before
    knobs: dict[str, Any]


@dataclass
class TrainState:
    """Progress of a run; with recipe, weights and optimizer state it is all that a resume needs."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # training tokens seen
    seconds: float = 0.0  # spent training and evaluating, over all resumes
    # The last evaluation, its step, and its score: the validation loss, or minus the mean reward.
    evaluation: MeasuredLoss | None = None
    evaluated_step: int = -1
    score: float | None = None
    # Steps whose data was skipped after loss spikes: step s sees the data of s + skipped_steps.
    skipped_steps: int = 0
    last_finite_step: int = 0  # the last with a finite gradient; later ones changed no weight
    reported_step: int = 0  # at the last report of the monitor
    clipped_steps: int = 0  # steps since then whose gradient was clipped
    not_finite_steps: int = 0  # and those whose gradient was not finite
    loss_average: float | None = None  # running average of the logged training losses
    best_loss: float | None = None  # validation loss of best/
    best_step: int | None = None  # 0: no better than the model that fine-tuning started from
    # By `run_identity`, and by `record_knobs` at each resume that changes knobs.
    identity: dict[str, Any] | None = None
    history: list[KnobChange] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        """Whether both have the same values. The score of a diverged run, NaN, is equal to itself
        in a dict, but not in the comparison that dataclasses write from Python 3.13 on: a run
        whose state differs from what is saved saves it again.
        """
        return isinstance(other, TrainState) and vars(self) == vars(other)

    @property
    def last_score(self) -> float | None:
        """Return the score of the last evaluation. Older checkpoints have none: it is the score of
        the validation data, or of best/ if that was saved at the last evaluation.
        """
        if self.score is None and self.evaluation is not None:
            return self.evaluation.loss
        if self.score is None and self.best_step == self.evaluated_step:
            return self.best_loss
        return self.score

    @property
    def has_diverged(self) -> bool:
        """Return whether the last evaluation is not finite."""
        return self.last_score is not None and not math.isfinite(self.last_score)

    def out_of_patience(self, eval_section: EvalSection) -> bool:
        """Return whether `eval.patience` evaluations in a row, including this step's, were not the
        best.
        """
        patience = eval_section.patience
        best = self.best_step
        if patience is None or best is None or self.evaluated_step < self.step:
            return False
        return self.step - best >= patience * eval_section.every


class _Identity(TypedDict):
    knobs: dict[str, Any]
    data: dict[str, Any]
    origin: NotRequired[dict[str, str]]


def read_state(facts: dict[str, Any]) -> TrainState:
    """Return the state of `dataclasses.asdict`. Raises ValueError for a field of another type, and
    for a count that is negative.
    """
    state = as_type(facts, TrainState)
    if state.identity is not None:
        as_type(state.identity, _Identity, "identity")
    # A damaged count would end in an endless loop or in a step that never comes.
    for name, value in vars(state).items():
        lowest = -1 if name == "evaluated_step" else 0
        if isinstance(value, int) and name != "best_loss" and not lowest <= value < 2**63:
            raise ValueError(f"{name}: must be from {lowest} to 2**63 - 1, got {value}")
    if not 0 <= state.seconds < math.inf:
        raise ValueError(f"seconds: must be a time, got {state.seconds}")
    return state


_FIXED = (
    "model.",
    "data.",
    "optim.name",
    "train.seed",
    "train.tokens_per_step",
    "train.gradient_groups",
    "train.stages",
    "finetune.",
    "lora.",
    "rl.",
    "align.",
    "distill.",
)
_FREE = ("data.dir", "data.num_threads", "data.max_epochs", "data.streaming", "lora.merge")
_FREE += ("rl.eval_questions", "rl.eval_samples", "rl.reward_seconds", "rl.reward_errors")
# The sizes that the dial chose are in the knobs that it sets.
_FREE += ("model.depth", "model.aspect_ratio")
# knobs that decide no number of a step or of its evaluation: places, texts to show, uploads
_ELSEWHERE = ("model.", "data.", "hub.", "lora.", "tracking.trackers", "tracking.project")
_ELSEWHERE += ("eval.tasks", "eval.samples", "eval.metrics", "eval.metric_rows")
# parts of the data's identity whose name alone does not explain them
_SHOWN = {
    "teacher": "distill.teacher: its weights changed",
    TEACHER_CONFIG: "distill.teacher: config.json changed",
    "weights": "data.source: weights",
    "revision": "data revision",
}


def is_fixed(key: str) -> bool:
    """Return whether a resumed run must have the knob's first value: knobs of model, data, order,
    optimizer, step and seed.
    """
    return key.startswith(_FIXED) and not key.startswith(_FREE)


def changing_knobs(config: Config) -> dict[str, Any]:
    """Return the knobs that may change at a resume and decide what a step, its metrics or its
    evaluation are.
    """
    return {
        key: value
        for key, value in knob_values(config.recipe).items()
        if not is_fixed(key) and not key.startswith(_ELSEWHERE)
    }


def record_knobs(state: TrainState, config: Config) -> None:
    """Record in the state of a run that it continues with the knobs of `config`."""
    # Only what changed is recorded, so that the history of a long run stays short.
    before = knobs_at(state.history, state.step)
    changes = {k: v for k, v in changing_knobs(config).items() if k not in before or before[k] != v}
    if changes:
        entry = KnobChange(step=state.step, evaluated_step=state.evaluated_step, knobs=changes)
        state.history = [*state.history, entry]


def knobs_at(history: list[KnobChange], step: int) -> dict[str, Any]:
    """Return the knobs that held after `step` steps; none of a run that recorded none."""
    found: dict[str, Any] = {}
    for entry in history:
        if entry["step"] <= step:
            found |= {key: value for key, value in entry["knobs"].items() if key in KNOBS}
    return found


def run_identity(config: Config, manifest: Manifest, origin: dict[str, str]) -> dict[str, Any]:
    """Return the fixed knobs and the data of a run, and what it starts from (`origin_of`).

    What nothing reads is no part of it. The tokens count, not the path of the text or of the
    prepared data.
    """
    read = read_knobs(config)
    knobs = {
        key: value
        for key, value in comparable(config).items()
        if is_fixed(key) and key != "data.source" and key in read
    }
    # A checkpoint may be shared with other people: no passwords, no names of home folders.
    knobs = json.loads(redact(json.dumps(knobs, ensure_ascii=False)))
    return {
        "knobs": knobs,
        "data": {"source": redact(source_text(config.data)), **manifest.content()},
        "origin": origin,
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Differences between the identity in a checkpoint and this run's, as `key: before -> now`."""
    # A knob that is newer than the checkpoint had its default.
    lines = [
        f"{key}: {old} -> {value}"
        for key, value in now["knobs"].items()
        if (old := before["knobs"].get(key, KNOBS[key].default)) != value
    ]
    origins = before.get("origin", {}), now.get("origin", {})
    lines += lost_start(*origins) + changes_of_origin(*origins)
    old = before["data"]
    new = now["data"]
    # Older checkpoints have no configuration of the teacher, which is then not compared.
    if TEACHER_CONFIG in new:
        old = {TEACHER_CONFIG: new[TEACHER_CONFIG]} | old
    changed = [name for name in new if name != "source" and old.get(name) != new[name]]
    if new.get("train sha256") and changed == ["revision"]:
        # The same tokens, from files that are split or stored otherwise.
        return lines
    return lines + [
        f"{_SHOWN.get(name, f'data {name}')}: {_change(name, old.get(name), new[name])}"
        for name in changed
    ]


def _change(name: str, before: Any, now: Any) -> str:
    """`before -> now`; of the revisions of questions and reward only what is not the same."""
    old = str(before).split(", ")
    new = str(now).split(", ")
    if name == "revision" and len(old) == len(new):
        pairs = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
        old = [a for a, _ in pairs]
        new = [b for _, b in pairs]
    return short_digests(f"{', '.join(old)} -> {', '.join(new)}")
