"""A run folder: the names of its files, its start, its lock, and the removal of old checkpoints."""

import contextlib
import errno
import logging
import os
import re
import shlex
from pathlib import Path

import filelock

from nanogpt_hf.errors import RunFolderError, one_line
from nanogpt_hf.place import dead_link, remove, remove_folder, restore_folder
from nanogpt_hf.program import program
from nanogpt_hf.runs.files import written_whole

logger = logging.getLogger(__name__)
# The format of run folders, which each checkpoint records; a run of another one is not resumed.
VERSION = 2
# The number of an error of the system, in a message of Python or Rust.
_ERROR_NUMBER = re.compile(r"(?:Errno|os error) (\d+)")
_PROCESS = re.compile(r"process \d+ on \S+: ")
_NO_SPACE = "free some space"
_REMEDIES: dict[int | None, str] = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EROFS: "mount the file system so that it can be written",
    errno.EACCES: "allow this user to write there",
}
_STEP = re.compile(r"step_(\d{8,})")
# A file in checkpoints/ until the first one is written. If neither is there, a volume may be
# missing.
_NONE_YET = ".no_checkpoint_yet"
# A model folder has one of them.
MODEL_FILES = {"config.json", "adapter_config.json"}


def step_of(checkpoint: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix("step_"))


def _clear(folder: Path) -> None:
    """Remove a folder. If it is a link, remove the content of its target."""
    for path in list(folder.iterdir()) if folder.is_symlink() else (folder,):
        remove(path)


class RunFolder:
    """Paths in a run folder, and the checks and steps that start or resume a run.

    Only the main process writes.
    """

    def __init__(self, path: Path | str):
        self.path = Path(os.path.expanduser(path))
        self.recipe = self.path / "recipe.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.loss_plot = self.path / "loss.png"
        self.report = self.path / "report.html"
        self.machine = self.path / "machine.json"
        # Preference training writes it: log-probabilities under the model before it
        self.reference = self.path / "reference.safetensors"
        self.verified = self.path / "verified.jsonl"
        # What cannot be written again
        self.records = (self.recipe, self.metrics, self.machine, self.reference, self.verified)
        self._files = (self.metrics, self.loss_plot, self.report, self.machine)
        self._files += (self.reference, self.verified)
        self.checkpoints = self.path / "checkpoints"
        self.best = self.path / "best"
        self.final = self.path / "final"
        self.trackers = self.path / "trackers"
        self._lock_file = self.path / ".lock"
        self._lock = filelock.FileLock(self._lock_file)

    def check(self, *, resume: bool, overwrite: bool, auto_resume: bool = False) -> bool:
        """Return whether to resume; with `auto_resume` that depends on the folder, which is locked.

        Raises RunFolderError if a run must not write to the folder, or if it has no checkpoint
        to resume from.
        """
        self._check_links()
        if resume or auto_resume:
            if self.checkpoint_folders():
                return True
            # A recipe without a checkpoint, and not because the run has just begun.
            if self.recipe.exists() and not (self.checkpoints / _NONE_YET).exists():
                raise RunFolderError(
                    f"{self.path}: holds a run, but {self.checkpoints} has no checkpoint; if it "
                    "is on a volume that is not mounted, mount it; else start again with "
                    "--overwrite, or choose another --run-dir"
                )
            if resume:
                how = "with --overwrite" if self.recipe.exists() else "without --resume"
                raise RunFolderError(
                    f"{self.path}: no checkpoint to resume from; start again {how}"
                )
        if self.recipe.exists():
            if not (overwrite or auto_resume):
                raise RunFolderError(
                    f"{self.path}: holds a run; add --resume to continue, --overwrite to start "
                    "again, or choose another --run-dir"
                )
        elif self.path.is_dir() and not all(map(self._may_precede_a_run, self.path.iterdir())):
            raise RunFolderError(
                f"{self.path}: is not empty and holds no run; choose another --run-dir"
            )
        return False

    def _may_precede_a_run(self, path: Path) -> bool:
        """Return whether `path` may be in a folder without a run: empty, or left by a killed
        `start`.
        """
        if path in (self.checkpoints, self.best, self.final):
            return set(os.listdir(path)) <= {_NONE_YET}
        return path.name in (".lock", "lost+found")

    def _check_links(self) -> None:
        """Raises RunFolderError if a folder of the run is a file, or a link to nothing or to other
        files.
        """
        # A volume that is not mounted is a link to nothing; training would fill another disk.
        for folder in (self.checkpoints, self.best, self.final, self.trackers):
            target = os.path.realpath(folder)
            if os.path.lexists(folder) and not folder.is_dir():
                raise RunFolderError(
                    f"{folder}: is a file, or a link to {target}, where there is no folder; mount "
                    "its volume, or move it away"
                )
            names = set(os.listdir(folder)) if folder.is_symlink() else set()
            if folder in (self.best, self.final) and names and not names & MODEL_FILES:
                raise RunFolderError(
                    f"{folder}: is a link to {target}, which is not a model folder; link an "
                    "empty folder"
                )

    def start(self, recipe_yaml: str) -> None:
        """Create the folder, remove a run that is in it, and write the resolved recipe.

        Removes nothing before it is certain that new files can be written.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            # It is replaced last, since it would not fit the old checkpoints.
            with written_whole(self.recipe) as partial:
                partial.write_text(recipe_yaml, encoding="utf-8")
                (self.checkpoints / _NONE_YET).touch()
                self._remove_run()
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot be written: {error}") from None

    def _remove_run(self) -> None:
        # The newest first: after a kill a resume finds an older one of the same run.
        for checkpoint in reversed(self.checkpoint_folders()):
            remove_folder(checkpoint)
        for folder in (self.best, self.final, self.trackers):
            _clear(folder)
        for file in self._files:
            file.unlink(missing_ok=True)

    def undo_start(self) -> None:
        """Undo `start`, for a run that did not come to its first step; `unlock` then removes the
        folder.
        """
        (self.checkpoints / _NONE_YET).unlink(missing_ok=True)
        # A link, or a folder with files of others, stays.
        with contextlib.suppress(OSError):
            self.checkpoints.rmdir()
        for folder in (self.trackers, self.path / "wandb"):
            with contextlib.suppress(OSError):
                _clear(folder)
        # The recipe last: without it the folder holds no run, and others may be in it.
        for file in (*self._files, self.recipe):
            file.unlink(missing_ok=True)

    def lock(self) -> None:
        """Lock the folder until this process ends, and repair what a killed one left.

        Raises RunFolderError if another process has locked it, or if it is a file.
        """
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise RunFolderError(f"{self.path}: is a file; choose another --run-dir")
        if problem := dead_link(self.path):
            raise RunFolderError(f"{problem}, or choose another --run-dir")
        # Folders that `unlock` removes again if no run is started.
        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._locked()
            for folder in (self.best, self.final):
                restore_folder(Path(os.path.realpath(folder)))
            for path in list(self.checkpoints.glob(".step_*")):
                restore_folder(path.with_name(path.stem[1:]))
            # What `written_whole` leaves: a random name of 12 digits.
            for path in list(self.path.glob("." + 12 * "[0-9a-f]" + ".partial*")):
                path.unlink()
        except OSError as error:
            raise RunFolderError(
                f"{self.path}: cannot be written: {error.strerror}; choose another --run-dir"
            ) from None

    def check_unlocked(self) -> None:
        """Raises RunFolderError if another process is training in the folder; in one that is
        read-only for this user it cannot be asked.
        """
        if self._lock_file.is_file() and os.access(self._lock_file, os.W_OK):
            with self._locked():
                pass

    def _locked(self) -> filelock.AcquireReturnProxy:
        """Acquire the lock. Raises RunFolderError if another process holds it."""
        try:
            # Not 0: each rank of `verify` holds it for a moment, to check it.
            return self._lock.acquire(timeout=1)
        except filelock.Timeout:
            raise RunFolderError(
                f"{self.path}: another process is training in it; wait for it to end"
            ) from None

    def unlock(self) -> None:
        """Release the lock if this object holds it. If no run was started, remove the folder,
        unless it was there before.
        """
        if not self._lock.is_locked:
            return
        # Removed while it is locked: who waits for it then looks for the file again. After the
        # release it could be the lock of another process, whose folder others would then enter.
        if self._made and not self.recipe.exists():
            with contextlib.suppress(OSError):
                self._lock_file.unlink()
                for folder in self._made:
                    folder.rmdir()
        self._lock.release()

    def write_error(self, path: Path, error: BaseException) -> RunFolderError:
        """Return the error of a run that trains and cannot write `path`, with what to do."""
        resume = f"continue with {program()} resume {shlex.quote(str(self.path))}"
        # The folder that is missing, not the file that was to be written in it.
        for folder in (self.path, self.checkpoints):
            # Unlike Path.is_dir, this takes a volume that does not answer for a lost one.
            if not os.path.isdir(folder):
                return RunFolderError(
                    f"{path}: cannot be written: {folder} is no folder any more",
                    f"if its volume is not mounted, mount it and {resume}; if it was removed, "
                    "train again",
                )
        # safetensors and other threads state the number in the message alone.
        found = _ERROR_NUMBER.search(str(error))
        number = int(found[1]) if found else getattr(error, "errno", None)
        reason = os.strerror(number) if number else one_line(error)
        # Another process states which one it is.
        if number and (process := _PROCESS.match(str(error))):
            reason = process[0] + reason
        remedy = _REMEDIES.get(number, "correct that")
        again = resume if self.checkpoint_folders() else "start again with --overwrite"
        return RunFolderError(f"{path}: cannot be written: {reason}", f"{remedy}, then {again}")

    def checkpoint_folders(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        paths = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return sorted((path for path in paths if _STEP.fullmatch(path.name)), key=step_of)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    def checkpoint_written(self, step: int, last_finite_step: int, keep: int) -> None:
        """Remove old checkpoints after the checkpoint of `step` was written.

        Keeps the `keep` newest, and the newest one after which a gradient was finite: later ones
        may hold weights that have just diverged. Checkpoints of later steps are removed: they
        were damaged, or the run was rolled back.
        """
        (self.checkpoints / _NONE_YET).unlink(missing_ok=True)
        # 1. The checkpoints up to this step, and the sound ones: before the last finite gradient.
        folders = [folder for folder in self.checkpoint_folders() if step_of(folder) <= step]
        sound = [folder for folder in folders if step_of(folder) < last_finite_step]
        # 2. Remove all but the newest `keep` and the newest sound one.
        for folder in self.checkpoint_folders():
            if folder in folders[-keep:] + sound[-1:]:
                continue
            try:
                remove_folder(folder)
            except OSError as error:
                # A resume would take a later one instead of this step's.
                if step_of(folder) > step:
                    raise
                # The next checkpoint or start removes it.
                logger.warning(f"{folder}: cannot be removed: {error.strerror}")

    def newest_checkpoint(self) -> Path | None:
        return next(reversed(self.checkpoint_folders()), None)


def run_folder(name: str, run_dir: str | os.PathLike[str] | None) -> RunFolder:
    """Return the folder of a command's run: runs/`name`, the name of its recipe, by default."""
    return RunFolder(Path(run_dir or Path("runs") / name))


def run_of_model(folder: Path) -> RunFolder | None:
    """Return the run whose best/ or final/ a folder is; None if there is none."""
    run = RunFolder(folder.parent)
    return run if folder in (run.best, run.final) and run.recipe.is_file() else None
