"""A term of the loss on text, which is added to the cross-entropy of the next token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.config.settings import Setting
from nanogpt_hf.data.prepared import PreparedData

# From some rows of a micro-batch, and their logits (R, vocabulary) in float32, the values (R,) of a
# term. The slice says which of the B · T rows they are: a large vocabulary is computed in chunks.
RowValues = Callable[[slice, Tensor], Tensor]


@dataclass(frozen=True)
class Term:
    """A term of the loss in training; evaluations measure the cross-entropy alone.

    loss = share · cross-entropy + sum over the chosen terms of weight · value

    It is a function of the logits of each token (`rows`), or of the output of the model
    (`output`). A recipe chooses it by its knob, which config/optim_section.py declares as a
    `loss_term`: there are the layouts that honour it.
    """

    # Its metric is train/NAME: the mean over the targets of a step, without the weight.
    name: str
    knob: str
    # The factor of the term in the loss.
    weight: Callable[[Config], float]
    # Called for each micro-batch with the recipe, the data, the model and the batch.
    rows: Callable[[Config, PreparedData, torch.nn.Module, dict[str, Tensor]], RowValues] | None = (
        None
    )
    # From the output of the model, the value of a micro-batch, summed over its targets.
    output: Callable[[Any], Tensor] | None = None
    # The factor of the cross-entropy in a loss with this term.
    share: Callable[[Config], float] = lambda config: 1.0

    def __post_init__(self) -> None:
        layouts = KNOBS[self.knob].layouts
        if layouts is None:
            raise ValueError(f"{self.knob}: declare it by `loss_term` in config/optim_section.py")
        # Stages compute the cross-entropy by themselves, and processes that split the vocabulary
        # have no row of logits: a term would be left out in silence.
        impossible = {Setting.PIPELINE_STAGES}
        if self.rows is not None:
            impossible.add(Setting.TENSOR_PARALLELISM)
        if wrong := impossible & set(layouts):
            names = ", ".join(sorted(setting.value for setting in wrong))
            raise ValueError(
                f"{self.knob}: no such term can honour {names}; leave it out of layouts"
            )

    def is_chosen(self, config: Config) -> bool:
        return get_value(config, self.knob) != KNOBS[self.knob].default
