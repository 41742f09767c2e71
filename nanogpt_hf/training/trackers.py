"""accelerate's trackers: what they are told of a run when it starts, and that a resumed run goes on in the same one."""

import json
import logging
import os
import secrets
import sys
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from nanogpt_hf.config.load import config_to_dict
from nanogpt_hf.config.schema import Config
from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.redact import redact, redact_tree

logger = logging.getLogger(__name__)

# How a tracker is told which of its runs to go on with: the option, and where a run that was started has its value.
# tensorboard's run is its folder. Those that are not here begin a new run at a resume.
_RUN_ID: dict[str, tuple[str, Callable[[Any], str]]] = {
    "wandb": ("id", lambda run: run.id),
    "trackio": ("name", lambda run: run.name),
    "aim": ("run_hash", lambda run: run.hash),
    "mlflow": ("run_id", lambda run: run.info.run_id),
}


def start_trackers(accelerator: Accelerator, config: Config, run: RunFolder, start: dict[str, Any]) -> None:
    """Start the recipe's trackers, with the resolved recipe and `start` (see provenance.py) as their configuration.

    Which runs of theirs they are is kept in the run folder: where it says, they go on, and steps that were logged
    beyond `start["step"]` are done again. Only the main process calls it. Raises UserError where one does not start; a
    run that had not begun then leaves nothing behind.
    """
    kept = run.trackers / "runs.json"
    ids = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    try:
        options = {name: _options(name, config, run, start["step"]) for name in config.tracking.trackers}
        for name, value in ids.items():
            options.setdefault(name, {})[_RUN_ID[name][0]] = value
        accelerator.init_trackers(config.tracking.project, init_kwargs=options)
        for tracker in accelerator.trackers:
            if not (tracker.name == "mlflow" and tracker.name in ids):  # it takes no other value for what it has got
                tracker.store_init_configuration(_configuration(config, start))
    except Exception as error:  # whatever theirs may raise
        if not run.checkpoint_folders():
            run.undo_start()
        why = " ".join(str(error).split())
        raise UserError(
            f"tracking.trackers: {', '.join(config.tracking.trackers)} did not start ({type(error).__name__}: {why}); "
            "see to that, or leave it out"
        ) from error
    ids |= {t.name: _RUN_ID[t.name][1](t.tracker) for t in accelerator.trackers if t.name in _RUN_ID}
    run.trackers.mkdir(exist_ok=True)
    with written_whole(kept) as partial:
        partial.write_text(json.dumps(ids) + "\n", encoding="utf-8")


def _options(name: str, config: Config, run: RunFolder, step: int) -> dict[str, Any]:
    """What a tracker is started with where it begins a run."""
    if name == "wandb":
        return _wandb_options(config, run)
    if name == "trackio":  # the name is all that tells its runs apart
        return {"name": f"{config.name}-{secrets.token_hex(4)}", "resume": "allow"}
    if name == "mlflow":
        return {"run_name": config.name}
    return {"purge_step": step + 1} if name == "tensorboard" else {}


def _configuration(config: Config, start: dict[str, Any]) -> dict[str, Any]:
    """The knobs by their dotted names, and the start's facts as `start.<fact>`; nothing that must not leave here."""
    sections = {**config_to_dict(config), "start": {k: v for k, v in start.items() if k != "versions"}}
    sections["start"] |= {f"versions.{name}": version for name, version in start["versions"].items()}
    flat = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    shown = {name: redact_tree(value) for name, value in flat.items() if value is not None}
    return {name: ", ".join(value) if isinstance(value, list) else value for name, value in shown.items()}


def _wandb_options(config: Config, run: RunFolder) -> dict[str, Any]:
    import wandb

    options = {"name": config.name, "dir": str(run.path), "resume": "allow"}
    if any(redact(word) != word for word in sys.argv):
        # it would write down the command line as it is, with the password of a URL in it
        options["settings"] = wandb.Settings(x_disable_meta=True)
    if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False):
        options["mode"] = "offline"
        logger.warning("wandb: no login found, so the run is kept offline; `wandb sync` sends it later")
    return options
