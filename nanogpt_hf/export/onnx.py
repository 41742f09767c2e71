"""Export a model to ONNX: input_ids (batch, sequence) -> logits (batch, sequence, vocabulary),
without a cache.

Needs the packages onnx, onnxscript and onnxruntime.
"""

import logging
import warnings
from pathlib import Path

import onnxruntime
import torch
import transformers

from nanogpt_hf.data.hf_tokenizer import save_tokenizer
from nanogpt_hf.errors import UserError, one_line
from nanogpt_hf.export.model_folder import (
    fixed_input,
    logits_of,
    max_difference,
    write_generation_config,
)
from nanogpt_hf.model.architecture import architecture_of
from nanogpt_hf.model.experts import experts_of

FILE = "model.onnx"
# Bytes of the largest file. protobuf's limit is 2 GiB, so larger weights go to a second file.
_LARGEST_FILE = 1_900_000_000


class _LogitsOnly(torch.nn.Module):
    """A model from token ids to logits: the graph of ONNX has one input and one output."""

    def __init__(self, model: transformers.PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def export_onnx(
    folder: Path,
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerBase,
) -> float:
    """Write `model` as an ONNX graph with config.json and tokenizer, and run it with onnxruntime.

    Returns the largest difference of the logits.
    """
    config = model.config
    # The graph is traced with one input, but takes batches of any size and texts of any length.
    longest = config.max_position_embeddings
    shapes = {
        "input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=longest)}
    }
    size = 4 * model.num_parameters()  # bytes in float32
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    # It reports that torchvision is missing, which no language model needs.
    registration.setLevel(logging.ERROR)
    if experts_of(model):
        # The other ways to multiply by experts have no ONNX function.
        model.set_experts_implementation("batched_mm")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch
            torch.onnx.export(
                _LogitsOnly(model.eval()),
                (fixed_input(config),),
                folder / FILE,
                input_names=["input_ids"],
                output_names=["logits"],
                dynamic_shapes=shapes,
                dynamo=True,
                external_data=size > _LARGEST_FILE,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise UserError(
            f"--format onnx: torch cannot export {architecture_of(config).name}: {one_line(error)}"
        ) from error
    finally:
        registration.setLevel(level)
    # The files that programs around onnxruntime read: config, generation config and tokenizer.
    architecture_of(config).standard_config(config).save_pretrained(folder)
    write_generation_config(folder, model.generation_config)
    save_tokenizer(tokenizer, folder)

    session = onnxruntime.InferenceSession(folder / FILE, providers=["CPUExecutionProvider"])
    ids = fixed_input(config)
    original = logits_of(model)
    difference = 0.0
    # With the traced sizes and with others, which a graph with fixed sizes would refuse.
    for batch, length in ((2, ids.shape[1]), (1, 1)):
        (logits,) = session.run(None, {"input_ids": ids[:batch, :length].numpy()})
        difference = max(
            difference,
            max_difference(torch.from_numpy(logits), original[:batch, :length], exact=True),
        )
    return difference
