"""Build a run: model, optimizer and this rank's batches, prepared by Accelerate."""

import ctypes
import logging
import sys

from accelerate import Accelerator
from transformers import PreTrainedModel

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.prepared import PreparedData
from nanogpt_hf.distributed.accelerator import prepared_blocks
from nanogpt_hf.distributed.deepspeed import is_zero
from nanogpt_hf.distributed.layout import split_model
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError
from nanogpt_hf.generate import end_ids_of
from nanogpt_hf.model.build import describe_trainable, start_model
from nanogpt_hf.model.objective import next_token_loss
from nanogpt_hf.optim.optimizer import build_optimizer
from nanogpt_hf.rl.objective import policy_objective
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState
from nanogpt_hf.training.micro_batch import build_batches, check_memory, settle_micro_batch
from nanogpt_hf.training.pipeline import build_stage
from nanogpt_hf.training.run import Run

logger = logging.getLogger(__name__)


def build_run(
    config: Config,
    accelerator: Accelerator,
    data: PreparedData,
    folder: RunFolder | None = None,
    *,
    step: int = 0,
    resume: bool = False,
) -> Run:
    """Build a run with initial weights and the parameters that are trainable at `step`, and take a dry-run step.

    A resumed run keeps the micro-batch size that `auto` found before. Raises UserError if recipe, tokenizer, model and
    machine do not fit together.
    """
    if config.lora.quantize == "4bit" and accelerator.device.type == "cpu":
        raise UserError(  # it packs them for inference at the first evaluation, and cannot unpack them
            "lora.quantize: bitsandbytes 0.50 cannot train 4-bit weights on a CPU; use 8bit, or a GPU"
        )
    mesh = Mesh.from_environment()
    if config.rl.task and (is_zero(accelerator) or mesh.dp_size != mesh.world_size):
        raise UserError(
            "rl: generates with a whole or FSDP2-sharded model, not under DeepSpeed, tensor, context or pipeline "
            "parallelism; use accelerate_configs/ddp.yaml or fsdp2.yaml"
        )
    check_memory(config, accelerator, mesh, data.vocab_size)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    run = Run(
        config=config,
        accelerator=accelerator,
        mesh=mesh,
        **_build_model(config, accelerator, data, step),
        data=data,
        batches=build_batches(config, accelerator, mesh, data.train, config.train.min_micro_batch_size),
        objective=policy_objective(config.rl) if config.rl.task else next_token_loss,
        state=TrainState(),
        run_folder=folder,
    )
    settle_micro_batch(run, resume=resume)
    return run


def rebuild_model(run: Run) -> None:
    """Replace model and optimizer by new ones for the parameters that are trainable from the run's step on.

    They have initial weights; the caller loads a checkpoint.
    """
    run.model, run.optimizer = run.accelerator.free_memory(run.model, run.optimizer)
    for name, part in _build_model(run.config, run.accelerator, run.data, run.state.step).items():
        setattr(run, name, part)
    settle_micro_batch(run)


def _build_model(config: Config, accelerator: Accelerator, data: PreparedData, step: int) -> dict:
    model = start_model(config, data.vocab_size, data.end_of_text_id, step)
    _record_end_ids(model, data.end_of_turn_id)
    if config.finetune.model:
        logger.info(f"{f'from step {step:,} on ' if step else ''}{describe_trainable(model, config, step)}")
    if (mesh := Mesh.from_environment()).pp_size > 1:
        prepared, optimizer = build_stage(model, config, accelerator, mesh)
    else:
        split_model(model, accelerator, mesh)
        optimizer = build_optimizer(model, config.optim, config.finetune.layer_decay, accelerator)
        with prepared_blocks(model, accelerator, optimizer):
            prepared, optimizer = accelerator.prepare(model, optimizer)
    prepared.train()
    return {"model": prepared, "model_config": model.config, "optimizer": optimizer}


def _record_end_ids(model: PreTrainedModel, end_of_turn_id: int | None) -> None:
    """Put every token that ends a text into the config, which is saved: that of chat models has not all of them."""
    own = model.config.eos_token_id
    first = own if isinstance(own, list) else [own]
    ends = [end for end in dict.fromkeys([*first, *sorted(end_ids_of(model)), end_of_turn_id]) if end is not None]
    if ends:
        model.config.eos_token_id = ends[0] if len(ends) == 1 else ends


def keep_freed_memory() -> None:
    """Make glibc's allocator keep freed memory instead of returning it to the system.

    Each step allocates and frees the same activations; without this the kernel zeroes every page again at each step.
    Blocks above 32 MiB are still returned at once.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)
