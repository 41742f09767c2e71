"""The program's name in messages: as the user started it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.program import LAUNCHER, program

ROOT = Path(__file__).parents[1]
STARTED = {
    "cli.py": "python cli.py",
    "../my clone/cli.py": "python '../my clone/cli.py'",
    "/usr/bin/nanogpt-hf": "nanogpt-hf",
    "/lib/nanogpt_hf/__main__.py": "python -m nanogpt_hf",
    "/lib/pytest/__main__.py": "nanogpt-hf",
}


@pytest.mark.parametrize("script", STARTED)
def test_messages_name_the_program_as_it_was_started(script, monkeypatch, capsys):
    monkeypatch.delenv(LAUNCHER, raising=False)
    monkeypatch.setattr(sys, "argv", [script])
    assert program() == STARTED[script]
    assert main(["nothing"]) == 2
    assert capsys.readouterr().err == (
        f"{program()} nothing: no such command; see {program()} --help\n"
    )
    with pytest.raises(SystemExit):
        main(["finetune", "--help"])
    out = capsys.readouterr().out
    assert f"usage: {program()} finetune" in " ".join(out.split())
    assert f"No recipe is needed: {program()} finetune --from gpt2" in out


def test_module_that_a_launch_started_has_the_launcher_name(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/lib/nanogpt_hf/__main__.py"])
    monkeypatch.setenv(LAUNCHER, "nanogpt-hf")
    assert program() == "nanogpt-hf"


def test_clone_and_module_are_the_same_program(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for start in (["-m", "nanogpt_hf"], [str(ROOT / "cli.py")]):
        completed = subprocess.run(
            [sys.executable, *start, "knobs", "--layers"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        name = " ".join(["python", *start])
        assert completed.returncode == 2
        assert completed.stderr.startswith(f"{name} knobs: --layers: unknown argument")


def test_one_place_names_the_script_of_a_clone():
    files = [path for kind in ("*.py", "*.html") for path in (ROOT / "nanogpt_hf").rglob(kind)]
    naming = {path.name for path in files if "cli.py" in path.read_text(encoding="utf-8")}
    assert naming == {"program.py", "launch.py"}  # launch.py starts the script again
