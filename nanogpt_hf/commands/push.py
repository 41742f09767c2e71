"""Push a model to the Hub in one commit: weights, tokenizer, generation config and model card.

A run folder's resolved recipe, metrics and loss plot are pushed too. The token is the one that
`hf auth login` stored, or HF_TOKEN. Nothing in the repository is ever deleted.
"""

import argparse
from pathlib import Path

from nanogpt_hf.commands.arguments import add_flags, add_option
from nanogpt_hf.config.checks import REPO_ID
from nanogpt_hf.console import show
from nanogpt_hf.errors import UserError
from nanogpt_hf.formatting import shows_bars
from nanogpt_hf.runs.find import find_model


def _repo_id(text: str) -> str:
    if not REPO_ID.fullmatch(text):
        raise argparse.ArgumentTypeError(f"expected user/name, got {text!r}")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    folder = "a run folder (its best model), its best/ or final/, a model or adapter folder"
    add_option(parser, "model MODEL", folder)
    add_option(parser, "repo_id REPO_ID", "user/name; created if it does not exist", type=_repo_id)
    add_flags(parser, {"--private": "create a private repository"})
    branch = "a branch to push to, created if it does not exist"
    add_option(parser, "--revision BRANCH", branch)
    add_option(parser, "--message", "the commit message")


def run(arguments: argparse.Namespace) -> None:
    folder = Path(find_model(arguments.model, on_hub=False))
    if not folder.is_dir():
        raise UserError(
            f"{arguments.model}: no such folder; push takes a run, model or adapter folder"
        )

    from huggingface_hub.utils import disable_progress_bars

    from nanogpt_hf.export.hub import push

    if not shows_bars():
        disable_progress_bars()
    pushed = push(
        folder,
        arguments.repo_id,
        private=arguments.private,
        revision=arguments.revision,
        message=arguments.message,
    )
    if pushed.skipped:
        show(f"skipped (not model files): {', '.join(pushed.skipped)}")
    show(f"{folder} -> {pushed.url} ({len(pushed.files)} files)")
