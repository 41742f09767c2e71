"""What a training step of a recipe holds and computes, by its method."""

from typing import Any

from transformers import PreTrainedModel

from nanogpt_hf.config.schema import Config
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.model.architecture import architecture_of


def step_of(config: Config) -> dict[str, Any]:
    """Arguments of `footprint` for a step of a recipe, without its micro-batches."""
    method = method_of(config)
    return {
        "block_size": config.data.block_size,
        "optim": config.optim,
        "sequences": method.sequences,
        "row_loss": method.row_loss,
    }


def flops_per_token(config: Config, model: PreTrainedModel) -> float:
    """FLOPs of a token of a block, of which a method may read several sequences."""
    method = method_of(config)
    flops = architecture_of(model).flops_per_token(model.config, config.data.block_size)
    # A pass without a gradient is a third of a forward and a backward pass.
    return flops * (method.sequences + method.scored / 3)
