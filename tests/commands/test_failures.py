"""Errors outside a command's own checks: one line and status 2, or the traceback of a bug."""

import importlib
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import Accelerator

from arguments import argv
from nanogpt_hf import console
from nanogpt_hf.commands import launch, main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import Config, DataSection, replace_knobs
from nanogpt_hf.config.sources import sources_of
from nanogpt_hf.errors import UserError
from nanogpt_hf.methods.resolve import missing_path
from nanogpt_hf.runs.folder import RunFolder, run_folder
from nanogpt_hf.training import build, micro_batch

ROOT = Path(__file__).parents[2]


def fail_with(monkeypatch, error: Exception) -> None:
    def run(arguments, overrides):
        raise error

    monkeypatch.setattr("nanogpt_hf.commands.train.run_prepare", run)


def complaint(capsys, *arguments) -> str:
    status = main([str(a) for a in arguments])
    err = capsys.readouterr().err
    assert status == 2
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1
    return err.rstrip("\n")


def test_os_error_is_one_line_and_traceback_with_log_level_debug(capsys, monkeypatch):
    fail_with(monkeypatch, FileNotFoundError(2, "No such file or directory", "/gone"))
    assert complaint(capsys, "prepare", "r.yaml") == "/gone: No such file or directory"
    assert main(argv("prepare r.yaml --log-level debug")) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("\n/gone: No such file or directory\n")


def test_bug_keeps_its_traceback(monkeypatch):
    fail_with(monkeypatch, TypeError("a bug"))
    with pytest.raises(TypeError, match="a bug"):
        main(["prepare", "r.yaml"])


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (
            "int(os.environ['LIBRARY_TIMEOUT'])",
            "library cannot be imported: ValueError: invalid literal for int() with base 10: "
            "'soon'; correct or unset the variable LIBRARY_TIMEOUT",
        ),
        (
            "raise ValueError('Invalid settings; try LIBRARY_LOGS=help')",
            "library cannot be imported: ValueError: Invalid settings; try LIBRARY_LOGS=help; "
            "correct or unset the variable LIBRARY_LOGS",
        ),
        (
            "raise RuntimeError('no libraries')",
            "library cannot be imported: RuntimeError: no libraries; install nanogpt_hf again in "
            "this environment: its packages do not fit",
        ),
        (
            "import library_of_it",
            "library_of_it cannot be imported: ModuleNotFoundError: No module named "
            "'library_of_it'; install nanogpt_hf again in this environment: its packages do not "
            "fit",
        ),
        (
            "from json import nosuch",
            "json cannot be imported: ImportError: cannot import name 'nosuch' from 'json' "
            f"({json.__file__}); install nanogpt_hf again in this environment: its packages do not "
            "fit",
        ),
    ],
)
def test_library_that_cannot_be_imported_is_one_line(capsys, monkeypatch, tmp_path, code, line):
    monkeypatch.setenv("LIBRARY_TIMEOUT", "soon")
    monkeypatch.setenv("LIBRARY_LOGS", "x")
    (tmp_path / "library.py").write_text(f"import os\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "library", raising=False)

    def run(arguments, overrides):
        importlib.import_module("library")

    monkeypatch.setattr("nanogpt_hf.commands.train.run_prepare", run)
    assert complaint(capsys, "prepare", "r.yaml") == line


@pytest.mark.parametrize("module", ["nanogpt_hf.broken", "library"])
def test_error_while_our_own_module_is_imported_is_a_bug(monkeypatch, module):
    """So is an error of a function of a library, when it was imported."""
    names = {"__name__": module}
    if module == "library":
        exec("def call():\n    int('x')", names)
    else:
        names["call"] = lambda: exec("int('x')", names)

    def run(arguments, overrides):
        names["call"]()

    monkeypatch.setattr("nanogpt_hf.commands.train.run_prepare", run)
    with pytest.raises(ValueError, match="invalid literal"):
        main(["prepare", "r.yaml"])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows removes no current folder")
@pytest.mark.parametrize("line", ["pretrain quickstart", "sample x", "doctor", "knobs"])
def test_a_current_folder_that_was_removed_is_one_line(capsys, monkeypatch, tmp_path, line):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert complaint(capsys, *line.split()) == (
        "the current folder was removed; change to another one: cd"
    )


def test_error_of_another_process_names_its_rank(capsys, monkeypatch):
    place = "RANK=3 LOCAL_RANK=3 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=1"
    for variable in place.split():
        monkeypatch.setenv(*variable.split("="))
    fail_with(monkeypatch, OSError(28, "No space left on device", "/data/x"))
    assert complaint(capsys, "prepare", "r.yaml") == "[rank 3] /data/x: No space left on device"


def test_tilde_is_expanded_in_every_path(write_run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_run("a run")
    assert main(argv("report '~/a run' --output '~/page.html'")) == 0
    assert (tmp_path / "page.html").is_file()
    assert not Path("~").exists()


def test_tilde_of_python_is_the_home_folder(tmp_path, monkeypatch, write_recipe):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder("~/run").path == tmp_path / "run"
    assert run_folder("name", "~/run").path == tmp_path / "run"
    data = replace_knobs(Config(), {"data.dir": "~/data", "data.tokenizer": "~/model"}).data
    assert (data.dir, data.tokenizer) == (str(tmp_path / "data"), str(tmp_path / "model"))
    write_recipe()
    assert load_config("~/tiny.yaml").name == "tiny"
    mixture = [{"name": "a", "source": "x", "weight": 1, "dir": "~/a"}]
    (source,) = sources_of(DataSection(source=mixture))
    assert source.data.dir == str(tmp_path / "a")
    # bash leaves the ~ of --config_file=~/x as it is.
    (tmp_path / "machine.yaml").write_text("distributed_type: 'NO'\nuse_cpu: true\n")
    parsed = launch._parse(["--config_file=~/machine.yaml", "~/tiny.yaml"], [])
    assert parsed.config_file == str(tmp_path / "machine.yaml")
    assert parsed.training_script == str(tmp_path / "tiny.yaml")


ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names are always in UTF-8")
@pytest.mark.parametrize(
    ("words", "recipe", "part"),
    [
        (["knobs", "größe"], "", r"'gr\xf6\xdfe': Python reads"),
        (["knobs", b"gr\xf6\xdfe"], "", "not UTF-8"),
        (["prepare", "r.yaml"], "{source: größe.txt}", r"'gr\xf6\xdfe.txt': Python reads"),
        (["prepare", "r.yaml"], "{source: a.txt, dir: größe}", r"'gr\xf6\xdfe': Python reads"),
        (
            ["prepare", "r.yaml"],
            "{source: a.txt, tokenizer: größe}",
            r"'gr\xf6\xdfe': Python reads",
        ),
    ],
)
def test_name_that_python_cannot_read_in_this_locale(tmp_path, words, recipe, part):
    (tmp_path / "a.txt").write_text("abc " * 100)
    (tmp_path / "r.yaml").write_text(f"data: {recipe}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "nanogpt_hf", *words],
        env=os.environ | ASCII | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert part in done.stderr
    assert done.stderr.count("\n") == 1
    if "Python reads" in part:
        assert "not as UTF-8; set LC_ALL=C.UTF-8, or unset PYTHONUTF8" in done.stderr


def test_path_in_an_advised_command_is_quoted(write_run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run("a run")
    data = tmp_path / "my data"
    data.mkdir()
    (data / "train.bin").touch()
    (tmp_path / "ckpt.pt").touch()
    line = complaint(capsys, "pretrain", "gone.yaml", "--run-dir", "a run", "--resume")
    assert "resume 'a run'` continues" in line
    line = complaint(capsys, "import-nanogpt", "ckpt.pt", "out", "--data", "my data")
    assert "import-nanogpt 'my data' 'data/my data'`, and give --data 'data/my data'" in line


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("finetune.model", "~/base"),
        ("distill.teacher", "~/base"),
        ("rl.reward", "~/reward.py:score"),
        ("rl.tools", ["calculator", "~/reward.py"]),
    ],
)
def test_tilde_of_a_knob_is_a_path_that_exists(knob, value, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = replace_knobs(Config(), {knob: value})
    assert missing_path(config)
    (tmp_path / "base").mkdir()
    (tmp_path / "reward.py").touch()
    assert missing_path(config) is None


def test_out_of_cpu_memory_names_knobs_and_writes_nothing(
    capsys, monkeypatch, tmp_path, write_recipe
):
    def allocate(*arguments, **options):
        torch.empty(10**15)

    monkeypatch.setattr("nanogpt_hf.training.micro_batch.train_step", allocate)
    error_line = complaint(capsys, "pretrain", write_recipe(), "--run-dir", tmp_path / "run")
    assert "out of memory: weights " in error_line
    assert "; less with train.micro_batch_size 2 (same tokens per step), " in error_line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "knobs",
    [{"model__n_embd": 256}, {"train__tokens_per_step": 2**15, "train__micro_batch_size": 2**11}],
)
def test_run_that_needs_more_memory_than_is_free_is_refused_before_it_is_built(
    capsys, monkeypatch, tmp_path, write_recipe, knobs
):
    monkeypatch.setattr(micro_batch, "free_memory", lambda: 2 * 10**6)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=0))
    monkeypatch.setattr(build, "start_model", None)
    arguments = ["pretrain", write_recipe(**knobs), "--run-dir", tmp_path / "run"]
    error_line = complaint(capsys, *arguments)
    assert "2.0 MB are free" in error_line
    assert "train.micro_batch_size" in error_line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("free", [5000, 4999])
def test_run_may_take_all_memory_that_is_free_and_no_byte_more(monkeypatch, write_recipe, free):
    monkeypatch.setattr(micro_batch, "free_memory", lambda: free)
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=0))
    monkeypatch.setattr(micro_batch, "footprint", lambda *_, **__: SimpleNamespace(peak=5000.0))
    monkeypatch.setattr(micro_batch, "memory_advice", lambda *_: "")
    config = load_config(write_recipe())
    accelerator = Accelerator(cpu=True)
    with nullcontext() if free == 5000 else pytest.raises(UserError, match="are free"):
        micro_batch.check_memory(config, accelerator, vocab_size=61)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_without_the_character_gets_an_escape(monkeypatch, capfd, encoding):
    monkeypatch.setattr(sys, "stdout", os.fdopen(1, "w", encoding=encoding, closefd=False))
    console.survive_closed_streams()
    print("2 × 3 → \N{SNOWMAN}", flush=True)
    assert "\\u2603" in capfd.readouterr().out
