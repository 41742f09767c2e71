"""Progress of a run and its last evaluation, as checkpoints store them."""

import math
from dataclasses import dataclass
from typing import Any

from nanogpt_hf.config.schema import EvalSection


@dataclass(frozen=True)
class MeasuredLoss:
    loss: float  # mean over the tokens, in nats
    tokens: int
    bytes_per_token: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers: nats per token -> bits per byte of the split's text."""
        return self.loss / math.log(2) / self.bytes_per_token


@dataclass
class TrainState:
    """Progress of a run; with recipe, weights and optimizer state it is all that a resume needs."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # training tokens seen
    seconds: float = 0.0  # spent training and evaluating, over all resumes
    evaluation: MeasuredLoss | None = None  # the last one
    evaluated_step: int = -1
    # whose data was skipped after loss spikes: step s sees the data of s + skipped_steps
    skipped_steps: int = 0
    last_finite_step: int = 0  # the last with a finite gradient; later ones changed no weight
    reported_step: int = 0  # at the last report of the monitor
    clipped_steps: int = 0  # steps since then whose gradient was clipped
    not_finite_steps: int = 0  # and those whose gradient was not finite
    loss_average: float | None = None  # running average of the logged training losses
    best_loss: float | None = None  # validation loss of best/
    best_step: int | None = None
    identity: dict[str, Any] | None = None  # the run's (runs/identity.py)

    def out_of_patience(self, eval_section: EvalSection) -> bool:
        """Whether `eval.patience` evaluations in a row, including that of this step, were not
        the best.
        """
        if (
            eval_section.patience is None
            or self.best_step is None
            or self.evaluated_step < self.step
        ):
            return False
        return self.step - self.best_step >= eval_section.patience * eval_section.every


def read_state(facts: dict[str, Any]) -> TrainState:
    """The state of `dataclasses.asdict`. Raises TypeError if a field is missing or unknown."""
    state = TrainState(**facts)
    if state.evaluation is not None:
        state.evaluation = MeasuredLoss(**facts["evaluation"])
    return state
