"""Build a run: its model and optimizer, placed on the devices, with the weights of a checkpoint."""

import ctypes
import dataclasses
import logging
import sys
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from nanogpt_hf.checkpoint.reader import Checkpoint, find_checkpoint, load_checkpoint
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.sources import packs
from nanogpt_hf.config.stages import config_at, stages_of
from nanogpt_hf.config.step_size import accumulation_steps
from nanogpt_hf.data.prepared import PreparedData, load_prepared
from nanogpt_hf.distributed.accelerator import choose_kernels, is_deterministic
from nanogpt_hf.distributed.gradient_tree import fix_order
from nanogpt_hf.distributed.mesh import mesh_of
from nanogpt_hf.distributed.pipeline import Pipeline
from nanogpt_hf.distributed.preparation import (
    compress_gradients,
    multiply_in_fp8,
    prepared_blocks,
    split_model,
)
from nanogpt_hf.distributed.updates import updater_of
from nanogpt_hf.generate import end_ids_of
from nanogpt_hf.methods.finetuning import learned_ids
from nanogpt_hf.methods.run import Run
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.model.build import describe_trainable, start_model
from nanogpt_hf.model.checks import check_causal
from nanogpt_hf.model.packed_attention import attend_apart
from nanogpt_hf.model.written_out_attention import write_out_attention
from nanogpt_hf.optim.optimizer import build_optimizer
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState, record_knobs
from nanogpt_hf.training.auto_size import choose_micro_batch
from nanogpt_hf.training.budget import choose_steps
from nanogpt_hf.training.micro_batch import build_batches, check_memory, dry_run_step

logger = logging.getLogger(__name__)


def build_run(
    config: Config,
    accelerator: Accelerator,
    data: PreparedData,
    folder: RunFolder | None = None,
    checkpoint: Checkpoint | None = None,
) -> Run:
    """Build a run with initial weights or those of a checkpoint, and take a dry-run step.

    Raises UserError if recipe, tokenizer, model, checkpoint and machine do not fit together.
    """
    check_memory(config, accelerator, data.vocab_size)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    else:
        choose_kernels(deterministic=is_deterministic(config, accelerator.device))
    return build_at(config, accelerator, data, folder, checkpoint)


def build_at(
    config: Config,
    accelerator: Accelerator,
    data: PreparedData,
    folder: RunFolder | None,
    checkpoint: Checkpoint | None,
) -> Run:
    """Build a run at the step of a checkpoint, or at its first step.

    The machine is prepared already: its memory was checked, and its kernels are chosen.
    """
    step = checkpoint.state.step if checkpoint else 0
    config = config_at(config, step)
    # In a stage after the first, blocks and micro-batches may have other sizes.
    if config.full_recipe:
        blocks = load_prepared(config)
        data = dataclasses.replace(data, train=blocks.train, validation=blocks.validation)
        accumulation = accumulation_steps(config, mesh_of(accelerator).dp_size)
        accelerator.gradient_accumulation_steps = accumulation

    model = build_model(config, accelerator, data, step)
    placed, optimizer = place_on_devices(model, config, accelerator)
    run = Run(
        config=config,
        accelerator=accelerator,
        model=placed,
        model_config=model.config,
        generation_config=model.generation_config,
        optimizer=optimizer,
        updater=updater_of(
            accelerator, placed, optimizer, has_groups=bool(config.train.gradient_groups)
        ),
        data=data,
        batches=build_batches(config, accelerator, data.train, config.train.min_micro_batch_size),
        objective=method_of(config).objective(config, data),
        state=TrainState(),
        run_folder=folder,
    )

    # Before the checkpoint is loaded: a dry-run step makes the optimizer state that it fills.
    if config.train.micro_batch_size == "auto":
        choose_micro_batch(run, resume=checkpoint is not None)
    else:
        dry_run_step(run, config.train.micro_batch_size)
    # `bench` and `doctor` measure without a folder, and have no steps to choose.
    if config.train.budget and folder:
        choose_steps(run)
    if checkpoint:
        run.state = load_checkpoint(accelerator, placed, optimizer, checkpoint)
    record_knobs(run.state, run.config)
    if checkpoint:
        run.saved = dataclasses.replace(run.state)
    return run


def build_model(
    config: Config, accelerator: Accelerator, data: PreparedData, step: int
) -> PreTrainedModel:
    """Return the whole model that a run has at `step`, before a checkpoint is loaded; with the
    attention and the precision of this machine.
    """
    mesh = mesh_of(accelerator)
    on_cpu = accelerator.device.type == "cpu"
    learned = learned_ids(config, data)
    model = start_model(config, data.vocab_size, data.end_of_text_id, step, learned)
    # A model without values cannot be probed, and one in 4 bits has no CPU kernels.
    if model.device.type != "meta" and not config.lora.quantize:
        check_causal(model, packs=packs(config))
    if on_cpu and accelerator.mixed_precision == "bf16":
        write_out_attention(model)
    if accelerator.mixed_precision == "fp8":
        multiply_in_fp8(model, mesh)
    # On a CPU, compiled blocks would be compiled again for all lengths of documents.
    if packs(config) and not (on_cpu and mesh.compiles):
        attend_apart(model)
    _record_end_ids(model, data.end_of_turn_id)
    if config.finetune.model:
        start = f"from step {step:,} on " if step else ""
        logger.info(f"{start}{describe_trainable(model, config)}")
    return model


def place_on_devices(
    model: PreTrainedModel, config: Config, accelerator: Accelerator
) -> tuple[Any, Any]:
    """Split the model over the mesh, build its optimizer, and let accelerate prepare both: DDP or
    sharding, precision, compilation.
    """
    # 1. What splits the layers themselves: pipeline stages, or tensor and expert parallelism. The
    #    optimizer is built afterwards, since it refers to the parameters that remain.
    is_pipeline = mesh_of(accelerator).pp_size > 1
    if is_pipeline:
        Pipeline(model, accelerator)
    else:
        split_model(model, accelerator)
    bare: Any = build_optimizer(model, config.optim, config.finetune.layer_decay, accelerator)

    # 2. What wraps them: accelerate's DDP, FSDP2 or DeepSpeed. A pipeline wraps its own stage.
    with prepared_blocks(model, accelerator, bare):
        if is_pipeline:
            placed: Any = model
            optimizer: Any = accelerator.prepare_optimizer(bare, device_placement=False)
        else:
            placed, optimizer = accelerator.prepare(model, bare)
            compress_gradients(placed, accelerator)

    # 3. FSDP2 replaces parameters; a list of the whole ones would keep them in memory.
    bare.in_model_order = [p for p in placed.parameters() if p.requires_grad]
    if config.train.gradient_groups:
        fix_order(placed, optimizer.optimizer)
    placed.train()
    return placed, optimizer


def start_again(run: Run) -> None:
    """Build the run again at its newest checkpoint, as after `--resume`: because layers are
    unfrozen or a stage begins at its step, or because the loss has spiked; then the data since it
    is skipped.
    """
    run.check_start_folder()
    before = run.state
    accelerator = run.accelerator
    given = run.objective if run.objective is not run.recipe_objective else None
    if run.mesh.compiles:
        # Other shapes would share a graph, unlike those of a resumed run.
        torch.compiler.reset()
    # Two models at once need not fit. The second call frees what nothing refers to any more.
    del run.updater
    run.model, run.optimizer = accelerator.free_memory(run.model, run.optimizer)
    accelerator.free_memory()
    spiked = run.saved is None or run.saved.step < before.step
    checkpoint = find_checkpoint(accelerator, run.folder, before.identity)
    built = build_at(run.config, accelerator, run.data, run.folder, checkpoint)
    # The same object changes, so that the caller of `train` has the new model.
    vars(run).update(vars(built))
    run.objective = given or run.objective
    for stage in stages_of(run.config):
        if stage.first == run.state.step and stage.changes:
            logger.info(f"{stage.name}, from step {stage.first + 1:,} on: {stage.changes}")
    run.state.seconds = before.seconds
    run.saved = dataclasses.replace(run.state)
    if spiked:
        run.state.skipped_steps = before.skipped_steps + before.step - run.state.step
        # best/ may be of a later step than the checkpoint.
        run.state.best_loss = before.best_loss
        run.state.best_step = before.best_step


def _record_end_ids(model: PreTrainedModel, end_of_turn_id: int | None) -> None:
    """Put every token that ends a text into the config and the generation config, which are
    saved: the files of chat models list only some of them.
    """
    own = model.config.eos_token_id
    first = own if isinstance(own, list) else [own]
    # A dict keeps the order, so that the model's own first token stays the first.
    found = dict.fromkeys([*first, *sorted(end_ids_of(model)), end_of_turn_id])
    ends = [end for end in found if end is not None]
    if ends:
        model.config.eos_token_id = ends[0] if len(ends) == 1 else ends
        if model.generation_config is not None:
            model.generation_config.eos_token_id = model.config.eos_token_id


def keep_freed_memory() -> None:
    """Make glibc's allocator keep freed memory instead of returning it to the system.

    Each step allocates and frees the same activations; without this the kernel zeroes every page
    again at each step. Blocks above 32 MiB are still returned at once.
    """
    if sys.platform != "linux":
        return
    # musl has no mallopt.
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        # The numbers of the two parameters are in malloc.h.
        trim_threshold = -1
        mmap_threshold = -3
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)
