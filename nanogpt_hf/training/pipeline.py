"""Pipeline parallelism in training: build the stage of this process, and take a step on all stages."""

from collections.abc import Callable
from typing import Any, cast

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.seeds import derive_seed
from nanogpt_hf.distributed.accelerator import prepared_blocks, update
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.distributed.pipeline import Pipeline, pipeline_of
from nanogpt_hf.optim.optimizer import build_optimizer, set_learning_rate, skip_step_unless_finite
from nanogpt_hf.training.run import Run


def build_stage(
    model: PreTrainedModel, config: Config, accelerator: Accelerator, mesh: Mesh
) -> tuple[PreTrainedModel, Any]:
    """Cut this process's stage from the whole `model`; return it and the optimizer of its parameters, prepared."""
    Pipeline(model, accelerator, mesh)
    optimizer = build_optimizer(model, config.optim, config.finetune.layer_decay, accelerator)
    with prepared_blocks(model, accelerator, optimizer):
        return model, accelerator.prepare_optimizer(optimizer, device_placement=False)


def pipelined_step(
    run: Run, step: int, learning_rate: float, seed_dropout: Callable[[torch.device, int], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take one optimizer step: all micro-batches through all stages, clip, update. Returns loss and gradient norm.

    Without dropout it equals that of one process. With dropout, the first stage draws the masks of one process.
    """
    batches, pipeline, optimizer = run.batches, pipeline_of(run.model), cast(Any, run.optimizer.optimizer)
    assert pipeline is not None
    set_learning_rate(run.optimizer, learning_rate)

    def before(index: int) -> None:
        number, later = batches.micro_batch_number(index), [pipeline.index] if pipeline.index else []
        seed_dropout(pipeline.device, derive_seed(batches.seed, "dropout", step, number, *later))

    loss = pipeline.train(list(batches.micro_batches(step)), batches.num_targets(step), before)
    grad_norm = pipeline.clip_gradients(optimizer.in_model_order, run.config.optim.max_grad_norm)
    skip_step_unless_finite(optimizer, grad_norm)
    update(run.accelerator, run.optimizer)
    return loss, grad_norm
