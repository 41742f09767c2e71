"""The README's commands and examples, run as they are written."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from arguments import argv
from nanogpt_hf.commands import COMMANDS, main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(language: str) -> list[str]:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    """Run `command` in a shell with this environment's python and accelerate on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        shell=True,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PATH": path},
        timeout=240,
    )


@pytest.fixture(scope="module")
def clone(tmp_path_factory, text_file) -> Path:
    """The files of a clone with a short quickstart run and a user's text."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("cli.py", "recipes", "accelerate_configs"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(text_file, folder / "my.txt")
    command = (
        "pretrain recipes/quickstart.yaml --train.max_steps 2 --optim.warmup_steps 1 "
        "--eval.every 2 --eval.tokens 1024 --eval.samples []"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(argv(command)) == 0
    return folder


@pytest.mark.slow
def test_commands_run_as_written(clone):
    # one test in their order: later commands use the files of earlier ones
    ours = commands("sh")[2:]
    assert len(ours) >= 6
    for command in ours:
        completed = run(command, clone)
        assert completed.returncode == 0, f"{command}\n{completed.stderr}"
        assert completed.stdout
    metrics = (clone / "runs" / "mine" / "metrics.jsonl").read_text()
    assert '"step": 300' in metrics


def test_commands_for_other_machines_pass_a_dry_run(clone, monkeypatch):
    monkeypatch.chdir(clone)
    others = commands("shell")
    assert others
    for command in others:
        arguments = command.split()
        assert arguments[:4] == ["python", "cli.py", "launch", "--config_file"]
        assert (ROOT / arguments[4]).is_file()
        assert main([*arguments[5:], "--dry-run"]) == 0


@pytest.mark.long
def test_python_examples_run_as_written(clone, monkeypatch):
    monkeypatch.chdir(clone)
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    for block in blocks:
        names = {}
        exec(block.replace('"gpt2"', '"runs/quickstart/best"'), names)  # tests do not use the Hub
        assert names["model"].num_parameters() > 500_000


def test_every_command_and_recipe_has_a_row():
    for name in COMMANDS:
        assert f"| `{name} " in README
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    recipes = [path.stem for path in (ROOT / "recipes").glob("*.yaml")]
    assert recipes
    assert all(f"`{name}`" in page for name in recipes)
