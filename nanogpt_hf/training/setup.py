"""What a step finds on this machine: the model, its optimizer, and the batches that are this process's."""

import ctypes
import logging
import sys

import torch
from accelerate import Accelerator

from nanogpt_hf.config.schema import Config
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.prepare import PreparedData
from nanogpt_hf.distributed.accelerator import prepared_blocks
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.build import start_model, what_trains
from nanogpt_hf.model.configuration_gpt import GPTConfig
from nanogpt_hf.training.monitor import TimedBatches
from nanogpt_hf.training.optimizer import build_optimizer

logger = logging.getLogger(__name__)


def set_up(
    accelerator: Accelerator, config: Config, data: PreparedData, step: int
) -> tuple[torch.nn.Module, torch.optim.Optimizer, GPTConfig]:
    """A prepared model with the weights that the run began with, an optimizer of what trains at `step`, the config.

    Raises UserError where recipe, tokenizer and model do not fit.
    """
    if config.lora.quantize == "4bit" and accelerator.device.type == "cpu":
        raise UserError(  # it packs them for inference at the first evaluation, and cannot go back
            "lora.quantize: 4-bit weights cannot be trained on a CPU by bitsandbytes 0.50; take 8bit, or a GPU"
        )
    model = start_model(config, data.manifest.vocab_size, data.tokenizer.eos_token_id, step)
    if config.finetune.model:
        logger.info(f"{f'from step {step:,} on ' if step else ''}{what_trains(model, config, step)}")
    optimizer = build_optimizer(model, config.optim, config.finetune.layer_decay)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    with prepared_blocks(model, accelerator):
        return *accelerator.prepare(model, optimizer), model.config


def batches_of(accelerator: Accelerator, config: Config, data: PreparedData, micro_batch_size: int) -> TimedBatches:
    """This process's micro-batches of each step, as many as the accelerator accumulates now."""
    batches = Batches(
        data.train,
        block_size=config.data.block_size,
        order=config.data.order,
        seed=config.train.seed,
        micro_batch_size=micro_batch_size,
        accumulation=accelerator.gradient_accumulation_steps,
        rank=accelerator.process_index,
        num_processes=accelerator.num_processes,
        pin_memory=accelerator.device.type == "cuda",
    )
    return TimedBatches(batches)


def seed_dropout(device: torch.device, seed: int) -> None:
    """Seed what dropout on `device` draws from, and only that.

    torch.manual_seed sees to all kinds of devices, and formats a stack trace for each kind that is not there.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).manual_seed(seed)


def keep_freed_memory() -> None:
    """Let this process keep the memory that tensors free, where the C library is glibc.

    A step takes and frees the same activations as the one before. By default glibc gives them back to the system, which
    has to zero every page again before the next step may have it. Blocks above 32 MiB still go back at once.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)
