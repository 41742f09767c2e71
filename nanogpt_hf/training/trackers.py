"""Trackers of accelerate (wandb, tensorboard, ...): start them, continue their runs at a resume."""

import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from nanogpt_hf.config.schema import knob_values
from nanogpt_hf.errors import DamagedFileError, UserError, one_line
from nanogpt_hf.methods.run import Run
from nanogpt_hf.own_files import read_json, warn_once
from nanogpt_hf.runs.files import redact, write_whole

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


def start_trackers(run: Run, start: dict[str, Any]) -> None:
    """Start the recipe's trackers, with the resolved recipe and `start` (see provenance.py) as
    their configuration, secrets redacted.

    The ids of their runs are stored in the run folder, so that a resumed run continues them;
    steps after `start["step"]` are logged again. Only the main process calls it. Raises
    UserError if a tracker does not start; a new run folder is then removed.
    """
    accelerator = run.accelerator
    config = run.config.recipe
    folder = run.folder
    ids_file = folder.trackers / "runs.json"
    ids = _read_ids(ids_file)
    values = knob_values(config)
    values |= {f"start.{name}": value for name, value in start.items()}
    # Trackers may upload it: passwords in URLs and tokens are replaced.
    values = json.loads(redact(json.dumps(values, ensure_ascii=False)))
    values = {name: _as_scalar(value) for name, value in values.items() if value is not None}
    try:
        options: dict[str, dict[str, Any]] = {
            name: _tracker_options(run, name, start["step"]) for name in config.tracking.trackers
        }
        for name, value in ids.items():
            options.setdefault(name, {})[_RUN_ID[name][0]] = value
        hook: Any = threading.excepthook
        if getattr(hook, "func", None) is not _leave_out_raised_again:
            threading.excepthook = partial(_leave_out_raised_again, hook)
        accelerator.init_trackers(config.tracking.project, init_kwargs=options)
        for tracker in accelerator.trackers:
            # mlflow refuses to change a value of a run that continues.
            if not (tracker.name == "mlflow" and tracker.name in ids):
                tracker.store_init_configuration(values)
    # Trackers raise errors of any kind.
    except Exception as error:
        names = [str(getattr(t, "name", t)).lower() for t in accelerator.log_with]
        if not folder.checkpoint_folders():
            folder.undo_start()
        reason = " ".join(str(error).split())
        raise UserError(
            f"tracking.trackers: {', '.join(names)} did not start "
            f"({type(error).__name__}: {reason}); repair that, or leave it out"
        ) from error
    ids |= {
        t.name: _RUN_ID[t.name][1](t.tracker) for t in accelerator.trackers if t.name in _RUN_ID
    }
    folder.trackers.mkdir(exist_ok=True)
    write_whole(ids_file, json.dumps(ids) + "\n")


def _leave_out_raised_again(
    hook: Callable[[threading.ExceptHookArgs], Any], thrown: threading.ExceptHookArgs
) -> None:
    """Hand the error of a thread to `hook`, unless the thread keeps it for the main thread, which
    raises it again: TensorBoard's does.
    """
    if not thrown.exc_value or thrown.exc_value is not getattr(thrown.thread, "exception", None):
        hook(thrown)


def _read_ids(path: Path) -> dict[str, str]:
    """Read the ids of the trackers' runs, by tracker; {} with a warning if they are damaged."""
    try:
        ids = read_json(path, dict[str, str]) if path.exists() else {}
    except DamagedFileError as error:
        warn_once(f"{error}; the trackers start new runs")
        return {}
    return {name: value for name, value in ids.items() if name in _RUN_ID}


def _as_scalar(value: Any) -> Any:
    """Turn lists and mappings into text: TensorBoard accepts nothing else."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def _tracker_options(run: Run, name: str, step: int) -> dict[str, Any]:
    """Choose the options with which a tracker starts a run of its own."""
    # The folder's name, not the recipe's: the runs of a sweep have one recipe.
    title = run.folder.path.resolve().name
    if name == "trackio":
        # Its runs are identified by their names, so another run must not have the same.
        return {"name": f"{title}-{secrets.token_hex(4)}", "resume": "allow"}
    if name != "wandb":
        known = {"mlflow": {"run_name": title}, "tensorboard": {"purge_step": step + 1}}
        return known.get(name, {})
    import wandb

    options: dict[str, Any] = {"name": title, "dir": str(run.folder.path), "resume": "allow"}
    if any(redact(word) != word for word in sys.argv):
        # wandb would store the command line, with the password of a URL in it.
        options["settings"] = wandb.Settings(x_disable_meta=True)
    if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False):
        options["mode"] = "offline"
        logger.warning(
            "wandb: no login found, so the run is stored offline; `wandb sync` uploads it later"
        )
    return options


def send_alert(accelerator: Accelerator, title: str, text: str) -> None:
    """Send an alert by every tracker whose run has `alert(title, text)`, as wandb's and trackio's.

    Users then learn by mail or chat what the log says. A tracker that fails is a warning.
    """
    for tracker in accelerator.trackers:
        send = getattr(tracker.tracker, "alert", None)
        if send is None:
            continue
        try:
            send(title=title, text=redact(text))
        # The network, or the tracker's own program: an alert is no reason to end a run.
        except Exception as error:
            logger.warning(f"{tracker.name}: the alert was not sent: {one_line(error)}")
