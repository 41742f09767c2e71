"""Start a new run from a checkpoint of another, with its optimizer state and with other knobs: a
decay of the learning rate, another text or mixture, more steps. The other run is only read.

The new run folder gets the checkpoint and the metrics up to its step; the command that trains it is
printed. From that step on it sees what a run of its recipe would see.
"""

import argparse
from pathlib import Path

from nanogpt_hf.commands.arguments import add_option, list_knobs
from nanogpt_hf.commands.console import show
from nanogpt_hf.config.load import load_config
from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.find import find_run
from nanogpt_hf.runs.folder import RunFolder, step_of
from nanogpt_hf.runs.identity import is_fixed

# fixed while a run is resumed, and free for a branch
_FREE = ("data.", "train.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "run RUN", "a run folder")
    add_option(parser, "--at STEP", "a step with a checkpoint", type=int, required=True)
    add_option(parser, "--run-dir DIR", "the new run's folder", type=Path, required=True)
    list_knobs(parser)


def run(arguments: argparse.Namespace, overrides: list[tuple[str, str]]) -> None:
    old, new, step = find_run(arguments.run), RunFolder(arguments.run_dir), arguments.at
    config = load_config(old.recipe, overrides)
    changes = old.differences(config)
    if other := [line for line in changes if is_fixed(line) and not line.startswith(_FREE)]:
        raise UserError(
            f"{old.path}: a branch keeps the model and the kind of training: {'; '.join(other)}"
        )
    begun = {key for stage in config.train.stages or () if stage["at"] <= step for key in stage}
    begun |= {"data.source"} if "weights" in begun else set()
    if hidden := [line for line in changes if line.partition(":")[0] in begun]:
        raise UserError(
            f"--{hidden[0]}: a stage has set it before step {step}; change it in --train.stages"
        )
    if new.path.resolve().is_relative_to(old.path.resolve()):
        raise UserError(f"--run-dir {new.path}: is inside {old.path}; choose another")
    kept = [step_of(folder) for folder in old.checkpoint_folders()]
    if step not in kept:
        raise UserError(
            f"--at {step}: {old.path} has checkpoints of the steps {', '.join(map(str, kept))}"
        )
    if step >= config.train.max_steps:
        raise UserError(f"--train.max_steps {config.train.max_steps}: is not past step {step}")

    from nanogpt_hf.training.branch import make_branch

    make_branch(old, step, new, config)
    for change in changes:
        show(f"changed: {change}")
    command = "finetune" if config.finetune.model else "pretrain"
    show(f"{new.path}: a branch of {old.path} at step {step:,}; train it with")
    show(f"  python cli.py {command} {new.recipe} --run-dir {new.path} --resume")
