"""A model as an ONNX graph: input_ids (batch, sequence) -> logits (batch, sequence, vocabulary), without a cache.

Through torch.onnx, which torch keeps up with itself. Needs the packages onnx, onnxscript and onnxruntime.
"""

import logging
import warnings
from pathlib import Path

import onnxruntime
import torch
import transformers

from nanogpt_hf.data.tokenizer import save_tokenizer
from nanogpt_hf.export.model_folder import finite_logits_of, fixed_input, max_difference
from nanogpt_hf.model.modeling_gpt import GPTForCausalLM

FILE = "model.onnx"
_LARGEST_FILE = 1_900_000_000  # bytes; a protobuf file ends at 2 GiB, larger weights lie in a file beside it


class _LogitsOnly(torch.nn.Module):
    def __init__(self, model: GPTForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def export_onnx(folder: Path, model: GPTForCausalLM, tokenizer: transformers.PreTrainedTokenizerBase | None) -> float:
    """Write `model` as a graph, with config.json and tokenizer beside it; run it with onnxruntime.

    Returns how far its logits lie from the original's.
    """
    config = model.config
    shapes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=config.n_positions)}}
    size = 4 * model.num_parameters()
    registration = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = registration.level
    registration.setLevel(logging.ERROR)  # it tells of torchvision, which nobody asked for
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own parts about each other
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
    finally:
        registration.setLevel(level)
    config.to_gpt2().save_pretrained(folder)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)

    session = onnxruntime.InferenceSession(folder / FILE, providers=["CPUExecutionProvider"])
    ids = fixed_input(config)
    original = finite_logits_of(model)
    worst = 0.0
    for batch, length in ((2, ids.shape[1]), (1, 1)):  # other sizes than those it was traced with, too
        (logits,) = session.run(None, {"input_ids": ids[:batch, :length].numpy()})
        worst = max(worst, max_difference(torch.from_numpy(logits), original[:batch, :length], exact=True))
    return worst
