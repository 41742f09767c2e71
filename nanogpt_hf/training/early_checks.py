"""Checks of a run before its data is prepared: its folders, and its model."""

import os
from pathlib import Path

from nanogpt_hf.config.schema import Config
from nanogpt_hf.config.sources import sources_of
from nanogpt_hf.config.stages import naming, stages_of
from nanogpt_hf.errors import UserError
from nanogpt_hf.model.build import build_config
from nanogpt_hf.model.checks import check_balance
from nanogpt_hf.runs.folder import RunFolder


def check_folders(config: Config, folder: RunFolder) -> None:
    """Raises UserError if the run folder and prepared data or the teacher are inside each other, or
    the model to start from is in the run folder.
    """
    dirs = [config.data.dir, *(source.data.dir for source in sources_of(config.data))]
    others = [("data.dir", path) for path in dirs]
    if config.distill.teacher:
        others.append(("distill.teacher", config.distill.teacher))
    # Resolved, since one of them may be a link into the other. Path.resolve refuses a link to
    # itself, without the knob.
    run = Path(os.path.realpath(folder.path))
    for knob, path in others:
        other = Path(os.path.realpath(os.path.expanduser(path)))
        if run.is_relative_to(other) or other.is_relative_to(run):
            raise UserError(
                f"--run-dir {folder.path} and --{knob} {path}: one is inside the other; choose two "
                "separate folders"
            )
    # A run that starts removes the models that are in its folder.
    if start := config.finetune.model:
        model = os.path.expanduser(start)
        # Not a name on the Hub.
        if os.path.exists(model) and Path(os.path.realpath(model)).is_relative_to(run):
            raise UserError(
                f"--run-dir {folder.path}: finetune.model {start} is inside it; choose another "
                "folder"
            )


def check_before_the_data(config: Config, folder: RunFolder) -> None:
    """Raises UserError for what is wrong without data and machine: folders, section `model`, and a
    balance loss that the model has not.
    """
    check_folders(config, folder)
    if config.finetune.model is not None:
        # Its files say what it is.
        return
    model_config = build_config(config.model, vocab_size=256)
    for stage in stages_of(config):
        with naming(stage):
            check_balance(stage.config, model_config)
