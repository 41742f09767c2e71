"""The README's commands, run as they are written there, in a folder where the quickstart has been."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(language: str) -> list[str]:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    """`command` in a shell whose python and accelerate are those of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, cwd=folder, env=os.environ | {"PATH": path}, timeout=240
    )


@pytest.fixture(scope="module")
def clone(tmp_path_factory, text_file) -> Path:
    """The files of a clone, with a short quickstart run in it and a text of one's own."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("cli.py", "recipes", "accelerate_configs"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(text_file, folder / "my.txt")
    done = run("python cli.py pretrain recipes/quickstart.yaml --train.max_steps 100 --eval.every 50", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_two_commands_are_the_makefiles():
    makefile = (ROOT / "Makefile").read_text()
    assert commands("sh")[:2] == ["make quickstart", "make test"]
    assert re.search(r"^quickstart: ", makefile, re.MULTILINE)
    assert re.search(r"^test: ", makefile, re.MULTILINE)


@pytest.mark.slow
def test_commands_run_as_written(clone):
    # one test, in their order: later ones go on from what earlier ones wrote
    ours = commands("sh")[2:]
    assert len(ours) >= 6
    for command in ours:
        done = run(command, clone)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stdout
    metrics = (clone / "runs" / "mine" / "metrics.jsonl").read_text()
    assert '"step": 300' in metrics


def test_commands_for_other_machines_are_right_as_far_as_a_dry_run_tells(clone):
    others = commands("shell")
    assert others
    for command in others:
        ours = command[command.index("cli.py") :]
        done = run(f"python {ours} --dry-run", clone)
        assert done.returncode == 0, done.stderr
        config = command.split("--config_file ")[1].split()[0]
        assert (ROOT / config).is_file()


def test_python_examples_run_as_written(clone):
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    done = run(f"python -c '{blocks[0]}'", clone)
    assert done.returncode == 0, done.stderr
    local = blocks[1].replace('"gpt2"', '"runs/quickstart/best"')  # the Hub is not asked in a test
    assert run(f"python -c '{local}'", clone).returncode == 0


def test_every_command_and_recipe_has_a_row():
    from nanogpt_hf.commands import COMMANDS

    for name in COMMANDS:
        assert f"| `{name} " in README
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    recipes = [path.stem for path in (ROOT / "recipes").glob("*.yaml")]
    assert recipes
    assert all(f"`{name}`" in page for name in recipes)
