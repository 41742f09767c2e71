"""Gather the files of a push in a staging folder: only files of a model, redacted, unchanged by a running training."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.export.file_checks import WEIGHT_FILES, check_files, matches, raise_problems
from nanogpt_hf.runs.redact import redact, redact_tree

PATH_PLACEHOLDER = "path/to/this/folder"  # in a card's example; a push replaces it by the repository
_CARD = "README.md"
# An allow-list: a folder may hold anything else, secrets and pickles too.
_MODEL_FILES = (
    *WEIGHT_FILES,
    _CARD,
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "*.safetensors.index.json",
    "tokenizer*.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "LICENSE*",
)
_READ_ATTEMPTS = 10


@contextlib.contextmanager
def staged_files(
    folder: Path,
    extra: tuple[Path, ...],
    default_card: str | None,
    repo_id: str,
    revision: str | None,
    token: str,
) -> Iterator[tuple[Path, list[str]]]:
    """Yield a hidden folder with the files to push, and the names in `folder` that are skipped.

    A training run may replace its model folder at any time; the staged files do not change.
    """
    stage = staging_folder(folder, os.getpid())
    try:
        try:
            stage.mkdir()
        except OSError:  # the model's parent folder is read-only
            stage = Path(tempfile.mkdtemp(prefix="push-"))
        try:
            skipped = _gather(stage, folder, extra)
            check_files(stage, folder, token)
            _prepare_card(stage / _CARD, default_card, repo_id, revision)
            _redact_files(stage)
        except OSError as error:
            raise RunFolderError(f"{folder}: cannot be read or copied: {error.strerror or error}") from error
        yield stage, skipped
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def staging_folder(folder: Path, pid: int) -> Path:
    """The staging folder of the push that runs as process `pid`."""
    return folder.parent / f".push-{pid}"


def _gather(stage: Path, folder: Path, extra: tuple[Path, ...]) -> list[str]:
    """Link or copy the files to push into `stage`; return the names in `folder` that are skipped."""
    for _ in range(_READ_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):  # a newer model has just replaced the folder: try again
            inode, links = folder.stat().st_ino, []
            names = sorted(path.name for path in folder.iterdir())
            chosen = [name for name in names if matches(name, _MODEL_FILES) and (folder / name).is_file()]
            if not any(matches(name, WEIGHT_FILES) for name in chosen):
                raise RunFolderError(f"{folder}: has no weights as safetensors, GGUF or ONNX")
            for path in [*(folder / name for name in chosen), *(path for path in extra if path.is_file())]:
                if path.resolve().is_relative_to(path.parent.resolve()):
                    link_or_copy(path, stage / path.name)
                else:
                    links.append(f"{path}: is a link to {path.resolve()}, outside its folder; replace it by a copy")
            if folder.stat().st_ino == inode:
                raise_problems(links)
                return [name for name in names if name not in chosen]
        for file in stage.iterdir():
            file.unlink()
    raise RunFolderError(f"{folder}: was replaced {_READ_ATTEMPTS} times while it was read; try again later")


def link_or_copy(path: Path, target: Path) -> None:
    if matches(path.name, WEIGHT_FILES):
        with contextlib.suppress(OSError):  # another disk, or a file system without links
            os.link(path.resolve(), target)  # no copy, and the content stays if the name is removed
            return
    shutil.copyfile(path, target)


def _prepare_card(card: Path, default_card: str | None, repo_id: str, revision: str | None) -> None:
    """Write `default_card` if there is no card, and make its example load from the repository."""
    if not card.exists() and default_card:
        card.write_text(default_card, encoding="utf-8")
    if card.exists():
        source = f'"{repo_id}", revision={json.dumps(revision)}' if revision else f'"{repo_id}"'
        text = card.read_text(encoding="utf-8", errors="replace").replace(f'"{PATH_PLACEHOLDER}"', source)
        card.write_text(text, encoding="utf-8")


def _redact_files(stage: Path) -> None:
    """Remove secrets and the home folder from recipe and configs, and an unfinished last line from the metrics."""
    recipe, metrics = stage / "recipe.yaml", stage / "metrics.jsonl"
    if recipe.exists():
        recipe.write_text(redact(recipe.read_text(encoding="utf-8")), encoding="utf-8")
    for path in (stage / name for name in ("config.json", "generation_config.json", "adapter_config.json")):
        if path.exists():
            tree = json.loads(path.read_text(encoding="utf-8"))
            if (redacted := redact_tree(tree)) != tree:
                path.write_text(json.dumps(redacted, indent=2) + "\n", encoding="utf-8")
    if metrics.exists():  # a run may be writing its next line
        content = metrics.read_bytes()
        metrics.write_bytes(content[: content.rfind(b"\n") + 1])
