"""Estimate the memory of a teacher: its weights, its pass without a gradient, and what the loss
holds of its distribution.
"""

from dataclasses import dataclass

from transformers import PreTrainedModel

from nanogpt_hf.distributed.launch import Launch
from nanogpt_hf.methods.distillation import teacher_dtype
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.planning.counts import Counts


@dataclass(frozen=True)
class Teacher:
    """The teacher of a recipe, and what decides the memory of its divergence."""

    model: PreTrainedModel  # on the meta device
    # Whether the divergence compares with a mixture of both distributions (0 < distill.beta < 1).
    is_mixture: bool = False
    # Whether it teaches the student's own answers, and rewards have a weight beside it.
    has_rewards: bool = False

    def kept(self, launch: Launch) -> float:
        """Bytes of its weights on a device, in the precision of the run."""
        value = self._value(launch)
        counts = self._counts
        if launch.sharding != "fsdp":
            return float(value * counts.total)
        # No backward pass follows, so what is outside of its blocks stays gathered.
        return float(value * (counts.total / launch.shards + counts.outside))

    def hidden(self, launch: Launch, rows: int) -> float:
        """Bytes of its last hidden states, which wait for the student's loss."""
        return float(self._value(launch) * rows * self.model.config.hidden_size)

    def passing(self, launch: Launch, rows: int) -> dict[str, float]:
        """Bytes of the parts of its pass, which comes before the student's."""
        value = self._value(launch)
        architecture = architecture_of(self.model)
        block = architecture.blocks(self.model)[-1]
        inner = architecture.inner_width(block, self.model.config)
        width = self.model.config.hidden_size
        # This block and the next one.
        gathered = 2 * self._counts.block if launch.sharding == "fsdp" else 0
        return {
            "activations": float(2 * value * rows * (width + inner)),
            "copies": float(value * gathered),
        }

    @property
    def bytes_per_logit(self) -> float:
        """Bytes of the loss for each logit of a slice (methods/slices.py)."""
        # As many tensors in float32 at the peak of the slice's backward pass, of a mixture more.
        # With rewards there are the policy's log-probabilities, too.
        return 4.0 * (8 + 4 * self.is_mixture + self.has_rewards)

    def _value(self, launch: Launch) -> int:
        return teacher_dtype(launch.precision).itemsize

    @property
    def _counts(self) -> Counts:
        return Counts.of(self.model)
