"""Prepare a run: check folder, recipe and machine, prepare the data, and build the run."""

import logging
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import broadcast_object_list, gather_object
from transformers.utils.logging import disable_progress_bar

from nanogpt_hf.checkpoint.reader import find_checkpoint
from nanogpt_hf.config.compatibility import check_settings
from nanogpt_hf.config.dial import dial_lines
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.settings import Setting
from nanogpt_hf.config.sources import knob_text
from nanogpt_hf.config.stages import naming, stages_of
from nanogpt_hf.cpu import share_threads
from nanogpt_hf.data.manifest import identity
from nanogpt_hf.data.prepared import PreparedData, load_prepared
from nanogpt_hf.distributed.accelerate_config import check_launch, keep_compiler, settled
from nanogpt_hf.distributed.accelerator import build_accelerator, is_deterministic, precision_of
from nanogpt_hf.distributed.mesh import Mesh, mesh_of
from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process, prepare_on_all_ranks
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.export.login import check_login
from nanogpt_hf.methods.reference import raise_on_all_ranks
from nanogpt_hf.methods.run import Run
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.runs.folder import RunFolder, run_folder
from nanogpt_hf.runs.origin import needed_at_resume, origin_of
from nanogpt_hf.runs.provenance import continue_on, last_start
from nanogpt_hf.runs.state import run_identity
from nanogpt_hf.training.build import build_run
from nanogpt_hf.training.early_checks import check_before_the_data
from nanogpt_hf.training.epochs import with_steps_of_epochs
from nanogpt_hf.training.micro_batch import one_line_for_too_little_memory
from nanogpt_hf.training.resume import (
    change_lines,
    check_end,
    decide,
    remedies_of_run,
    with_recorded_steps,
)

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
    folder = run_folder(config.name, run_dir)
    may_resume = resume or auto_resume
    if may_resume and folder.checkpoint_folders():
        mesh = keep_compiler(mesh, last_start(folder))
    launch = check_launch(config, mesh)
    check_before_the_data(config, folder)
    for line in dial_lines(config):
        # The folder may be refused.
        logger.info(line, extra={"is_notice": True})
    method = method_of(config)
    # --resume and --overwrite exclude each other by a rule, as knobs do.
    options = {"resume": resume, "overwrite": overwrite, "auto_resume": auto_resume}
    flags = [f"--{name.replace('_', '-')}" for name, is_given in options.items() if is_given]
    check_settings({Setting(flag): flag for flag in flags})

    def prepare() -> tuple[PreparedData, dict[str, Any]]:
        # Only the main process decides: until another looks, it may have begun to write.
        decision = _lock(config, folder, options) if mesh.is_main else {}
        with remedies_of_run(folder, config) if may_resume else nullcontext():
            data = method.load(config)
        for stage in stages_of(config)[1:]:
            with naming(stage):
                # It raises if the stage's blocks are too long for the text.
                load_prepared(stage.config)
        # One process per machine reads what the run starts from, as for a start: others do not
        # know whether it resumes.
        if mesh.is_main or not mesh.local_rank:
            decision["origin"] = origin_of(config, resumes=False)
        return data, decision | identity(config, data.manifest)

    try:
        # 1. Each process prepares or opens the data; all must have found the same.
        data, facts = prepare_on_all_ranks(mesh, prepare)
        known = with_steps_of_epochs(config, data)
        if known is not config:
            # The number of steps decides whether a run is compiled.
            launch = replace(launch, mesh=settled(mesh, known))
        with (
            one_line_for_a_lost_process(folder),
            one_line_for_too_little_memory(known, data.vocab_size, launch.mesh),
        ):
            # 2. From here on processes know each other.
            accelerator = build_accelerator(launch, folder, trackers)
            # 3. Model and optimizer, with the weights of a checkpoint if the run resumes.
            run = _start_or_resume(known, accelerator, folder, data, facts)
    except BaseException:
        folder.unlock()
        raise
    key = config.train.steps_from
    # A resume counts epochs again, and times nothing.
    if key == "train.epochs" or (key and not facts["resumes"]):
        run.steps_from = f"{key} {knob_text(config, key)}"
    return run


def _lock(config: Config, folder: RunFolder, options: dict[str, bool]) -> dict[str, Any]:
    """Lock the run folder, and decide whether the run resumes. Only the main process calls it."""
    folder.lock()
    decision = decide(config, folder, options)
    if config.hub.push and config.hub.repo and (problem := check_login(config.hub.repo)):
        logger.warning(problem)
    return decision


def _start_or_resume(
    config: Config,
    accelerator: Accelerator,
    folder: RunFolder,
    data: PreparedData,
    facts: dict[str, Any],
) -> Run:
    """Build the run. Raises UserError, and writes nothing, if it cannot be started or resumed."""
    _check_shared_folder(accelerator, folder)
    origin = facts["origin"]
    if facts["resumes"]:
        config = with_recorded_steps(config, facts.get("max_steps"))
        origin = needed_at_resume(config, origin)
    run_facts = run_identity(config, data.manifest, origin)
    checkpoint = None
    # Before a model is built, since the number of threads decides the last bits of its sums.
    processes = mesh_of(accelerator).local_world_size
    share_threads(processes)
    if facts["resumes"]:
        continue_on(
            last_start(folder),
            accelerator.device,
            processes,
            precision_of(accelerator),
            mesh_of(accelerator).compiler,
        )
        if not is_deterministic(config, accelerator.device):
            logger.info(
                "losses will agree with an uninterrupted run to rounding, not bit for bit: "
                "train.deterministic is not set"
            )
        checkpoint = find_checkpoint(accelerator, folder, run_facts)
        check_end(config, folder, checkpoint)
        is_main = accelerator.is_main_process
        if is_main:
            # Only now: steps that follow from the data are known, and with them a warm-up.
            for line in change_lines(folder, config, checkpoint.state.step):
                logger.info(line)
        resume_problem = method_of(config).resume_problem
        problem = resume_problem(config, folder, data, checkpoint.state) if is_main else None
        raise_on_all_ranks(problem)
        # This start may not have read all files again; what it has read must be the same.
        known = (checkpoint.state.identity or {}).get("origin", {})
        run_facts["origin"] = known | run_facts["origin"]
    run = build_run(config, accelerator, data, folder, checkpoint)
    run.state.identity = run_facts
    return run


def _check_shared_folder(accelerator: Accelerator, run: RunFolder) -> None:
    """Raises RunFolderError on all processes if a sharded model's run folder is not seen by all of
    them.
    """
    if not mesh_of(accelerator).is_sharded:
        # The main process writes alone.
        return
    # RunFolder.lock removes files of such a name, if a kill leaves this one.
    name: list[str] = [f".{secrets.token_hex(6)}.partial"]
    broadcast_object_list(name, from_process=0)
    probe = run.path / name[0]
    if accelerator.is_main_process:
        # Such as a full disk, which the first write reports.
        with suppress(OSError):
            probe.touch()
    accelerator.wait_for_everyone()
    processes = gather_object([(socket.gethostname(), os.path.exists(probe))])
    if accelerator.is_main_process:
        probe.unlink(missing_ok=True)
    without = sorted({host for host, sees in processes if not sees})
    # If no process sees the file, the disk is full.
    if without and any(sees for _, sees in processes):
        raise RunFolderError(
            f"{run.path}: {', '.join(without)} does not see this folder, into which all processes "
            "of a sharded model write: name one in a file system that all machines mount (NFS, "
            "Lustre, ...) by --run-dir, or use accelerate_configs/multi_node_ddp.yaml, which needs "
            "none"
        )
