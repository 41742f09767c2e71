"""The README's commands and examples, run as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from arguments import argv
from forked import Forked
from nanogpt_hf.commands import COMMANDS, main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands(language: str) -> list[str]:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    """Run `command` in a shell, with this environment's programs on the path and this package."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        shell=True,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        timeout=240,
    )


def shortened(command: str) -> str:
    """A command of README as it is written; one that trains takes a few steps only."""
    words, hash_sign, comment = command.partition("  #")
    if re.search(r" (pretrain|finetune|resume) ", words) and "--dry-run" not in words:
        words = re.sub(r" --train\.max_steps \d+", "", words).rstrip()
        words += f" --train.max_steps {4 if ' resume ' in words else 2}"
    return words + hash_sign + comment


@pytest.fixture(scope="module")
def clone(tmp_path_factory, text_file) -> Path:
    """The files of a clone with a short quickstart run and a user's text."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("cli.py", "recipes", "accelerate_configs"):
        (folder / name).symlink_to(ROOT / name)
    # A user's text has characters that Python's documentation lacks.
    text = text_file.read_text() + "`code`, a café, “quoted” and 日本語\n"
    (folder / "my.txt").write_text(text, encoding="utf-8")
    command = (
        "pretrain recipes/quickstart.yaml --train.max_steps 2 --eval.every 2 "
        "--eval.tokens 1024 --eval.samples []"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(argv(command)) == 0
    return folder


def test_readme_begins_with_what_a_person_can_do():
    before_the_measurements = README.partition("## What was measured")[0]
    assert len(re.findall(r"^nanogpt-hf ", before_the_measurements, re.MULTILINE)) >= 5
    assert "![" in before_the_measurements
    assert commands("sh")[0].startswith("make quickstart ")
    assert commands("sh")[1] == "source .venv/bin/activate"


def run_in_a_fork(command: str, folder: Path) -> tuple[int, str, str]:
    """Exit status, output and errors of a command of README, without the start of a program."""
    words, _, _ = command.partition("  #")
    program, *arguments = argv(words)
    assert program == "nanogpt-hf"
    output, errors = (folder / name for name in ("output.txt", "errors.txt"))
    with output.open("w") as out, errors.open("w") as err:
        process = Forked(arguments, streams={1: out.fileno(), 2: err.fileno()}, folder=folder)
        return process.wait(240), output.read_text(), errors.read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)  # a dozen programs, one after another
def test_commands_run_as_written(clone):
    # one test in their order: later commands use the files of earlier ones
    ours = [command for command in commands("sh")[2:] if command]
    assert len(ours) >= 10
    for number, command in enumerate(ours):
        # The program that pip installs starts in a shell once, and all processes of `launch` do.
        if number == 0 or " launch " in command:
            completed = run(shortened(command), clone)
            status = completed.returncode
            output = completed.stdout
            errors = completed.stderr
        else:
            status, output, errors = run_in_a_fork(shortened(command), clone)
        assert status == 0, f"{command}\n{errors}"
        assert output
    metrics = (clone / "runs" / "mine" / "metrics.jsonl").read_text()
    assert '"step": 4,' in metrics


def test_commands_for_other_machines_pass_a_dry_run(clone, monkeypatch):
    monkeypatch.chdir(clone)
    others = commands("shell")
    assert others
    for command in others:
        arguments = command.split()
        if arguments[1] == "push":
            continue
        assert arguments[:3] == ["nanogpt-hf", "launch", "--config_file"]
        assert (ROOT / arguments[3]).is_file()
        assert main([*arguments[4:], "--dry-run"]) == 0


# Commands that users know from the first versions. They are not in the README as they stand.
KNOWN = {
    "python cli.py finetune --from gpt2 --freeze-layers 6": "--data my.txt --dry-run",
    "accelerate launch cli.py pretrain recipes/gpt2_124m.yaml": "--dry-run",
    "python cli.py push runs/gpt2_124m me/my-gpt": "",
}


@pytest.mark.long
@pytest.mark.one_row_per
@pytest.mark.parametrize("command", KNOWN)
def test_commands_of_a_clone_that_users_know(command, clone, tiny_base):
    words = command.replace("--from gpt2", f"--from {tiny_base}").replace("layers 6", "layers 1")
    completed = run(f"{words} {KNOWN[command]}", clone)
    if "push" in command:  # tests push to no Hub, and there is no such run
        assert completed.stderr.startswith("runs/gpt2_124m: no such folder")
    else:
        assert completed.returncode == 0, completed.stderr
        assert completed.stdout.endswith("nothing was started\n")


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
