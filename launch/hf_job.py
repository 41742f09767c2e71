#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = ["nanogpt_hf"]
# ///
"""Train a recipe on Hugging Face Jobs, in as many jobs of a limited time as it needs.

    hf jobs uv run --flavor a10g-small --timeout 4h --secrets HF_TOKEN launch/hf_job.py \
        me/my-gpt gpt2_124m --train.max_time 3h45m

What follows the recipe goes to `nanogpt-hf pretrain`. Every new best model is pushed to the
repository, which is made private. The newest checkpoint is kept on its branch `run`; older ones are
removed from there. train.max_time must end the training before --timeout ends the job: the
job then uploads its checkpoint and ends with status 75. The same command again continues the run,
bit for bit as an undisturbed one would on the same machine; `--attempts 10` asks Jobs to start it
again by itself. A job that is killed continues from the last checkpoint that was uploaded.
Status 0: the run is complete. Status 2: a mistake, which another attempt does not mend.
"""

import argparse
import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

from nanogpt_hf.config.names import find_recipe, shipped_folder
from nanogpt_hf.console import configure_logging
from nanogpt_hf.errors import UserError
from nanogpt_hf.export.login import check_login
from nanogpt_hf.runs.folder import RunFolder

BRANCH = "run"
# Files of a run folder that a resumed run does not read: pictures and reports are written again,
# and hidden files, such as the lock, belong to a process that has ended.
NOT_NEEDED = ["*.png", "*.html", "final/*", ".*"]
POLL_SECONDS = 30.0


def download_run(api: HfApi, repo_id: str, run: RunFolder) -> bool:
    """Download the run folder that an earlier job has left; False if there is none."""
    try:
        api.snapshot_download(repo_id, revision=BRANCH, local_dir=run.path)
    except RevisionNotFoundError:
        return False
    shutil.rmtree(run.path / ".cache", ignore_errors=True)
    return run.newest_checkpoint() is not None


def upload_run(api: HfApi, repo_id: str, run: RunFolder, checkpoint: Path) -> None:
    """Replace what is on the branch by the run folder with this checkpoint, in one commit.

    The branch has one commit afterwards, because a repository keeps, and counts, all files of
    all commits.
    """
    others = [path.name for path in run.checkpoint_folders() if path != checkpoint]
    api.create_branch(repo_id, branch=BRANCH, exist_ok=True)
    api.upload_folder(
        repo_id=repo_id,
        folder_path=run.path,
        revision=BRANCH,
        ignore_patterns=[*NOT_NEEDED, *(f"checkpoints/{name}/*" for name in others)],
        delete_patterns=["*"],
        commit_message=f"Keep checkpoint {checkpoint.name}",
    )
    api.super_squash_history(repo_id, branch=BRANCH)


def pretrain_words(recipe: Path, run: RunFolder, repo_id: str, knobs: list[str]) -> list[str]:
    words = ["pretrain", str(recipe), "--run-dir", str(run.path), "--auto-resume"]
    return [*words, "--hub.push", "best", "--hub.repo", repo_id, "--hub.private", "true", *knobs]


def launch_words() -> list[str]:
    """What launches a command on this machine: nothing for one process, or one per GPU under
    ddp.yaml.
    """
    import torch

    gpus = torch.cuda.device_count()
    if gpus < 2:
        return []
    config = shipped_folder("accelerate_configs") / "ddp.yaml"
    return ["launch", "--config_file", str(config), "--num_processes", str(gpus)]


def train(command: list[str], api: HfApi, repo_id: str, run: RunFolder) -> int:
    """Run the command, and upload each new checkpoint; return its exit status."""
    uploaded = run.newest_checkpoint()
    with subprocess.Popen(command) as process:
        status = None
        while status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(POLL_SECONDS)
            newest = run.newest_checkpoint()
            if newest is not None and newest != uploaded:
                try:
                    upload_run(api, repo_id, run, newest)
                    uploaded = newest
                    print(f"uploaded {newest.name} to {repo_id}, branch {BRANCH}", flush=True)
                # A checkpoint may be removed while it is read, and networks fail. The next
                # checkpoint tries again, and training goes on.
                except (OSError, HfHubHTTPError) as error:
                    print(f"warning: {newest.name} was not uploaded: {error}", flush=True)
    return status


def main() -> int:
    description, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=details, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("repo_id", help="the repository of the model, such as me/my-gpt")
    parser.add_argument("recipe", help="a recipe's file, or the name of one that ships")
    parser.add_argument("--run-dir", type=Path, help="default: runs/RECIPE")
    arguments, knobs = parser.parse_known_args()
    # Libraries warn of kernels that this machine lacks, as in every command.
    with configure_logging("warning"):
        return run_job(arguments, knobs)


def run_job(arguments: argparse.Namespace, knobs: list[str]) -> int:
    recipe = find_recipe(arguments.recipe)
    run = RunFolder(arguments.run_dir or Path("runs") / recipe.stem)
    try:
        if warning := check_login(arguments.repo_id):
            raise UserError(warning)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    program = [sys.executable, "-m", "nanogpt_hf"]
    words = pretrain_words(recipe, run, arguments.repo_id, knobs)
    # A mistake in the recipe or a knob ends here, before a repository is made.
    checked = subprocess.run([*program, *words, "--dry-run"], stdout=subprocess.DEVNULL)
    if checked.returncode:
        return checked.returncode
    api = HfApi()
    api.create_repo(arguments.repo_id, private=True, exist_ok=True)
    # The branch has checkpoints and a description of the machine, so it must not be public.
    if not api.model_info(arguments.repo_id).private:
        line = (
            f"{arguments.repo_id}: it is public; make it private in its settings, or name another"
        )
        print(line, file=sys.stderr)
        return 2
    if download_run(api, arguments.repo_id, run):
        print(f"continuing from {run.newest_checkpoint()}", flush=True)
    return train([*program, *launch_words(), *words], api, arguments.repo_id, run)


if __name__ == "__main__":
    sys.exit(main())
