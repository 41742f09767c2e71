"""Find the run or the model that a name on the command line means."""

import os
import shlex
from pathlib import Path

from nanogpt_hf.config.names import folder_or_hub_id
from nanogpt_hf.errors import RunFolderError, did_you_mean
from nanogpt_hf.place import dead_link
from nanogpt_hf.program import program
from nanogpt_hf.runs.folder import RunFolder, step_of
from nanogpt_hf.runs.recipe import read_recipe


def find_run(name: str) -> RunFolder:
    """Return the run folder of that name.

    Raises RunFolderError, with the nearest run's folder, if there is none.
    """
    run = RunFolder(name)
    if run.recipe.is_file():
        return run
    if run.checkpoint_folders():
        read_recipe(run)
    if run.path.exists():
        # Such as best/ or a checkpoint of a run.
        around = [path for path in map(RunFolder, run.path.parents) if path.recipe.is_file()]
        inside = [path for path in around if path.checkpoints.is_dir()]
        wrote = "a folder that `pretrain` or `finetune` wrote, as runs/NAME"
        raise RunFolderError(f"{name}: holds no run; give {inside[0].path if inside else wrote}")
    if problem := dead_link(run.path):
        raise RunFolderError(f"{problem}, or name another folder")
    # Near names are looked for beside the folder, and where runs are by default.
    recipes = (*run.path.parent.glob("*/recipe.yaml"), *Path("runs").glob("*/recipe.yaml"))
    near = did_you_mean(run.path.name, {recipe.parent.name for recipe in recipes})
    raise RunFolderError(f"{name}: no such run folder{near}")


def find_checkpoint(name: str, step: int, option: str) -> tuple[RunFolder, Path]:
    """Return the run folder of that name and its checkpoint of `step`, which `option` asks for.

    Raises RunFolderError, with the steps that there are, if there is none.
    """
    try:
        run = find_run(name)
    except RunFolderError as error:
        raise RunFolderError(f"{option} {step}: {error}") from None
    kept = [step_of(folder) for folder in run.checkpoint_folders()]
    if step in kept:
        return run, run.checkpoint(step)
    has = f"checkpoints of the steps {', '.join(map(str, kept))}" if kept else "no checkpoint"
    section = read_recipe(run).checkpoint
    raise RunFolderError(
        f"{option} {step}: {run.path} has {has}; a run keeps more of them with another "
        f"checkpoint.keep ({section.keep} here) and checkpoint.every ({section.every})"
    )


def find_model(name: str) -> str:
    """Return the model folder that MODEL means: a run folder's best/ (else final/), any other
    folder or Hub id as it is.

    Raises RunFolderError for a run folder without a model and for a checkpoint, and UserError for
    a path that does not exist.
    """
    name = os.path.expanduser(name)
    run = RunFolder(name)
    of_checkpoint = RunFolder(run.path.parent.parent)
    if run.path in of_checkpoint.checkpoint_folders():
        raise RunFolderError(
            f"{name}: a checkpoint, from which a run continues; it holds no model: give "
            f"{of_checkpoint.path}, whose best model is taken, or its best/ or final/, or export "
            f"the model of this step: {program()} export {shlex.quote(str(of_checkpoint.path))} "
            f"OUT --step {step_of(run.path)}"
        )
    if not run.recipe.is_file() and not run.checkpoint_folders():
        return folder_or_hub_id(name)
    # The best model is of an earlier step than the last one, or the same.
    for folder in (run.best, run.final):
        if folder.is_dir():
            return str(folder)
    raise RunFolderError(f"{name}: this run has no model yet; its first evaluation writes one")
