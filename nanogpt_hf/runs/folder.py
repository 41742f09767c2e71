"""The run folder: what lies where in it, and who may write there."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import KNOBS, Config, get_value
from nanogpt_hf.errors import RunFolderError, UserError

_STEP = re.compile(r"step_(\d{8,})")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which then takes its place: `path` is there whole, or as it was.

    Raises UserError where it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def _holder_of(lock: Path) -> int | None:
    """The process that holds a lock on the file, as far as this machine's kernel lists it (Linux does)."""
    with contextlib.suppress(OSError, ValueError):
        facts = lock.stat()
        file = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()  # such as 1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF
            if fields[1] == "FLOCK" and fields[5] == file and int(fields[4]) > 0:
                return int(fields[4])
    return None


class RunFolder:
    """Names of what is in a run folder, and its beginnings. Writing is the main process's business."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.picture = self.path / "loss.png"
        self.report = self.path / "report.html"
        self.samples = self.path / "samples.md"
        self.machine = self.path / "machine.json"
        self.checkpoints = self.path / "checkpoints"
        self.best = self.path / "best"
        self.final = self.path / "final"
        self.trackers = self.path / "trackers"
        self._lock_file = self.path / ".lock"
        self._lock = filelock.FileLock(self._lock_file)

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Raises RunFolderError where the folder holds what a run must not touch, or lacks what --resume needs."""
        if resume and overwrite:
            raise RunFolderError("--resume and --overwrite exclude each other")
        if self._lock_file.is_file():
            with self._locked():  # first, because a run at its beginning looks like one without checkpoints
                pass
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path}: is a file; choose another --run-dir")
        if resume:
            if not self.checkpoint_folders():
                raise RunFolderError(f"{self.path}: no checkpoint to resume from yet; start anew with --overwrite")
        elif self.recipe.exists():
            if not overwrite:
                raise RunFolderError(
                    f"{self.path}: holds a run; add --resume to go on, --overwrite to start anew, or choose another "
                    "--run-dir"
                )
        elif self.path.exists() and any(path.name != ".lock" for path in self.path.iterdir()):
            raise RunFolderError(f"{self.path}: is not empty and holds no run; choose another --run-dir")

    def changes(self, config: Config) -> list[str]:
        """What `config` says otherwise than the run's recipe, as `key: before -> now`.

        Raises RunFolderError where that would make it another experiment: another model, text, order or step.
        """
        before = load_config(self.recipe)
        found = ("train.micro_batch_size", "auto")  # the run's recipe has the number, which stays
        different = [
            key
            for key in KNOBS
            if get_value(before, key) != get_value(config, key) and (key, get_value(config, key)) != found
        ]
        lines = [f"{key}: {get_value(before, key)} -> {get_value(config, key)}" for key in different]
        fixed = ("model.", "data.", "train.seed", "train.tokens_per_step", "finetune.", "lora.")
        free = ("data.dir", "data.num_proc", "finetune.prompts", "finetune.sample_tokens", "lora.merge")
        other = [line for line in lines if line.startswith(fixed) and not line.startswith(free)]
        if other:
            what = "; ".join(other)
            raise RunFolderError(
                f"{self.path}: --resume goes on with the same experiment; the recipe has changed: {what}"
            )
        return lines

    def micro_batch_size(self) -> int:
        """What the run's recipe says, where `auto` has become the number that was found."""
        return load_config(self.recipe).train.micro_batch_size

    def start(self, recipe_yaml: str) -> None:
        """Make the folder, without whatever run was in it, and write the resolved recipe."""
        try:
            for folder in (self.checkpoints, self.best, self.final, self.trackers):
                shutil.rmtree(folder, ignore_errors=True)
            for file in (self.metrics, self.picture, self.report, self.machine, self.samples):
                file.unlink(missing_ok=True)
            self.checkpoints.mkdir(parents=True)
            self.recipe.write_text(recipe_yaml, encoding="utf-8")
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot be written: {error.strerror}") from None

    def take_back(self) -> None:
        """Undo `start`, for a run that did not come to its first step; `unlock` then removes the folder."""
        for folder in (self.checkpoints, self.trackers, self.path / "wandb"):
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.metrics, self.recipe):
            file.unlink(missing_ok=True)

    def go_on(self, recipe_yaml: str) -> None:
        """Write the recipe with what a resumed run changed in it."""
        self.recipe.write_text(recipe_yaml, encoding="utf-8")

    def lock(self) -> None:
        """Keep other processes out until this one ends, and put right what a killed one left.

        Raises RunFolderError where another process is in already.
        """
        from nanogpt_hf.export.model_folder import restore_model_folder  # brings torch, which `push` does without

        self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._locked()
            for folder in (self.best, self.final):
                restore_model_folder(folder)
            for leftover in self.checkpoints.glob(".step_*.partial"):
                shutil.rmtree(leftover)
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot be written: {error.strerror}") from None

    def _locked(self) -> filelock.AcquireReturnProxy:
        """The lock, held until the proxy is left or for good. Raises RunFolderError if another process holds it."""
        try:
            return self._lock.acquire(timeout=0)
        except filelock.Timeout:
            pid = _holder_of(self._lock_file)
            which = f" (pid {pid})" if pid else ""
            raise RunFolderError(f"{self.path}: another process is training in it{which}; wait for it to end") from None

    def unlock(self) -> None:
        """Let others in; a folder in which nothing was begun goes again."""
        self._lock.release()
        if not self.recipe.exists():
            with contextlib.suppress(OSError):
                self._lock_file.unlink(missing_ok=True)
                for folder in self._made:
                    folder.rmdir()

    def checkpoint_folders(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        found = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return sorted(p for p in found if _STEP.fullmatch(p.name))

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    def newest_checkpoint(self) -> Path | None:
        folders = self.checkpoint_folders()
        return folders[-1] if folders else None
