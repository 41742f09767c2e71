"""Run folders: never emptied by accident; links to another disk are followed or refused."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import filelock
import pytest

from arguments import argv
from assertions import column
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.config.schema import get_value, replace_knobs
from nanogpt_hf.errors import ConfigError, RunFolderError
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.runs.recipe import read_recipe, read_recipe_to_train, recipe_text


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, make_recipe, forget_accelerate) -> tuple[Path, Path]:
    """A recipe and the folder of its finished run of 6 steps."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = make_recipe(folder / "tiny.yaml")
    assert main(["pretrain", str(recipe), "--run-dir", str(folder / "run")]) == 0
    forget_accelerate()
    return recipe, folder / "run"


@pytest.fixture
def pretrain(capsys, tmp_path, finished_run, forget_accelerate):
    """Run `pretrain` on the recipe into `run`; return exit status and output."""

    def pretrain(*arguments: str | int) -> tuple[int, str]:
        forget_accelerate()
        capsys.readouterr()
        command = ["pretrain", str(finished_run[0]), "--run-dir", str(tmp_path / "run")]
        status = main([*command, *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.err if status else captured.out + captured.err

    return pretrain


@pytest.fixture
def run(tmp_path, finished_run) -> RunFolder:
    """A copy of the finished run."""
    shutil.copytree(finished_run[1], tmp_path / "run")
    return RunFolder(tmp_path / "run")


def contents(folder: Path) -> dict[Path, object]:
    """Every path below a folder with its time, or the target of a link."""
    return {
        path: path.readlink() if path.is_symlink() else path.stat().st_mtime_ns
        for path in folder.rglob("*")
    }


def move_checkpoints(run: RunFolder, damage: str) -> None:
    """Move the checkpoints away, as if their volume were not mounted."""
    shutil.move(run.checkpoints, run.path.with_name("elsewhere"))
    if damage == "dangling link":
        run.checkpoints.symlink_to(run.path.with_name("not-mounted"))
    elif damage == "empty":
        run.checkpoints.mkdir()
    elif damage == "empty link":
        run.path.with_name("mount-point").mkdir()
        run.checkpoints.symlink_to(run.path.with_name("mount-point"))


@pytest.mark.parametrize("damage", ["dangling link", "empty", "empty link", "missing"])
def test_run_without_its_checkpoints_is_not_changed(pretrain, run, tmp_path, damage):
    move_checkpoints(run, damage)
    before = contents(tmp_path)
    for flag in ("--auto-resume", "--resume"):
        status, error = pretrain(flag)
        assert status == 2
        assert error.count("\n") == 1, error
        assert str(run.checkpoints) in error
        if damage != "dangling link":
            assert "--overwrite" in error
    assert contents(tmp_path) == before


@pytest.mark.parametrize("damage", ["dangling link", "file"])
@pytest.mark.parametrize("name", ["checkpoints", "best", "final", "trackers"])
def test_overwrite_removes_nothing_if_a_folder_is_unusable(pretrain, run, tmp_path, name, damage):
    folder = run.path / name
    shutil.rmtree(folder, ignore_errors=True)
    if damage == "file":
        folder.write_text("mine")
    else:
        folder.symlink_to(tmp_path / "not-mounted")
    before = contents(tmp_path)
    status, error = pretrain("--overwrite")
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith(f"{folder}: is a file, or a link to {folder.resolve()}")
    assert contents(tmp_path) == before


def test_overwrite_follows_link_to_checkpoints_and_keeps_other_files(pretrain, run, tmp_path):
    shutil.move(run.checkpoints, tmp_path / "larger")
    run.checkpoints.symlink_to(tmp_path / "larger")
    (tmp_path / "larger" / "lost+found").mkdir()
    status, captured = pretrain("--overwrite", "--train.max_steps", 4)
    assert status == 0, captured
    assert run.checkpoints.is_symlink()
    names = sorted(path.name for path in (tmp_path / "larger").iterdir())
    assert names == ["lost+found", "step_00000002", "step_00000004"]


@pytest.mark.long
@pytest.mark.parametrize("evaluations", [3, 100])
def test_auto_resume_restarts_run_killed_before_first_checkpoint(
    pretrain, tmp_path, monkeypatch, evaluations
):
    from nanogpt_hf.checkpoint.writer import CheckpointWriter

    class Killed(BaseException):
        pass

    def kill(*arguments):
        raise Killed

    knobs = ("--checkpoint.every", 5, "--eval.every", evaluations)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "save", kill)
        with pytest.raises(Killed):
            pretrain("--auto-resume", *knobs)
    run = RunFolder(tmp_path / "run")
    assert max(event["step"] for event in read_metrics(run)) == 5
    assert run.best.exists() == (evaluations == 3)
    assert not run.checkpoint_folders()
    status, captured = pretrain("--auto-resume", *knobs)
    assert status == 0, captured
    assert list(column(run, "train/loss")) == [1, 2, 3, 4, 5, 6]
    # once a checkpoint was written, the same folder without one is a run that lost its checkpoints
    for folder in run.checkpoint_folders():
        shutil.rmtree(folder)
    assert pretrain("--auto-resume")[0] == 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["newest checkpoint", "best"])
def test_link_to_another_disk_is_followed(pretrain, run, tmp_path, name):
    larger = tmp_path / "larger"
    folder = run.newest_checkpoint() if name == "newest checkpoint" else run.path / name
    larger.mkdir()
    shutil.move(folder, larger / folder.name)
    folder.symlink_to(larger / folder.name)
    before = contents(larger)
    status, captured = pretrain("--resume", "--train.max_steps", 12)
    assert status == 0, captured
    assert run.newest_checkpoint() == run.checkpoint(12)
    if name == "newest checkpoint":  # the old checkpoint was deleted; the user's files stay
        assert not folder.is_symlink()
        assert contents(larger) == before
    else:
        assert folder.is_symlink()
        assert "model.safetensors" in [path.name for path in (larger / name).iterdir()]
        assert contents(larger) != before
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".partial", ".old"))]
    assert pretrain("--overwrite")[0] == 0
    assert run.best.is_symlink() == (name == "best")


def test_folder_of_another_program_is_refused_and_keeps_its_lock_file(pretrain, tmp_path):
    (tmp_path / "run").mkdir()
    for name in (".lock", "notes.txt"):
        (tmp_path / "run" / name).write_text("mine")
    before = contents(tmp_path)
    status, error = pretrain()
    assert status == 2
    assert "is not empty and holds no run" in error
    assert contents(tmp_path) == before
    assert (tmp_path / "run" / ".lock").read_text() == "mine"


def test_link_to_foreign_folder_is_refused(pretrain, run, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    shutil.rmtree(run.best)
    run.best.symlink_to(tmp_path / "home")
    for flag in ("--resume", "--overwrite", "--auto-resume"):
        status, error = pretrain(flag, "--train.max_steps", 12)
        assert status == 2
        assert str(run.best) in error
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_checkpoints_are_sorted_by_step(tmp_path):
    run = RunFolder(tmp_path)
    for step in (99_999_999, 100_000_000, 7):
        run.checkpoint(step).mkdir(parents=True)
    names = [path.name for path in run.checkpoint_folders()]
    assert names == ["step_00000007", "step_99999999", "step_100000000"]


def test_a_lock_held_for_a_moment_is_waited_for(tmp_path):
    lock = filelock.FileLock(tmp_path / ".lock", thread_local=False)
    lock.acquire()
    threading.Timer(0.2, lock.release).start()
    RunFolder(tmp_path).check_unlocked()


@pytest.mark.one_row_per("written")
@pytest.mark.parametrize("written", [recipe_text, config_to_yaml], ids=["now", "before 'end'"])
@pytest.mark.parametrize("license", [None, "apache-2.0"])
def test_recipe_that_was_cut_in_its_last_section_is_damaged(
    tmp_path, write_recipe, license, written
):
    """Wherever it is cut, the file is refused or means the same."""
    overrides = {"hub.license": license} if license else {}
    config = replace(load_config(write_recipe(), overrides), name="run")
    text = written(config)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    whole = []
    for length in range(text.index("\nhub:") + 1, len(text) + 1):
        run.recipe.write_text(text[:length])
        try:
            assert read_recipe(run) == config
        except RunFolderError:
            continue
        whole.append(text[length:])
    end = text.removeprefix(config_to_yaml(config))
    assert end == ("...\n" if written is recipe_text else "")
    # An editor may leave the last newline out.
    kept = [end] if license else ["\n" + end, end]
    assert whole == ([*kept, "\n", ""] if end else kept)


OVERLAP = {"optim.schedule": "wsd", "optim.warmup_steps": 6}


@pytest.mark.parametrize(
    "broken",
    [
        OVERLAP,
        {"train.gradient_groups": 3},
        {"optim.min_learning_rate": 9.0},
        {"lora.quantize": "4bit", "lora.merge": True},
        {"data.format": "chat", "data.tokenizer": "char"},
        {"data.validation_fraction": 0.0},
        {"hub.license": "No License"},
        {"train.stages": [{"at": 3, "optim.min_learning_rate": 9.0}]},
    ],
)
def test_recipe_of_a_run_that_breaks_a_rule_is_read_but_not_trained(tmp_path, write_recipe, broken):
    """The rule may be newer than the run."""
    config = replace_knobs(load_config(write_recipe()), broken)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.recipe.write_text(recipe_text(config))
    assert {key: get_value(read_recipe(run), key) for key in broken} == broken
    seed = [("train.seed", "7")]
    assert read_recipe(run, seed).train.seed == 7
    for overrides in ((), seed):
        with pytest.raises(ConfigError):
            read_recipe_to_train(run, overrides)


def test_knob_that_is_gone_asks_for_nothing_if_a_run_recorded_it_as_null(tmp_path, write_recipe):
    config = load_config(write_recipe())
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    text = recipe_text(config)
    run.recipe.write_text(text.replace("\ndistill:\n", "\ndistill:\n  revision: null\n"))
    assert read_recipe(run) == read_recipe_to_train(run) == replace(config, name="run")
    run.recipe.write_text(text.replace("\ndistill:\n", "\ndistill:\n  revision: main\n"))
    with pytest.raises(RunFolderError, match=r"distill\.revision: unknown key"):
        read_recipe(run)
    # A recipe that a person wrote.
    recipe = write_recipe()
    recipe.write_text(recipe.read_text() + "\ndistill: {revision: null}\n")
    with pytest.raises(ConfigError, match=r"distill\.revision: unknown key"):
        load_config(recipe)


def test_commands_look_at_a_run_that_breaks_a_newer_rule(run, tmp_path, refused, capsys):
    run.recipe.write_text(recipe_text(replace_knobs(read_recipe(run), OVERLAP)))
    for line in (
        "report {}",
        "compare {} --output {out}.png",
        "verify {} --steps 4:6",
        "inspect {} --step 2",
        "sample {} --step 4 --max-new-tokens 2",
        "evaluate {} --json {out}",
    ):
        line = line.replace("{out}", str(tmp_path / "out"))
        assert main(argv(line, run.path)) == 0, capsys.readouterr()
        assert "optim.warmup_steps" not in capsys.readouterr().err
    assert "6 steps of warm-up and 1 of decay" in refused("resume", run.path)
    # What it says to do helps.
    assert main(argv("resume {} --dry-run --optim.warmup_steps 2", run.path)) == 0


def test_waiting_process_keeps_its_lock_after_a_run_that_was_not_started(tmp_path, monkeypatch):
    """The first removes its folder; the second, which has waited, locks a folder that is there."""
    first, second = (RunFolder(tmp_path / "run") for _ in range(2))
    first.lock()
    release = first._lock.release

    def release_to_the_second():
        release()
        second.lock()

    monkeypatch.setattr(first._lock, "release", release_to_the_second)
    first.unlock()
    with pytest.raises(RunFolderError, match="another process is training in it"):
        RunFolder(tmp_path / "run").lock()
    second.unlock()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("part", ["best/x", "final/x/y", "checkpoints/x"])
def test_nothing_is_exported_into_a_folder_that_the_run_replaces(finished_run, capsys, part):
    _, run = finished_run
    before = sorted(run.rglob("*"))
    assert main(["export", str(run), str(run / part)]) == 2
    folder = run / Path(part).parts[0]
    assert capsys.readouterr().err.endswith(
        f"{run / part}: is inside {folder}, which the run replaces; choose another\n"
    )
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("part", ["best", "final", "checkpoints", "checkpoints/step_00000006"])
@pytest.mark.parametrize("command", ["resume", "report"])
def test_a_part_of_a_run_is_refused_by_the_name_of_the_run(finished_run, capsys, command, part):
    _, run = finished_run
    assert main([command, str(run / part)]) == 2
    assert capsys.readouterr().err == f"{run / part}: holds no run; give {run}\n"
