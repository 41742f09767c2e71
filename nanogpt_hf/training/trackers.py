"""Start accelerate's trackers (wandb, tensorboard, ...), or continue their runs when a run is
resumed.
"""

import json
import logging
import os
import secrets
import sys
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.files import written_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.redact import redact, redact_tree

logger = logging.getLogger(__name__)

# To continue a tracker's own run: the option that names it, and how to read its value from a
# started run. tensorboard's run is its folder. Trackers that are not here start a new run at a
# resume.
_RUN_ID: dict[str, tuple[str, Callable[[Any], str]]] = {
    "wandb": ("id", lambda run: run.id),
    "trackio": ("name", lambda run: run.name),
    "aim": ("run_hash", lambda run: run.hash),
    "mlflow": ("run_id", lambda run: run.info.run_id),
}


def start_trackers(
    accelerator: Accelerator, config: Config, run: RunFolder, start: dict[str, Any]
) -> None:
    """Start the recipe's trackers, with the resolved recipe and `start` (see provenance.py) as
    their configuration.

    The ids of their runs are stored in the run folder, so that a resumed run continues them;
    steps after `start["step"]` are logged again. Only the main process calls it. Raises
    UserError if a tracker does not start; a new run folder is then removed.
    """
    ids_file = run.trackers / "runs.json"
    ids = json.loads(ids_file.read_text(encoding="utf-8")) if ids_file.exists() else {}
    try:
        options = {
            name: _options(name, config, run, start["step"]) for name in config.tracking.trackers
        }
        for name, value in ids.items():
            options.setdefault(name, {})[_RUN_ID[name][0]] = value
        accelerator.init_trackers(config.tracking.project, init_kwargs=options)
        for tracker in accelerator.trackers:
            # it refuses to change a value
            if not (tracker.name == "mlflow" and tracker.name in ids):
                tracker.store_init_configuration(_configuration(config, start))
    except Exception as error:  # trackers raise errors of any kind
        names = [str(getattr(t, "name", t)).lower() for t in accelerator.log_with]
        if not run.checkpoint_folders():
            run.undo_start()
        reason = " ".join(str(error).split())
        raise UserError(
            f"tracking.trackers: {', '.join(names)} did not start "
            f"({type(error).__name__}: {reason}); repair that, or leave it out"
        ) from error
    ids |= {
        t.name: _RUN_ID[t.name][1](t.tracker) for t in accelerator.trackers if t.name in _RUN_ID
    }
    run.trackers.mkdir(exist_ok=True)
    with written_whole(ids_file) as partial:
        partial.write_text(json.dumps(ids) + "\n", encoding="utf-8")


def _options(name: str, config: Config, run: RunFolder, step: int) -> dict[str, Any]:
    """The options with which a tracker starts a run of its own."""
    if name == "wandb":
        return _wandb_options(config, run)
    if name == "trackio":  # its runs are identified by name only
        return {"name": f"{config.name}-{secrets.token_hex(4)}", "resume": "allow"}
    if name == "mlflow":
        return {"run_name": config.name}
    return {"purge_step": step + 1} if name == "tensorboard" else {}


def _configuration(config: Config, start: dict[str, Any]) -> dict[str, Any]:
    """The knobs by dotted name, and the values of `start` as `start.<name>`; secrets redacted."""
    values = {key: get_value(config, key) for key in KNOBS}
    values |= {f"start.{name}": value for name, value in start.items() if name != "versions"}
    values |= {f"start.versions.{name}": value for name, value in start["versions"].items()}
    return {
        name: _as_scalar(redact_tree(value)) for name, value in values.items() if value is not None
    }


def _as_scalar(value: Any) -> Any:
    """Lists and mappings as text: TensorBoard accepts nothing else."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return json.dumps(value) if isinstance(value, list | dict) else value


def _wandb_options(config: Config, run: RunFolder) -> dict[str, Any]:
    import wandb

    options: dict[str, Any] = {"name": config.name, "dir": str(run.path), "resume": "allow"}
    if any(redact(word) != word for word in sys.argv):
        # it would store the command line, with the password of a URL in it
        options["settings"] = wandb.Settings(x_disable_meta=True)
    if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False):
        options["mode"] = "offline"
        logger.warning(
            "wandb: no login found, so the run is stored offline; `wandb sync` uploads it later"
        )
    return options
