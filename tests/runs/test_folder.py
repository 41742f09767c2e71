"""A folder that holds a run is not emptied by accident, and links to a larger disk are written through or refused."""

import shutil
from pathlib import Path

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics


@pytest.fixture(scope="module")
def whole(tmp_path_factory, make_recipe, forget_accelerate) -> tuple[Path, Path]:
    """A recipe, and the folder of a run of it that came to its end, step 6."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = make_recipe(folder / "tiny.yaml")
    assert main(["pretrain", str(recipe), "--run-dir", str(folder / "run")]) == 0
    forget_accelerate()
    return recipe, folder / "run"


@pytest.fixture
def pretrain(capsys, tmp_path, whole, forget_accelerate):
    """Run `pretrain` on the recipe into `run`; return the exit status and what was printed."""

    def pretrain(*arguments: str | int) -> tuple[int, str]:
        forget_accelerate()
        capsys.readouterr()
        status = main(["pretrain", str(whole[0]), "--run-dir", str(tmp_path / "run"), *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.err if status else said.out + said.err

    return pretrain


@pytest.fixture
def run(tmp_path, whole) -> RunFolder:
    """A run that came to its end."""
    shutil.copytree(whole[1], tmp_path / "run")
    return RunFolder(tmp_path / "run")


def everything(folder: Path) -> dict[Path, object]:
    """All that is in a folder, with the links in it."""
    return {path: path.readlink() if path.is_symlink() else path.stat().st_mtime_ns for path in folder.rglob("*")}


def out_of_sight(run: RunFolder, how: str) -> None:
    """Take the checkpoints away, as a volume that is not mounted does."""
    shutil.move(run.checkpoints, run.path.with_name("elsewhere"))
    if how == "dangling link":
        run.checkpoints.symlink_to(run.path.with_name("not-mounted"))
    elif how == "empty":
        run.checkpoints.mkdir()
    elif how == "empty link":
        run.path.with_name("mount-point").mkdir()
        run.checkpoints.symlink_to(run.path.with_name("mount-point"))


@pytest.mark.parametrize("how", ["dangling link", "empty", "empty link", "gone"])
@pytest.mark.parametrize("left", ["best and final", "best", "metrics"])
def test_a_run_whose_checkpoints_are_out_of_sight_is_left_alone(pretrain, run, tmp_path, how, left):
    for folder in {"best and final": (), "best": (run.final,), "metrics": (run.best, run.final)}[left]:
        shutil.rmtree(folder)
    out_of_sight(run, how)
    before = everything(tmp_path)
    for flag in ("--auto-resume", "--resume"):
        status, error = pretrain(flag)
        assert status == 2
        assert error.count("\n") == 1, error
        assert "not mounted, mount it; else " in error
        assert str(run.checkpoints) in error
        if how != "dangling link":
            assert "metrics up to step 6), but" in error
            assert "start again with --overwrite" in error
    assert everything(tmp_path) == before


@pytest.mark.parametrize("how", ["dangling link", "file"])
@pytest.mark.parametrize("name", ["checkpoints", "best", "final", "trackers"])
def test_overwrite_removes_nothing_if_a_folder_of_the_run_cannot_be_used(pretrain, run, tmp_path, name, how):
    folder = run.path / name
    shutil.rmtree(folder, ignore_errors=True)
    if how == "file":
        folder.write_text("mine")
    else:
        folder.symlink_to(tmp_path / "not-mounted")
    before = everything(tmp_path)
    status, error = pretrain("--overwrite")
    assert (status, error.count("\n")) == (2, 1)
    assert error.startswith(f"{folder}: is a ")
    assert everything(tmp_path) == before


def test_overwrite_follows_a_link_to_the_checkpoints_and_leaves_what_else_is_there(pretrain, run, tmp_path):
    shutil.move(run.checkpoints, tmp_path / "larger")
    run.checkpoints.symlink_to(tmp_path / "larger")
    (tmp_path / "larger" / "lost+found").mkdir()
    status, said = pretrain("--overwrite", "--train.max_steps", 4)
    assert status == 0, said
    assert run.checkpoints.is_symlink()
    names = sorted(path.name for path in (tmp_path / "larger").iterdir())
    assert names == ["lost+found", "step_00000002", "step_00000004"]


@pytest.mark.parametrize("evaluations", [3, 100])
def test_auto_resume_starts_a_run_again_that_was_killed_before_its_first_checkpoint(
    pretrain, tmp_path, monkeypatch, evaluations
):
    from nanogpt_hf.training import loop

    class Killed(BaseException):
        pass

    def kill(*arguments):
        raise Killed

    knobs = ("--checkpoint.every", 5, "--eval.every", evaluations)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_checkpoint", kill)
        with pytest.raises(Killed):
            pretrain("--auto-resume", *knobs)
    run = RunFolder(tmp_path / "run")
    assert max(event["step"] for event in read_metrics(run)) == 5
    assert run.best.exists() == (evaluations == 3)
    assert not run.checkpoint_folders()
    status, said = pretrain("--auto-resume", *knobs)
    assert status == 0, said
    assert [event["step"] for event in read_metrics(run) if "train/loss" in event] == [1, 2, 3, 4, 5, 6]
    # with a checkpoint once written, the same folder without one is a run whose checkpoints are gone
    for folder in run.checkpoint_folders():
        shutil.rmtree(folder)
    assert pretrain("--auto-resume")[0] == 2


@pytest.mark.parametrize("name", ["best", "final", "newest checkpoint"])
def test_a_link_to_a_larger_disk_is_written_through(pretrain, run, tmp_path, name):
    larger = tmp_path / "larger"
    folder = run.newest_checkpoint() if name == "newest checkpoint" else run.path / name
    larger.mkdir()
    shutil.move(folder, larger / folder.name)
    folder.symlink_to(larger / folder.name)
    before = everything(larger)
    status, said = pretrain("--resume", "--train.max_steps", 12)
    assert status == 0, said
    assert run.newest_checkpoint() == run.checkpoint(12)
    if name == "newest checkpoint":  # it was rotated out; what the user moved stays
        assert not folder.is_symlink()
        assert everything(larger) == before
    else:
        assert folder.is_symlink()
        assert "model.safetensors" in [path.name for path in (larger / name).iterdir()]
        assert everything(larger) != before
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".partial", ".old"))]
    assert pretrain("--overwrite")[0] == 0
    assert run.best.is_symlink() == (name == "best")


def test_a_folder_with_only_links_to_empty_folders_is_a_beginning(pretrain, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    for folder in (run.checkpoints, run.best, run.final):
        (tmp_path / "larger" / folder.name).mkdir(parents=True)
        folder.symlink_to(tmp_path / "larger" / folder.name)
    status, said = pretrain()
    assert status == 0, said
    assert (tmp_path / "larger" / "best" / "config.json").exists()
    assert (tmp_path / "larger" / "checkpoints" / "step_00000006").exists()


def test_a_link_to_a_folder_of_somebody_elses_is_refused(pretrain, run, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    shutil.rmtree(run.best)
    run.best.symlink_to(tmp_path / "home")
    for flag in ("--resume", "--overwrite", "--auto-resume"):
        status, error = pretrain(flag, "--train.max_steps", 12)
        assert status == 2
        assert "which is not a model folder; link an empty folder" in error
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_a_model_folder_that_cannot_be_renamed_is_refused(tmp_path, monkeypatch):
    run = RunFolder(tmp_path / "run")
    run.start("model: {}\n")
    run.best.mkdir()
    monkeypatch.setattr("nanogpt_hf.runs.folder.os.path.ismount", lambda path: path == run.best)
    with pytest.raises(RunFolderError, match=r"models replace it in one rename.*link a folder inside the volume"):
        run.check(resume=False, overwrite=True)


def test_nothing_is_removed_if_something_cannot_be(tmp_path, monkeypatch):
    run = RunFolder(tmp_path / "run")
    run.start("model: {}\n")
    run.checkpoint(4).mkdir()
    (run.best / "inside").mkdir(parents=True)
    before = everything(tmp_path)
    monkeypatch.setattr("nanogpt_hf.runs.folder.os.access", lambda path, mode: not str(path).endswith("inside"))
    with pytest.raises(RunFolderError, match=r"inside: cannot be written, so the run in .* cannot be removed"):
        run.start("model: {}\n")
    assert {path for path in before if path != run.checkpoints} <= set(everything(tmp_path))


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    run = RunFolder(tmp_path)
    for step in (99_999_999, 100_000_000, 7):
        run.checkpoint(step).mkdir(parents=True)
    run.checkpoint(7).rename(run.checkpoints / ".step_00000007.old")  # a kill came between two renames
    names = [path.name for path in run.checkpoint_folders()]
    assert names == [".step_00000007.old", "step_99999999", "step_100000000"]
