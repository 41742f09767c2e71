"""Loss, perplexity and bits per byte of a model on texts: a measurement of the `evaluate` library.

import evaluate

loss = evaluate.load("nanogpt_hf/evaluation/text_loss")
loss.compute(data=["One text.", "Another."], model="runs/quickstart")
"""

import datasets
import evaluate

from nanogpt_hf.evaluation.text import measure_texts

_DESCRIPTION = """\
Bits per byte compares models with different tokenizers: the sum of the losses of all predicted
tokens, in bits, divided by their UTF-8 bytes. Texts are joined by the model's end-of-text token;
the first token of all is not predicted. Errors are standard errors over windows of the text.
"""
_INPUTS = """\
Args:
    data: the texts.
    model: a run folder, a model folder or a Hub id.
    block_size: tokens read at once (default: all of the model's positions).
    stride: tokens from one window to the next (default: block_size).
    batch_size: windows read at once.
Returns:
    loss (nats per token), perplexity, bits_per_byte, their standard errors, and the sizes.
"""


class TextLossOfModel(evaluate.Measurement):
    """Figures of `nanogpt-hf evaluate MODEL --data TEXT`, computed by the same code."""

    def _info(self) -> evaluate.MeasurementInfo:
        return evaluate.MeasurementInfo(
            module_type="measurement",
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"data": datasets.Value("string")}),
        )

    # The library passes its inputs by the names of `features`.
    def _compute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        data: list[str],
        model: str,
        block_size: int | None = None,
        stride: int | None = None,
        batch_size: int = 8,
    ) -> dict:
        return measure_texts(
            data, model, block_size=block_size, stride=stride, batch_size=batch_size
        )
