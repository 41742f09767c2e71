"""The command line: help, mistakes in one line, exit statuses, run folders."""

import inspect
import os
import shutil
import subprocess
import sys

import pytest

import nanogpt_hf
from nanogpt_hf.commands import COMMANDS, functions_of, main
from nanogpt_hf.config.schema import KNOBS, SECTIONS, knob_lines, section_lines
from nanogpt_hf.cpu import SPIN_COUNT
from nanogpt_hf.runs.folder import RunFolder


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_help_lists_every_command(capsys):
    for arguments in (["--help"], ["-h"], []):
        status, out, _ = run(capsys, *arguments)
        assert status == 0
        assert all(f"  {name} " in out for name in COMMANDS)


def help_of(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*words])
    assert caught.value.code == 0
    return capsys.readouterr().out


def takes_knobs(command: str) -> bool:
    return len(inspect.signature(functions_of(command)[1]).parameters) > 1


def test_help_lists_log_options_and_the_sections_of_knobs(capsys):
    for command in COMMANDS.keys() - {"launch"}:  # launch passes them to the command
        out = help_of(capsys, command, "--help")
        assert "-q, --quiet" in out, command
        assert "--log-level {debug,info,warning,error}" in out, command
    # `evaluate` reads the knobs of a source alone, and lists them itself.
    reads_knobs = {name for name in COMMANDS.keys() - {"launch", "evaluate"} if takes_knobs(name)}
    assert {"pretrain", "resume", "branch", "estimate"} < reads_knobs
    for command in reads_knobs:
        out = help_of(capsys, command, "-h")
        assert "\n".join(section_lines()) in out
        assert f"{command} --help SECTION" in out
        assert "--optim.beta2" not in out
        assert out.count("\n") < 75


def test_help_of_a_section_lists_its_knobs(capsys):
    for section in SECTIONS:
        lines = help_of(capsys, "pretrain", "--help", section).splitlines()
        assert lines[0].startswith(f"{section}: ")
        assert lines[0].removeprefix(f"{section}: ") in "\n".join(section_lines())
        listed = [line.split()[0].removeprefix("--") for line in lines[1:]]
        assert listed == [knob for knob in KNOBS if knob.startswith(f"{section}.")]
    assert help_of(capsys, "sweep", "-h", "all") == "\n".join(knob_lines()) + "\n"
    assert all(f"  --{knob} " in "\n".join(knob_lines()) for knob in KNOBS)


def test_knobs_lists_a_section_and_refuses_an_unknown_one(capsys):
    assert run(capsys, "knobs", "optim") == (0, "\n".join(knob_lines("optim")) + "\n", "")
    assert run(capsys, "knobs") == (0, "\n".join(knob_lines()) + "\n", "")
    status, _, err = run(capsys, "knobs", "optm")
    assert status == 2
    assert "invalid choice: 'optm'" in err


def test_help_before_a_command_is_its_help(capsys):
    assert help_of(capsys, "help", "pretrain") == help_of(capsys, "pretrain", "--help")
    assert run(capsys, "help") == run(capsys)
    status, _, err = run(capsys, "help", "pretain")
    assert status == 2
    assert "pretain: no such command; did you mean pretrain?" in err


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"nanogpt_hf {nanogpt_hf.__version__}\n", "")


def test_help_refuses_an_unknown_section(capsys):
    status, out, err = run(capsys, "pretrain", "--help", "dta")
    assert (status, out) == (2, "")
    assert "pretrain: --help dta: no such section of knobs; did you mean data?" in err
    assert ", ".join(SECTIONS) in err


def test_help_and_mistakes_import_nothing_heavy(root):
    script = """
import atexit, gc, os, sys
atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 0))
import nanogpt_hf
from nanogpt_hf import commands
nanogpt_hf.load_config, nanogpt_hf.UserError
for arguments in (
    ["pretrain", "--help"], ["sample", "--help"], ["doctor", "--help"], ["evaluate", "--help"],
    ["pretrain", "no.yaml"]
):
    try: commands.main(arguments)
    except SystemExit: pass
sys.argv = ["cli.py", "--help"]
commands.entry_point()
print("spin limit:", os.environ["GOMP_SPINCOUNT"])
heavy = {"torch", "transformers", "datasets", "accelerate", "numpy", "pyarrow"}
print("heavy:", heavy & sys.modules.keys())
"""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=root
    )
    assert done.stdout.endswith(f"spin limit: {SPIN_COUNT}\nheavy: set()\nfrozen: True\n"), (
        done.stderr
    )


def test_triton_finds_what_it_made_collected_at_the_end(root):
    """Its extension prints what is not collected, and a frozen object never is."""
    script = """
import atexit, gc, sys, types
atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 0))
from nanogpt_hf import commands
sys.modules["triton"] = types.ModuleType("triton")
gc.freeze()
sys.argv = ["cli.py", "--version"]
commands.entry_point()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root)
    assert done.stdout.endswith("frozen: False\n"), done.stderr


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_one_process_refuses_a_launch_of_several(refused, monkeypatch, command):
    launched = {"RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("WORLD_SIZE", "2")
    several = {"prepare", "pretrain", "finetune", "rl", "align", "resume"}
    several |= {"sample", "evaluate", "verify", "bench", "doctor"}
    line = refused(command, "--nosuch", "1")
    assert line.startswith(f"{command} runs in one process, and a") == (command not in several)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "runs in one process" not in refused(command, "--nosuch", "1")


@pytest.mark.parametrize(
    "words",
    [
        "pretrain quickstart --run-dir r\udcff",
        "pretrain quickstart --hub.license=\udcff",
        "pretrain quickstart --data.dir \udcff",
        "sweep quickstart --sweep-dir s\udcff --train.seed 1,2",
        "branch run --at 1 --run-dir r\udcff",
        "export model out\udcff",
        "serve model --host \ud800",
        "launch --config_file f\udcff pretrain quickstart",
        "a\udcff",
    ],
)
def test_word_that_is_not_utf8_is_refused_before_anything_is_written(refused, words):
    line = refused(*words.split())
    assert "not UTF-8" in line
    assert "\\ud" in line


def test_auto_resume_starts_resumes_and_keeps_models(capsys, tmp_path, write_recipe, refused):
    arguments = ["pretrain", write_recipe(train__max_steps=2), "--run-dir", tmp_path / "run"]
    assert run(capsys, *arguments, "--auto-resume")[0] == 0
    status, out, _ = run(capsys, *arguments, "--auto-resume", "--train.max_steps", "4")
    assert status == 0
    assert "resuming from" in out
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    for flag in ("--auto-resume", "--resume"):
        assert str(tmp_path / "run" / "checkpoints") in refused(*arguments, flag)
    assert run(capsys, *arguments, "--overwrite")[0] == 0


def test_refused_run_keeps_the_lock_of_another(tmp_path, write_recipe, refused):
    first = RunFolder(tmp_path / "run")
    first.lock()
    try:
        for more in ([], ["--resume"]):  # before it is seen that there is no checkpoint
            line = refused("pretrain", write_recipe(), "--run-dir", first.path, *more)
            assert "is training in it" in line
        assert (first.path / ".lock").exists()
    finally:
        first.unlock()


def test_dry_run_prints_sizes_and_writes_nothing(capsys, tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "pretrain", root / "recipes" / "gpt2_124m.yaml", "--dry-run")
    assert status == 0
    # 124,439,808 without biases: 12 · (3 + 1 + 4 + 1 + 1 + 1) · 768 + 768
    assert "parameters: 124,337,664\n" in out
    assert "tokens per step: 491,520" in out
    assert "learning_rate: 0.0006" in out
    assert not list(tmp_path.iterdir())
