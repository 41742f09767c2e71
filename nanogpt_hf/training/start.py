"""Start a run: check folder and machine, prepare the data, train, and summarize the result."""

import contextlib
import logging
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_hf.config.dial import dial_lines
from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.sources import has_conversations, sources_of
from nanogpt_hf.cpu import CpuTimes, allowed_cores, free_threads, stated_threads
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import NotEnoughMemoryError, UserError, is_out_of_memory
from nanogpt_hf.formatting import format_duration

if TYPE_CHECKING:
    from nanogpt_hf.data.manifest import Manifest
    from nanogpt_hf.data.prepared import PreparedData
    from nanogpt_hf.runs.folder import RunFolder
    from nanogpt_hf.runs.state import TrainState

logger = logging.getLogger(__name__)


def train(
    config: Config,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    auto_resume: bool = False,
    check: Callable[["Manifest"], None] = lambda manifest: None,
) -> "RunFolder":
    """Prepare the data, train `config` into a run folder, by default runs/<its name>, and return the folder.

    With several processes, each of them calls it. `check` is called on every process with the manifest of its data, and
    may raise UserError. Raises UserError if recipe, data, folder and machine do not fit, and Stopped if a signal ended
    the run early, after saving.
    """
    start = CpuTimes.now()
    # These imports take seconds, in which the load by other programs is measured.
    from transformers.utils.logging import disable_progress_bar

    from nanogpt_hf.data.manifest import identity
    from nanogpt_hf.data.prepare import prepare
    from nanogpt_hf.data.prepared import load_prepared
    from nanogpt_hf.data.summary import repetition_warnings, summary_lines
    from nanogpt_hf.distributed.accelerate_config import check_launch
    from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process, prepare_on_all_ranks
    from nanogpt_hf.model.build import build_config
    from nanogpt_hf.rl.data import load_questions, questions_line
    from nanogpt_hf.runs.folder import RunFolder
    from nanogpt_hf.training import loop

    busy_cores = start.cores_of_others(CpuTimes.now())
    disable_progress_bar()
    folder = RunFolder(Path(run_dir or Path("runs") / config.name))
    for data_folder in (config.data.dir, *(source.data.dir for source in sources_of(config.data))):
        _check_separate(folder.path, Path(data_folder))
    check_launch(config)
    main_process = Mesh.from_environment().is_main
    if config.finetune.model is None:
        build_config(config.model, vocab_size=256)  # raises for a wrong section `model` before the data is prepared
    for line in dial_lines(config):
        logger.info(line)
    if auto_resume and (resume or overwrite):
        raise UserError("--auto-resume chooses between --resume and a new start; give it alone")

    def prepare_run() -> tuple["PreparedData", dict[str, Any]]:
        decision = {}
        if main_process:  # it alone decides: other processes might look after it has begun to write
            options = {"resume": resume, "overwrite": overwrite, "auto_resume": auto_resume}
            folder.check(**options)
            folder.lock()
            decision["resumes"] = folder.check(**options)  # again, since from now on no other run can write
            if decision["resumes"]:
                for change in folder.changes(config):  # raises if the recipe describes another experiment
                    logger.info(f"changed since the run began: {change}")
            if config.hub.push:
                _warn_if_not_logged_in(config)
        if config.rl.task:
            data = load_questions(config)
            logger.info(questions_line(data))
            return data, decision | identity(config, data.manifest)
        manifest, prepared_now = prepare(config)
        logger.info(f"{config.data.dir}: {'prepared' if prepared_now else 'is prepared already'}")
        data = load_prepared(config)
        for line in summary_lines(config, manifest, data):
            logger.info(line)
        for line in repetition_warnings(config, data):
            logger.warning(line)
        check(manifest)
        return data, decision | identity(config, manifest)

    try:
        data, facts = prepare_on_all_ranks(prepare_run)
        if not facts["resumes"]:  # a resumed run keeps its number of threads
            leave_busy_cores(busy_cores)
        with one_line_for_a_lost_process(folder), _advise_on_memory(config):
            state = loop.train(config, folder, data, resume=facts["resumes"])
    finally:
        folder.unlock()
    if main_process:
        logger.info(_summary(config, folder, state))
    return folder


def _check_separate(run: Path, data: Path) -> None:
    """Raises UserError if one of the folders is inside the other."""
    if run.resolve().is_relative_to(data.resolve()) or data.resolve().is_relative_to(run.resolve()):
        raise UserError(f"--run-dir {run} and --data.dir {data}: one is inside the other; choose two separate folders")


def _warn_if_not_logged_in(config: Config) -> None:
    from nanogpt_hf.export.hub import check_login

    if config.hub.repo and (problem := check_login(config.hub.repo)):
        logger.warning(problem)


@contextlib.contextmanager
def _advise_on_memory(config: Config) -> Iterator[None]:
    """Turn an out-of-memory error into one line: what needs the memory, and knobs that reduce it."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        from nanogpt_hf.data.mixed_manifest import find_manifest
        from nanogpt_hf.distributed.accelerate_config import requested_precision
        from nanogpt_hf.training.micro_batch import memory_advice

        manifest = find_manifest(config.data)
        if manifest is None:
            raise
        advice = memory_advice(config, manifest.vocab_size, requested_precision())
        raise NotEnoughMemoryError(f"out of memory: {advice}") from error


def leave_busy_cores(busy_cores: float) -> None:
    """Use no more CPU threads than other programs leave cores free, unless the user stated a number.

    Threads wait for each other at every operation: one that shares its core with another program stops all of them.
    """
    import torch

    local_world_size = Mesh.from_environment().local_world_size
    if stated_threads(local_world_size) is not None:
        return
    default = torch.get_num_threads()
    threads = free_threads(busy_cores, default, local_world_size)
    if threads < default:
        torch.set_num_threads(threads)
        logger.info(
            f"other programs use {busy_cores:.1f} of {allowed_cores()} CPU cores: CPU threads {default} -> {threads} "
            "(OMP_NUM_THREADS sets another number)"
        )


def _summary(config: Config, folder: "RunFolder", state: "TrainState") -> str:
    """The last lines of a finished run: steps and time, best loss, files, and the next command."""
    from nanogpt_hf.model.architecture import architecture_of_recipe
    from nanogpt_hf.training.evaluate import describe_best

    best = "no evaluation was the best"
    if state.best_loss is not None:
        best = f"{describe_best(config, state.best_loss)} at step {state.best_step:,}"
    rate = f" ({state.tokens / state.seconds:,.0f} tokens/s, evaluations included)" if state.seconds else ""
    lines = [
        f"\ndone: {state.step:,} steps, {state.tokens:,} tokens in {format_duration(state.seconds)}{rate}",
        f"  {best}",
    ]
    if state.step < config.train.max_steps:
        lines.append(f"  stopped early: no better in {config.eval.patience} evaluations (eval.patience)")
    title = architecture_of_recipe(config.model).title
    opens_as = "with peft's AutoPeftModelForCausalLM" if _is_adapter(config) else f"as plain {title}"
    models = {"best": folder.best, "last": folder.final}
    named = [f"{path} (the {which})" for which, path in models.items() if path.is_dir()]
    lines.append(f"  model    {', '.join(named)}; each opens {opens_as}")
    files = {"curve": folder.loss_plot, "report": folder.report, "metrics": folder.metrics}
    lines += [f"  {name:<8} {file}" for name, file in files.items() if file.is_file()]  # a short run has no curve
    path = shlex.quote(str(folder.path))
    command = f"chat {path}" if has_conversations(config.data) or config.rl.task else f"sample {path} --prompt 'The '"
    return "\n".join([*lines, f"next: python cli.py {command}"])


def _is_adapter(config: Config) -> bool:
    return config.lora.rank is not None and not config.lora.merge
