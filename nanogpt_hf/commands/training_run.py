"""What pretrain and finetune share: their options, and a run from getting ready to its last words."""

import argparse
import contextlib
import logging
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanogpt_hf.commands.console import show
from nanogpt_hf.commands.prepare import prepare_and_report
from nanogpt_hf.config.dial import dial_table
from nanogpt_hf.config.load import config_to_yaml, knob_lines
from nanogpt_hf.config.schema import Config
from nanogpt_hf.cpu import CpuTimes, allowed_cores, free_threads, stated_threads
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import DataError, NotEnoughMemoryError, UserError, is_out_of_memory

if TYPE_CHECKING:
    from nanogpt_hf.runs.folder import RunFolder
    from nanogpt_hf.runs.state import TrainState

logger = logging.getLogger(__name__)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run-dir", metavar="DIR", help="the run folder (default runs/<recipe name>)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the run folder")
    parser.add_argument("--overwrite", action="store_true", help="throw away the run that is in the run folder")
    parser.add_argument(
        "--auto-resume", action="store_true", help="--resume if there is a checkpoint, else start again"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and its size, and stop")
    parser.epilog = "Any knob of the recipe can be set by its name:\n\n" + "\n".join(knob_lines())


def add_depth(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--depth", metavar="N", help="size dial (--model.depth): N blocks, and all that follows from it for the recipe"
    )


def depth_override(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """`--depth N` as an override of the recipe."""
    return [] if arguments.depth is None else [("model.depth", arguments.depth)]


def dial_lines(config: Config) -> list[str]:
    """What the size dial chose and why, as lines; none if the recipe states its sizes."""
    return ["size dial:", *dial_table(config.dial), ""] if config.dial else []


def run_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `train` that the options of `add_run_arguments` state."""
    return {name: getattr(arguments, name) for name in ("run_dir", "resume", "overwrite", "auto_resume")}


def train(
    config: Config,
    run_dir: str | os.PathLike[str] | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    auto_resume: bool = False,
    check: Callable[[], None] = lambda: None,
) -> "RunFolder":
    """Prepare the data, train `config` into a run folder, by default runs/<its name>, and return the folder.

    On several processes each of them calls it. `check` is called on every process when its data is prepared, and may
    raise UserError. Raises UserError if recipe, data, folder and machine do not fit, and Stopped if a signal ended the
    run early, after saving.
    """
    start = CpuTimes.now()
    # The imports below take seconds; mistakes before and --help should not wait for them.
    from transformers.utils.logging import disable_progress_bar

    from nanogpt_hf.data.manifest import identity
    from nanogpt_hf.data.prepare import load_prepared
    from nanogpt_hf.distributed.accelerator import check_launch
    from nanogpt_hf.distributed.rendezvous import one_line_for_a_lost_process, prepare_on_all_ranks
    from nanogpt_hf.runs.folder import RunFolder
    from nanogpt_hf.training import loop

    busy_cores = start.cores_of_others(CpuTimes.now())
    disable_progress_bar()
    folder = RunFolder(run_dir or Path("runs") / config.name)
    main_process = Mesh.from_environment().is_main
    ours, data = folder.path.resolve(), Path(config.data.dir).resolve()
    if ours.is_relative_to(data) or data.is_relative_to(ours):
        raise UserError(
            f"--run-dir {folder.path} and --data.dir {config.data.dir} lie in each other; choose two folders"
        )
    check_launch(config)
    for line in dial_lines(config):
        logger.info(line)
    if auto_resume and (resume or overwrite):
        raise UserError("--auto-resume chooses between --resume and a new start; give it alone")

    with contextlib.ExitStack() as held:

        def get_ready() -> dict[str, Any]:
            facts = {}
            if main_process:  # the run folder is its business; the others might look when it has begun to write
                how = {"resume": resume, "overwrite": overwrite, "auto_resume": auto_resume}
                folder.check(**how)
                folder.lock()
                held.callback(folder.unlock)
                facts["resume"] = folder.check(**how)  # nobody else can write now
                if facts["resume"]:
                    for change in folder.changes(config):  # complains where it would be another experiment
                        logger.info(f"changed since the run began: {change}")
                if config.hub.push:
                    from nanogpt_hf.export.hub import check_login

                    if problem := check_login(config.hub.repo):
                        logger.warning(problem)
            prepare_and_report(config)
            check()
            return facts | identity(config, load_prepared(config).manifest)

        resume = prepare_on_all_ranks(get_ready)["resume"]
        if not resume:  # a resumed run keeps its number of threads
            leave_busy_cores(busy_cores)
        try:
            with one_line_for_a_lost_process(folder):
                state = loop.train(config, folder, resume=resume)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise NotEnoughMemoryError(out_of_memory(config)) from error
    if main_process:
        logger.info(_summary(config, folder, state))
    return folder


def leave_busy_cores(busy_cores: float) -> None:
    """Compute with no more CPU threads than other programs leave cores free, unless the user stated a number.

    Threads wait for each other at every operation: one that has to share its core stops all of them.
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
    """The last words of a run that is done: what it took, what it came to, and what to do next."""
    from nanogpt_hf.formatting import format_duration, format_number

    best = f"{format_number(state.best_loss, 4)} at step {state.best_step:,}" if state.best_loss is not None else "none"
    rate = f" ({state.tokens / state.seconds:,.0f} tokens/s, evaluations included)" if state.seconds else ""
    lines = [
        f"\ndone: {state.step:,} steps, {state.tokens:,} tokens in {format_duration(state.seconds)}{rate}",
        f"  best validation loss {best}",
        f"  model    {folder.best} (the best), {folder.final} (the last); {how_they_open(config)}",
        *(
            f"  {name:<8} {file}"
            for name, file in (("curve", folder.loss_plot), ("report", folder.report), ("metrics", folder.metrics))
            if file.is_file()  # a run of a few steps has no curve
        ),
    ]
    if state.step < config.train.max_steps:
        lines.insert(2, f"  stopped early: no better in {config.eval.patience} evaluations (eval.patience)")
    path = shlex.quote(str(folder.path))
    sample = f"chat {path}" if config.data.format == "chat" else f"sample {path} --prompt 'The '"
    return "\n".join([*lines, f"next: python cli.py {sample}"])


def how_they_open(config: Config) -> str:
    if config.lora.rank and not config.lora.merge:
        return "both open with peft's AutoPeftModelForCausalLM"
    return "both open as plain GPT-2"


def out_of_memory(config: Config) -> str:
    """What took the memory, and what would save some."""
    from nanogpt_hf.data.manifest import read_manifest
    from nanogpt_hf.training.micro_batch import out_of_memory_advice

    vocab_size = read_manifest(Path(config.data.dir)).vocab_size
    return out_of_memory_advice(config, vocab_size, os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))


def dry_run(config: Config) -> None:
    """Print what a run would be, as far as it can be known without its data."""
    from nanogpt_hf.data.manifest import read_manifest
    from nanogpt_hf.data.tokenizer import known_vocab_size
    from nanogpt_hf.model.architecture import count_parameters
    from nanogpt_hf.model.build import build_config

    show(config_to_yaml(config), end="")
    for line in ["", *dial_lines(config)]:
        show(line)
    try:
        vocab_size, source = known_vocab_size(config.data, read_manifest(Path(config.data.dir)))
        show(f"parameters: {count_parameters(build_config(config.model, vocab_size)):,}")
        show(f"vocabulary: {vocab_size:,} tokens, {source}")
    except DataError as error:
        show(f"parameters: not known before `prepare`: {error}")
    tokens = config.train.max_steps * config.train.tokens_per_step
    show(f"tokens per step: {config.train.tokens_per_step:,}; tokens in {config.train.max_steps:,} steps: {tokens:,}")
    show("nothing was started")
