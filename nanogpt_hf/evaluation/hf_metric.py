"""Perplexity as a metric of the `evaluate` library, loaded by the path of this file.

    evaluate.load("nanogpt_hf/evaluation/hf_metric.py").compute(predictions=texts, model="runs/quickstart/best")

It averages over tokens as `cli.py evaluate` does, not over texts, which would give short texts the weight of long ones.
"""

import datasets
import evaluate
from accelerate import Accelerator

from nanogpt_hf.data.tokenizer import build_tokenizer
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.evaluation.corpus import corpus_of
from nanogpt_hf.evaluation.loss import evaluate_text
from nanogpt_hf.model.build import load_model

_DESCRIPTION = "Loss, perplexity and bits a byte of a GPT on texts, weighted by tokens, over windows that may overlap."
_INPUTS = """
predictions: texts, each a document
model: a model folder or a Hub id
block_size: tokens read at once; left out, all of the model's positions
stride: tokens from one window to the next; left out, block_size
batch_size: windows in one forward pass
"""


class Perplexity(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string")}),
        )

    def _compute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        predictions: list[str],
        model: str,
        block_size: int | None = None,
        stride: int | None = None,
        batch_size: int = 8,
    ) -> dict[str, float | int | None]:
        accelerator = Accelerator()
        gpt = load_model(model).to(accelerator.device)
        size: int = block_size or gpt.config.max_position_embeddings
        result = evaluate_text(
            accelerator,
            Mesh.from_environment(),
            gpt,
            corpus_of(predictions, build_tokenizer(model, ()), "predictions", "given"),
            block_size=size,
            stride=stride or size,
            batch_size=batch_size,
        )
        return result.figures()
