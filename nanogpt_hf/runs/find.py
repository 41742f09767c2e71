"""Find the run or model that a name on the command line means."""

import os
from pathlib import Path

from nanogpt_hf.config.names import folder_or_hub_id
from nanogpt_hf.errors import RunFolderError, did_you_mean
from nanogpt_hf.runs.folder import RunFolder


def find_run(name: str) -> RunFolder:
    """The run folder of that name.

    Raises RunFolderError, with the nearest run's folder, if there is none.
    """
    run = RunFolder(name)
    if run.recipe.is_file() or run.metrics.is_file():
        return run
    if run.path.is_dir():
        raise RunFolderError(
            f"{name}: holds no run; give a folder that `pretrain` or `finetune` wrote, as runs/NAME"
        )
    recipes = (*run.path.parent.glob("*/recipe.yaml"), *Path("runs").glob("*/recipe.yaml"))
    near = did_you_mean(run.path.name, {recipe.parent.name for recipe in recipes})
    raise RunFolderError(f"{name}: no such run folder{near}")


def find_model(name: str, on_hub: bool = True) -> str:
    """The model folder that MODEL means: a run folder's best/ (else final/), any other folder or
    Hub id as it is.

    Raises RunFolderError for a run folder without a model, and UserError for a path that does
    not exist. With `on_hub` False a name always means a folder, and the caller checks whether it
    exists.
    """
    name = os.path.expanduser(name)
    run = RunFolder(name)
    if not run.recipe.is_file():
        return folder_or_hub_id(name) if on_hub else str(run.path)
    for folder in (run.best, run.final):
        if folder.is_dir():
            return str(folder)
    raise RunFolderError(f"{name}: this run has no model yet; its first evaluation writes one")
