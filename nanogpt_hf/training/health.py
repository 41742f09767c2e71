"""Steps gone wrong: gradients that are not finite, and losses far above those before."""

import math
from collections import deque

import torch

from nanogpt_hf.errors import UserError
from nanogpt_hf.training.checkpoint import TrainState
from nanogpt_hf.training.run_folder import RunFolder

BAD_STEPS_IN_A_ROW = 10  # no accident any more; fp16 needs a few at first to find its scale
ROLLBACKS_IN_A_ROW = 3  # to the same checkpoint: other data does not help
_MEMORY = 0.9  # of the running average, a report


class Health:
    """Looks at a run's steps where they are reported, so that the host waits for the device no more often."""

    def __init__(self, run: RunFolder, every: int, rollback_ratio: float | None):
        self.run, self.every, self.ratio = run, every, rollback_ratio
        self._norms = deque(maxlen=max(every, BAD_STEPS_IN_A_ROW))  # on the device until a report
        self._rolled_back = []  # the steps gone back to since this process began

    def add(self, grad_norm: torch.Tensor) -> None:
        """Remember a step by its gradient's norm, a scalar on the device."""
        self._norms.append(grad_norm)

    def skipped(self) -> int:
        """How many steps since the last report had no finite gradient and so changed no weight.

        Raises UserError where there is nothing but such steps.
        """
        bad = (~torch.stack(list(self._norms)).isfinite()).tolist()
        if sum(bad[-BAD_STEPS_IN_A_ROW:]) == BAD_STEPS_IN_A_ROW:
            raise UserError(
                f"no finite gradient in the last {BAD_STEPS_IN_A_ROW} steps, which were skipped; lower "
                f"optim.learning_rate and go on with --resume from {self.run.newest_checkpoint()}"
            )
        return sum(bad[-self.every :])

    def spiked(self, state: TrainState, loss: float) -> bool:
        """Whether the reported loss is `rollback_ratio` times the running average; else it enters the average.

        The average is in the state, so that a resumed run comes to the same answer.
        """
        if self.ratio is None or not math.isfinite(loss):  # such a step was skipped
            return False
        if state.loss_average is not None and loss > self.ratio * state.loss_average:
            return self.run.newest_checkpoint() is not None
        before = loss if state.loss_average is None else state.loss_average
        state.loss_average = _MEMORY * before + (1 - _MEMORY) * loss
        return False

    def rolled_back(self, before: TrainState, state: TrainState) -> str:
        """Let `state`, which was just loaded, leave out the data since; return the line that says so.

        Raises UserError where that has been tried a few times.
        """
        steps = before.step - state.step
        state.skipped_steps = before.skipped_steps + steps
        state.seconds = before.seconds
        self._norms.clear()
        self._rolled_back.append(state.step)
        if self._rolled_back[-ROLLBACKS_IN_A_ROW - 1 :] == [state.step] * (ROLLBACKS_IN_A_ROW + 1):
            raise UserError(
                f"the loss rose above {self.ratio:g} times its average again after going back to step {state.step:,} "
                f"{ROLLBACKS_IN_A_ROW} times; lower optim.learning_rate and go on with --resume"
            )
        return (
            f"step {before.step:,}: the loss is above {self.ratio:g} times its running average; going back to step "
            f"{state.step:,} and past the data of {steps:,} steps"
        )
