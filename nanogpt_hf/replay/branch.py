"""Make the folder of a run that begins at a checkpoint of another run."""

import json
import shutil
from pathlib import Path
from typing import Any

from nanogpt_hf.checkpoint.files import CHECKSUMS, STATE, write_state
from nanogpt_hf.checkpoint.reader import Checkpoint, identity_of
from nanogpt_hf.config.schema import Config
from nanogpt_hf.errors import UserError
from nanogpt_hf.methods.table import method_of
from nanogpt_hf.own_files import read_json
from nanogpt_hf.place import replaced_folder
from nanogpt_hf.runs.files import write_whole
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.runs.provenance import add_start, now, read_starts
from nanogpt_hf.runs.recipe import recipe_text
from nanogpt_hf.runs.state import run_identity
from nanogpt_hf.training.early_checks import check_folders


def make_branch(old: RunFolder, checkpoint: Checkpoint, new: RunFolder, config: Config) -> None:
    """Write a run folder of `config` with a checkpoint of another run, and its metrics until then.

    Prepares the data. Raises UserError, and leaves nothing, if they do not fit together.
    """
    if not method_of(config).uses_prepared_data:
        raise UserError(f"{old.path}: trained by {method_of(config).name}; only text is branched")
    check_folders(config, new)
    step = checkpoint.state.step
    before = identity_of(checkpoint)
    known = before["data"].get("tokenizer_hash")
    new.lock()
    # The folder must be new, and the data must be prepared, before anything is copied.
    try:
        new.check(resume=False, overwrite=False)
        manifest = method_of(config).load(config).manifest
        identity = run_identity(config, manifest, before.get("origin", {}))
        # The data may be another text, but the model's embeddings belong to its token ids.
        if identity["data"]["tokenizer_hash"] != known:
            raise UserError(f"{config.data.dir}: has another tokenizer than {old.path}")
        new.start(recipe_text(config))
        try:
            _copy_history(old, new, step)
            _copy_checkpoint(checkpoint.folder, new.checkpoint(step), identity)
        except BaseException:
            # Also after Ctrl-C: a folder with half a history must not look like a run.
            new.machine.unlink(missing_ok=True)
            new.undo_start()
            raise
        new.checkpoint_written(step, checkpoint.state.last_finite_step, keep=1)
    finally:
        new.unlock()


def _copy_history(old: RunFolder, new: RunFolder, step: int) -> None:
    """Copy the metrics up to a step, and the start before it, which names the other run."""
    events = [event for event in read_metrics(old) if event["step"] <= step]
    write_whole(new.metrics, "".join(f"{json.dumps(event)}\n" for event in events))
    # The branch continues on the machine of this start, which `verify` reads.
    starts = [start for start in read_starts(old) if start.get("step", 0) <= step]
    start = starts[-1] if starts else {}
    add_start(new, start | {"step": step, "time": now(), "branch_of": str(old.path.resolve())})


def _copy_checkpoint(source: Path, target: Path, identity: dict[str, Any]) -> None:
    """Copy a checkpoint to a run of another identity."""
    with replaced_folder(target) as partial:
        # Not copytree: it collects the errors of all files in a list, and one line names one file.
        for path in source.iterdir():
            shutil.copy2(path, partial)
        # state.json holds the identity, and the checksums are written again with it.
        facts = read_json(source / STATE, dict[str, Any]) | {"identity": identity}
        checksums = read_json(source / CHECKSUMS, dict[str, str])
        write_state(partial, facts, checksums)
