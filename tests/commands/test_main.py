"""The command line: help, mistakes in one line, exit statuses, run folders."""

import shutil
import subprocess
import sys

import pytest
import torch

from nanogpt_hf.commands import COMMANDS, main
from nanogpt_hf.config.schema import KNOBS
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


@pytest.mark.parametrize("command", ["prepare", "pretrain"])
def test_command_help_lists_every_knob(capsys, command):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert len(KNOBS) > 40
    for key, knob in KNOBS.items():
        line = next(line for line in out.splitlines() if line.startswith(f"  --{key} "))
        assert knob.meaning in line
        if knob.default not in (None, ""):
            assert f"(default {knob.default})" in line


@pytest.mark.parametrize(
    "arguments", [["--help"], ["pretrain", "--help"], ["sample", "--help"], ["pretrain", "no.yaml"]]
)
def test_help_and_mistakes_import_nothing_heavy(root, arguments):
    script = (
        "import sys; sys.argv = ['cli.py', *sys.argv[1:]]\n"
        "from nanogpt_hf.commands import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'accelerate', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    completed = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=root)
    assert completed.returncode == 0, completed.stderr


@pytest.mark.long
def test_garbage_collector_skips_imported_libraries(root):
    code = """
import atexit, gc, sys
from nanogpt_hf.commands import entry_point

atexit.register(lambda: print("frozen at exit:", gc.get_freeze_count() > 10_000, file=sys.stderr))
collected = []
gc.callbacks.append(lambda phase, info: phase == "stop" and collected.append(info["generation"]))
atexit.register(lambda: print("full collections:", collected.count(2), file=sys.stderr))
sys.argv = ["cli.py", "estimate", "recipes/quickstart.yaml"]
entry_point()
"""
    completed = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert completed.returncode == 0
    assert "full collections: 0" in completed.stderr
    assert "frozen at exit: True" in completed.stderr


def test_console_script_equals_cli(root):
    expected = subprocess.run([sys.executable, "cli.py", "--help"], capture_output=True, text=True, cwd=root)
    script = (
        "from nanogpt_hf.commands import entry_point; import sys; sys.argv = ['nanogpt-hf', '--help']; entry_point()"
    )
    installed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root)
    assert expected.returncode == installed.returncode == 0
    assert expected.stdout == installed.stdout
    assert "COMMAND" in expected.stdout


def complaint(capsys, *arguments: str) -> str:
    """Run a command that fails with status 2 and an empty stdout; return its stderr."""
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert "Traceback" not in err
    return err.rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["pretain"], "cli.py: pretain: no such command; did you mean pretrain?; see cli.py --help"),
        (["sample"], "cli.py sample: the following arguments are required: MODEL; see cli.py sample --help"),
        (
            ["pretrain", "R", "--max-steps", "3"],
            "cli.py pretrain: --max-steps: unknown option; did you mean --train.max_steps?",
        ),
        (["pretrain", "R", "--resum"], "cli.py pretrain: --resum: unknown option; did you mean --resume?"),
        (["pretrain", "R", "--train.seed"], "cli.py pretrain: --train.seed: expected a value after it"),
        (["pretrain", "R", "other"], "cli.py pretrain: 'other' is an unexpected argument; see cli.py pretrain --help"),
        (
            ["sample", "M", "--temperature", "warm"],
            "cli.py sample: argument --temperature: expected a number, got 'warm'; see cli.py sample --help",
        ),
        (
            ["sample", "M", "--train.seed", "3"],
            "cli.py sample: --train.seed: this command reads no recipe and has no knobs",
        ),
    ],
)
def test_command_line_mistakes_are_one_line(capsys, arguments, line):
    assert complaint(capsys, *arguments) == line


def test_all_mistakes_of_recipe_and_overrides_are_listed(capsys, write_recipe):
    recipe = write_recipe(optim__learnig_rate=1e-3, model__n_head=3)
    lines = complaint(capsys, "pretrain", recipe, "--train.max_steps", "ten").splitlines()
    assert lines == [
        f"{recipe}: optim.learnig_rate: unknown key; did you mean optim.learning_rate?",
        "--train.max_steps: expected an integer, got 'ten'",
        f"{recipe}: model.n_embd: 16 is not a multiple of model.n_head 3",
        "3 problems; nothing was started.",
    ]


def test_overrides_before_the_recipe(capsys, tmp_path, monkeypatch, write_recipe):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "pretrain", "--train.max_steps", "5", write_recipe(), "--dry-run", "--train.seed=3")
    assert status == 0
    assert "max_steps: 5\n" in out
    assert "seed: 3\n" in out


def bad_source(tmp_path, kind: str) -> str:
    path = tmp_path / {"jsonl": "rows.jsonl"}.get(kind, "text.txt")
    if kind == "empty":
        path.write_text("")
    elif kind == "binary":
        path.write_bytes(bytes(range(256)) * 50)
    elif kind == "jsonl":
        path.write_text('{"text": "fine"}\n{"body": "no text here"}\n')
    return str(path)


@pytest.mark.parametrize("command", ["prepare", "pretrain"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "no such file or folder"),
        ("empty", "empty; there is no text"),
        ("binary", "not UTF-8 text"),
        ("jsonl", "rows.jsonl: line 2: no column 'text' (it has: body); set data.text_column"),
    ],
)
def test_unusable_text_is_one_line_and_writes_nothing(
    capsys, tmp_path, monkeypatch, write_recipe, command, kind, message
):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(data__source=bad_source(tmp_path, kind), data__dir=str(tmp_path / "out" / "data"))
    error = complaint(capsys, command, recipe)
    assert message in error
    assert "\n" not in error
    assert not (tmp_path / "out" / "data").exists()
    assert not (tmp_path / "runs").exists()
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]


def test_existing_run_folder_is_refused(capsys, tmp_path, write_recipe):
    recipe, folder = write_recipe(train__max_steps=2), tmp_path / "run"
    assert run(capsys, "pretrain", recipe, "--run-dir", folder)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert len(before) > 10
    error = complaint(capsys, "pretrain", recipe, "--run-dir", folder)
    assert error == (
        f"{folder}: holds a run; add --resume to continue, --overwrite to start again, or choose another --run-dir"
    )
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_auto_resume_starts_resumes_and_keeps_models(capsys, tmp_path, write_recipe):
    arguments = ["pretrain", write_recipe(train__max_steps=2), "--run-dir", tmp_path / "run", "--auto-resume"]
    assert complaint(capsys, *arguments, "--resume").startswith("--auto-resume chooses between")
    assert run(capsys, *arguments)[0] == 0
    status, out, _ = run(capsys, *arguments, "--train.max_steps", "4")
    assert status == 0
    assert "resuming from" in out
    for removed, contents in (
        ("checkpoints", "best/, final/, metrics up to step 4"),
        ("final", "best/, metrics up to step 4"),
        ("best", "metrics up to step 4"),
    ):
        shutil.rmtree(tmp_path / "run" / removed)
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
        for flag in ("--auto-resume", "--resume"):
            error = complaint(capsys, *arguments[:-1], flag)
            assert (
                f"holds a run ({contents}), but {tmp_path / 'run' / 'checkpoints'} has no checkpoint; if it is" in error
            )
        assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert run(capsys, *arguments[:-1], "--overwrite")[0] == 0


def test_refused_run_keeps_the_lock_of_another(capsys, tmp_path, write_recipe):
    first = RunFolder(tmp_path / "run")
    first.lock()
    try:
        assert "is training in it" in complaint(capsys, "pretrain", write_recipe(), "--run-dir", first.path)
        assert (first.path / ".lock").exists()
    finally:
        first.unlock()


@pytest.mark.parametrize("data", ["run", "run/data", "."])
def test_run_folder_and_data_must_be_separate(capsys, tmp_path, write_recipe, data):
    error = complaint(capsys, "pretrain", write_recipe(data__dir=str(tmp_path / data)), "--run-dir", tmp_path / "run")
    assert "one is inside the other; choose two separate folders" in error
    assert not (tmp_path / "run").exists()


def test_missing_package_is_one_line_and_writes_nothing(capsys, monkeypatch, tmp_path, write_recipe):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr("nanogpt_hf.distributed.deepspeed.find_spec", lambda name: None)
    error = complaint(capsys, "pretrain", write_recipe(), "--run-dir", tmp_path / "run")
    assert error.startswith("the accelerate config sets DeepSpeed, which is not installed")
    assert not (tmp_path / "run").exists()


def test_conflicting_accumulation_is_refused(capsys, monkeypatch, tmp_path, write_recipe):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    error = complaint(capsys, "pretrain", write_recipe(), "--run-dir", tmp_path / "run")
    assert "sets gradient_accumulation_steps 3, but train.tokens_per_step of the recipe needs 2" in error
    assert not (tmp_path / "run").exists()


def test_out_of_memory_names_knobs(capsys, monkeypatch, tmp_path, write_recipe):
    def run_out_of_memory(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr("nanogpt_hf.training.loop.train", run_out_of_memory)
    status, _, err = run(capsys, "pretrain", write_recipe(), "--run-dir", tmp_path / "run")
    assert status == 2
    assert "activations of 4 sequences about 0.0 GB. train.micro_batch_size 2 saves" in err
    assert err.count("\n") == 1


def test_dry_run_prints_sizes_and_writes_nothing(capsys, tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "pretrain", root / "recipes" / "gpt2_124m.yaml", "--dry-run")
    assert status == 0
    # 124,439,808 without biases: 12 · (3 + 1 + 4 + 1 + 1 + 1) · 768 + 768
    assert "parameters: 124,337,664\n" in out
    assert "tokens per step: 491,520" in out
    assert "learning_rate: 0.0006" in out
    assert not list(tmp_path.iterdir())


def test_bug_is_raised(monkeypatch):
    monkeypatch.setattr("nanogpt_hf.commands.prepare.run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["prepare", "recipe.yaml"])


@pytest.mark.parametrize("name", ["compare", "report", "export", "import-nanogpt", "push", "estimate"])
def test_command_that_writes_alone_refuses_several_processes(capsys, monkeypatch, name):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "needs no launch" not in run(capsys, name, "runs/one")[2], "a pod of a cluster may have this variable"
    monkeypatch.setenv("LOCAL_RANK", "0")
    status, _, err = run(capsys, name, "runs/one")
    assert status == 2
    assert err == f"{name} needs no launch, and runs in one process: python cli.py {name}\n"


def test_option_of_launch_after_the_command_is_named(capsys, write_recipe):
    status, _, err = run(capsys, "pretrain", "--config_file", "machine.yaml", write_recipe())
    assert status == 2
    assert "--config_file is an option of launch: python cli.py launch --config_file F COMMAND" in err
