"""Prepare a run: check folder, recipe and machine, prepare the data, build model and optimizer."""

import contextlib
import ctypes
import dataclasses
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import broadcast_object_list, gather_object
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from nanogpt_hf.checkpoint.reader import (
    Checkpoint,
    check_identity,
    find_checkpoint,
    load_checkpoint,
    newest_checkpoint,
)
from nanogpt_hf.config.checks import accumulation_steps
from nanogpt_hf.config.compatibility import check_settings
from nanogpt_hf.config.dial import dial_lines
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.settings import Setting
from nanogpt_hf.config.sources import packs, sources_of
from nanogpt_hf.config.stages import config_at, naming, stages_of
from nanogpt_hf.cpu import share_threads
from nanogpt_hf.data.manifest import find_manifest, identity
from nanogpt_hf.data.prepared import PreparedData, load_prepared
from nanogpt_hf.distributed.accelerate_config import check_launch
from nanogpt_hf.distributed.accelerator import (
    build_accelerator,
    choose_kernels,
    compress_gradients,
    is_deterministic,
    is_sharded,
    multiply_in_fp8,
    prepared_blocks,
)
from nanogpt_hf.distributed.gradient_tree import fix_order
from nanogpt_hf.distributed.layout import split_model
from nanogpt_hf.distributed.mesh import Mesh, mesh_of
from nanogpt_hf.distributed.pipeline import Pipeline
from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process, prepare_on_all_ranks
from nanogpt_hf.errors import RunFolderError, UserError
from nanogpt_hf.export.hub import check_login
from nanogpt_hf.generate import end_ids_of
from nanogpt_hf.model.attention import attend_apart, write_out_attention
from nanogpt_hf.model.build import (
    build_config,
    check_balance,
    check_causal,
    describe_trainable,
    start_model,
)
from nanogpt_hf.optim.optimizer import build_optimizer
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.origin import needed_at_resume, origin_of
from nanogpt_hf.runs.provenance import continue_on
from nanogpt_hf.runs.state import TrainState, record_knobs, run_identity
from nanogpt_hf.training.auto_size import choose_micro_batch
from nanogpt_hf.training.finetuning import learned_ids
from nanogpt_hf.training.methods import ON_TEXT, method_of
from nanogpt_hf.training.micro_batch import (
    build_batches,
    check_memory,
    dry_run_step,
    one_line_for_too_little_memory,
)
from nanogpt_hf.training.preferences import lost_reference, raise_on_all_ranks
from nanogpt_hf.training.run import Run

logger = logging.getLogger(__name__)


def prepare_run(
    config: Config,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    auto_resume: bool = False,
    trackers: Sequence[GeneralTracker] = (),
    mesh: Mesh | None = None,
) -> Run:
    """Lock the run folder, by default runs/<its name>, prepare the data of `config`, and build the
    run, with the newest checkpoint if it resumes. Then call `train`, which unlocks the folder.

    With several processes, each of them calls it. `trackers` are objects of accelerate's class,
    which get what the trackers of the recipe get. `mesh` is read from the environment if it is not
    given. Raises UserError if recipe, data, folder and machine do not fit; then no file of the run
    was changed.
    """
    disable_progress_bar()
    mesh = mesh or Mesh.from_environment()
    folder = RunFolder(Path(run_dir or Path("runs") / config.name))
    check_before_the_data(config, folder, lambda stage: check_launch(stage, mesh))
    for line in dial_lines(config):
        logger.info(line)
    method = method_of(config)
    options = {"resume": resume, "overwrite": overwrite, "auto_resume": auto_resume}
    flags = [f"--{name.replace('_', '-')}" for name, is_given in options.items() if is_given]
    check_settings({Setting(flag): flag for flag in flags})

    def prepare() -> tuple[PreparedData, dict[str, Any]]:
        # the main process alone decides: others might look after it has begun to write
        decision: dict[str, Any] = {}
        if mesh.is_main:
            decision["resumes"] = _lock(config, folder, options)
        data = method.load(config)
        for stage in stages_of(config)[1:]:
            with naming(stage):
                load_prepared(stage.config)  # whose blocks may be too long for the text
        if mesh.is_main or not mesh.local_rank:  # once per machine, which has to have the same
            # As for a start: other machines do not know whether the run resumes.
            decision["origin"] = origin_of(config, resumes=False)
        return data, decision | identity(config, data.manifest)

    try:
        data, facts = prepare_on_all_ranks(mesh, prepare)
        with (
            one_line_for_a_lost_process(folder),
            one_line_for_too_little_memory(config, data.vocab_size),
        ):
            accelerator = build_accelerator(config, folder, mesh, trackers)
            return _start_or_resume(config, accelerator, folder, data, facts)
    except BaseException:
        folder.unlock()
        raise


def check_folders(config: Config, folder: RunFolder) -> None:
    """Raises UserError if the run folder and prepared data or the teacher are inside each other."""
    dirs = [config.data.dir, *(source.data.dir for source in sources_of(config.data))]
    others = [("data.dir", path) for path in dirs]
    if config.distill.teacher:
        others.append(("distill.teacher", config.distill.teacher))
    run = folder.path.resolve()
    for knob, path in others:
        other = Path(path).expanduser().resolve()
        if run.is_relative_to(other) or other.is_relative_to(run):
            raise UserError(
                f"--run-dir {folder.path} and --{knob} {path}: one is inside the other; choose two "
                "separate folders"
            )


def check_before_the_data(
    config: Config, folder: RunFolder, check_machine: Callable[[Config], object]
) -> None:
    """Raises UserError for what is wrong without the data: folders, section `model`, and, by
    `check_machine` for the recipe of each stage, the machine.
    """
    check_folders(config, folder)
    for stage in stages_of(config):
        with naming(stage):
            check_machine(stage.config)
            if config.finetune.model is None:
                check_balance(stage.config, build_config(config.model, vocab_size=256))


def _lock(config: Config, folder: RunFolder, options: dict[str, bool]) -> bool:
    """Lock the run folder; return whether the run resumes. Only the main process calls it."""
    folder.lock()
    if resumes := folder.check(**options):
        for change in folder.changes(config):  # raises if the recipe is another experiment
            logger.info(f"changed since the run began: {change}")
    if config.hub.push and config.hub.repo and (problem := check_login(config.hub.repo)):
        logger.warning(problem)
    return resumes


def _start_or_resume(
    config: Config,
    accelerator: Accelerator,
    folder: RunFolder,
    data: PreparedData,
    facts: dict[str, Any],
) -> Run:
    """Build the run. Raises UserError, and writes nothing, if it cannot be started or resumed."""
    _check_shared_folder(accelerator, folder)
    origin = needed_at_resume(config, facts["origin"]) if facts["resumes"] else facts["origin"]
    run_facts, checkpoint = run_identity(config, data.manifest, origin), None
    processes = mesh_of(accelerator).local_world_size
    share_threads(processes)
    if facts["resumes"]:
        continue_on(folder, accelerator.device, processes)
        if not is_deterministic(config, accelerator.device):
            logger.info(
                "losses will agree with an uninterrupted run to rounding, not bit for bit: "
                "train.deterministic is not set"
            )
        checkpoint = find_checkpoint(accelerator, folder, run_facts)
        _check_end(config, folder, checkpoint)
        is_main = accelerator.is_main_process
        problem = lost_reference(config, folder, data, checkpoint.state) if is_main else None
        raise_on_all_ranks(problem)
        # this start may not have read all again
        known = (checkpoint.state.identity or {}).get("origin", {})
        run_facts["origin"] = known | run_facts["origin"]
    run = build_run(config, accelerator, data, folder, checkpoint)
    run.state.identity = run_facts
    return run


def _check_end(config: Config, folder: RunFolder, checkpoint: Checkpoint) -> None:
    if checkpoint.state.step > config.train.max_steps:
        raise UserError(
            f"{folder.path}: its step {checkpoint.state.step:,} is past train.max_steps "
            f"{config.train.max_steps:,}"
        )


def check_resume(
    config: Config,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
    auto_resume: bool = False,
) -> list[str]:
    """What a resume would do, as lines. Raises what `prepare_run` raises for the run folder, the
    knobs that changed, the data, what the run starts from and its checkpoints; writes nothing.
    """
    folder = RunFolder(Path(run_dir or Path("runs") / config.name))
    check_folders(config, folder)
    folder.check_unlocked()
    if auto_resume and not folder.path.is_dir():
        return [f"{folder.path}: starts at step 0"]
    if not folder.check(resume=resume, overwrite=False, auto_resume=auto_resume):
        return [f"{folder.path}: starts at step 0"]
    lines = [f"changed since the run began: {change}" for change in folder.changes(config)]
    checkpoint, method = newest_checkpoint(folder), method_of(config)
    _check_end(config, folder, checkpoint)
    if method in ON_TEXT and find_manifest(config.data) is None:
        lines.append(f"not compared with the run: {config.data.dir} is not prepared yet")
    else:
        data, origin = method.load(config), origin_of(config, resumes=True)
        check_identity(folder, checkpoint.state, run_identity(config, data.manifest, origin))
        if problem := lost_reference(config, folder, data, checkpoint.state):
            raise UserError(problem)
    return [*lines, f"resumes from {checkpoint.folder}"]


def _check_shared_folder(accelerator: Accelerator, run: RunFolder) -> None:
    """Raises RunFolderError on all processes if a sharded model's run folder is not seen by all of
    them.
    """
    if not is_sharded(accelerator):
        return  # the main process writes alone
    # the name of leftovers that RunFolder.lock removes
    name: list[str] = [f".{secrets.token_hex(6)}.partial"]
    broadcast_object_list(name, from_process=0)
    probe = run.path / name[0]
    if accelerator.is_main_process:
        with contextlib.suppress(OSError):  # such as a full disk, which the first write reports
            probe.touch()
    accelerator.wait_for_everyone()
    processes = gather_object([(socket.gethostname(), os.path.exists(probe))])
    if accelerator.is_main_process:
        probe.unlink(missing_ok=True)
    without = sorted({host for host, sees in processes if not sees})
    if without and any(sees for _, sees in processes):  # none sees it on a full disk
        raise RunFolderError(
            f"{run.path}: {', '.join(without)} does not see this folder, into which all processes "
            "of a sharded model write: name one in a file system that all machines mount (NFS, "
            "Lustre, ...) by --run-dir, or use accelerate_configs/multi_node_ddp.yaml, which needs "
            "none"
        )


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
    for stage in stages_of(config):
        with naming(stage):
            check_memory(stage.config, accelerator, data.vocab_size)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    else:
        choose_kernels(deterministic=is_deterministic(config, accelerator.device))
    return build_unchecked(config, accelerator, data, folder, checkpoint)


def start_again(run: Run) -> None:
    """Build the run again at its newest checkpoint, as after `--resume`: because layers are
    unfrozen or a stage begins at its step, or because the loss has spiked; then the data since it
    is skipped.
    """
    before, accelerator = run.state, run.accelerator
    if run.mesh.compiles:
        torch.compiler.reset()  # other shapes would share a graph, unlike those of a resumed run
    # two models at once need not fit
    run.model, run.optimizer = accelerator.free_memory(run.model, run.optimizer)
    accelerator.free_memory()  # again, since now nothing refers to them
    spiked = run.saved is None or run.saved.step < before.step
    checkpoint = find_checkpoint(accelerator, run.folder, before.identity)
    # update the same object, so that the caller of `train` has the new model
    vars(run).update(
        vars(build_unchecked(run.config, accelerator, run.data, run.folder, checkpoint))
    )
    for stage in stages_of(run.config):
        if stage.first == run.state.step and stage.changes:
            logger.info(f"{stage.name}, from step {stage.first + 1:,} on: {stage.changes}")
    run.state.seconds = before.seconds
    run.saved = dataclasses.replace(run.state)
    if spiked:
        run.state.skipped_steps = before.skipped_steps + before.step - run.state.step
        # best/ may be of a later step than the checkpoint
        run.state.best_loss, run.state.best_step = before.best_loss, before.best_step


def build_unchecked(
    config: Config,
    accelerator: Accelerator,
    data: PreparedData,
    folder: RunFolder | None,
    checkpoint: Checkpoint | None,
) -> Run:
    mesh, step = mesh_of(accelerator), checkpoint.state.step if checkpoint else 0
    config = config_at(config, step)
    if config.whole:
        blocks = load_prepared(config)
        data = dataclasses.replace(data, train=blocks.train, validation=blocks.validation)
        accelerator.gradient_accumulation_steps = accumulation_steps(config, mesh.dp_size)
    learned = learned_ids(config, data)
    model = start_model(config, data.vocab_size, data.end_of_text_id, step, learned)
    if model.device.type != "meta" and not config.lora.quantize:
        check_causal(model, packs=packs(config))
    if accelerator.device.type == "cpu" and accelerator.mixed_precision == "bf16":
        write_out_attention(model)
    if accelerator.mixed_precision == "fp8":
        multiply_in_fp8(model, mesh)
    # compiled blocks would be compiled again for all lengths of documents
    if packs(config) and not (accelerator.device.type == "cpu" and mesh.compiles):
        attend_apart(model)
    _record_end_ids(model, data.end_of_turn_id)
    if config.finetune.model:
        start = f"from step {step:,} on " if step else ""
        logger.info(f"{start}{describe_trainable(model, config)}")
    if mesh.pp_size > 1:
        Pipeline(model, accelerator)  # cuts this process's stage from the model
    else:
        split_model(model, accelerator)
    bare: Any = build_optimizer(model, config.optim, config.finetune.layer_decay, accelerator)
    with prepared_blocks(model, accelerator, bare):
        if mesh.pp_size > 1:
            prepared: Any = model
            optimizer: Any = accelerator.prepare_optimizer(bare, device_placement=False)
        else:
            prepared, optimizer = accelerator.prepare(model, bare)
            compress_gradients(prepared, accelerator)
    # FSDP2 replaces parameters; the whole ones would stay in memory
    bare.in_model_order = [p for p in prepared.parameters() if p.requires_grad]
    if config.train.gradient_groups:
        fix_order(prepared, optimizer.optimizer)
    prepared.train()
    run = Run(
        config=config,
        accelerator=accelerator,
        model=prepared,
        model_config=model.config,
        generation_config=model.generation_config,
        optimizer=optimizer,
        data=data,
        batches=build_batches(config, accelerator, data.train, config.train.min_micro_batch_size),
        objective=method_of(config).objective(config, data),
        state=TrainState(),
        run_folder=folder,
    )
    if config.train.micro_batch_size == "auto":
        choose_micro_batch(run, resume=checkpoint is not None)
    else:
        dry_run_step(run, config.train.micro_batch_size)
    if checkpoint:
        run.state = load_checkpoint(accelerator, prepared, optimizer, checkpoint)
    record_knobs(run.state, run.config)
    if checkpoint:
        run.saved = dataclasses.replace(run.state)
    return run


def _record_end_ids(model: PreTrainedModel, end_of_turn_id: int | None) -> None:
    """Put every token that ends a text into the config and the generation config, which are
    saved: those of chat models have not all of them.
    """
    own = model.config.eos_token_id
    first = own if isinstance(own, list) else [own]
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
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        trim_threshold, mmap_threshold = -1, -3  # malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)
