"""Push a model to the Hub in one commit: weights, tokenizer, generation config and model card.

A run folder's resolved recipe, metrics and loss plot are pushed too. The token is the one that `hf auth login` stored,
or HF_TOKEN. Nothing in the repository is ever deleted.
"""

import argparse
from pathlib import Path

from nanogpt_hf.commands.console import show
from nanogpt_hf.config.checks import REPO_ID
from nanogpt_hf.data.progress import shows_bars
from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.find import find_model


def _repo_id(text: str) -> str:
    if not REPO_ID.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected user/name, got {text!r}")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a run folder (its best model), its best/ or final/, a model or adapter folder"
    )
    parser.add_argument("repo_id", metavar="REPO_ID", type=_repo_id, help="user/name; created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--revision", metavar="BRANCH", help="a branch to push to, created if it does not exist")
    parser.add_argument("--message", help="the commit message")


def run(arguments: argparse.Namespace) -> None:
    folder = Path(find_model(arguments.model, on_hub=False))
    if not folder.is_dir():
        raise UserError(f"{arguments.model}: no such folder; push takes a run, model or adapter folder")

    from huggingface_hub.utils import disable_progress_bars

    from nanogpt_hf.export.hub import push
    from nanogpt_hf.runs.folder import RunFolder

    if not shows_bars():
        disable_progress_bars()
    run = RunFolder(folder.parent)
    of_run = folder in (run.best, run.final) and run.recipe.is_file()
    pushed = push(
        folder,
        arguments.repo_id,
        default_card=_minimal_card_of(folder, arguments.repo_id),
        extra=(run.recipe, run.metrics, run.loss_plot) if of_run else (),
        private=arguments.private,
        revision=arguments.revision,
        message=arguments.message,
    )
    if pushed.skipped:
        show(f"skipped (not model files): {', '.join(pushed.skipped)}")
    if pushed.stale_weights:
        show(f"left in the repository by earlier pushes, perhaps stale: {', '.join(pushed.stale_weights)}")
    what = f"{len(pushed.files)} files, {pushed.size / 1e6:,.1f} MB" if pushed.changed else "nothing had changed"
    show(f"{folder} -> {pushed.url} ({what}{', a new repository' if pushed.repo_created else ''})")


def _minimal_card_of(folder: Path, repo_id: str) -> str | None:
    """A card for a GPT-2 folder without one; None if there is a card, or the model is no GPT-2."""
    if (folder / "README.md").exists() or not (folder / "config.json").is_file():
        return None
    from nanogpt_hf.export.card import minimal_card
    from nanogpt_hf.model.architecture import architecture_on_disk

    try:
        return minimal_card(repo_id.partition("/")[2], architecture_on_disk(str(folder)).load_config(str(folder), None))
    except Exception:  # of a config with nonsense in it: no GPT-2
        return None
