"""A run's folder, or a part of it, that is lost while the run trains: one line with what to do,
and no new folder that lacks what was in the old one.
"""

import errno
import os
import shlex
import shutil
import socket
import ssl
from types import SimpleNamespace

import pytest

from arguments import argv
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.commands import main
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import differences
from nanogpt_hf.training import loop
from nanogpt_hf.training.trackers import _leave_out_raised_again
from nanogpt_hf.training.tracking import Tracking

STEPS = {"checkpoint__every": 2, "eval__every": 2, "train__max_steps": 4}


@pytest.fixture
def lose(monkeypatch):
    """A function that calls `change` after a step of the next run."""

    def lose(step, change):
        taken = iter(range(1, 100))
        next_step = loop.next_step

        def losing_step(run):
            result = next_step(run)
            if next(taken) == step:
                change()
            return result

        monkeypatch.setattr(loop, "next_step", losing_step)

    return lose


@pytest.mark.long
@pytest.mark.one_row_per("lost")
@pytest.mark.parametrize("becomes_file", [False, True])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("lost", ["run", "run/checkpoints"])
def test_lost_folder_is_one_line_and_is_not_made_again(
    pretrain, tmp_path, lose, lost, step, becomes_file
):
    folder = tmp_path / lost

    def change():
        shutil.move(folder, tmp_path / "moved")
        if becomes_file:
            folder.touch()

    lose(step, change)
    ended = pretrain(**STEPS)
    assert ended.status == 2
    assert ended.err.count("\n") == 1
    assert f"cannot be written: {folder} is no folder any more" in ended.line
    run = shlex.quote(str(tmp_path / "run"))
    assert f"resume {run}; if it was removed, train again" in ended.line
    assert not folder.is_dir()
    # The remedy of the line.
    if becomes_file:
        folder.unlink()
    shutil.move(tmp_path / "moved", folder)
    if RunFolder(tmp_path / "run").checkpoint_folders():
        assert pretrain("--resume", **STEPS).status == 0


@pytest.mark.long
def test_lost_folder_of_the_start_model_is_not_looked_up_on_the_hub(
    tiny_base, text_file, tmp_path, lose, capsys, monkeypatch, forget_accelerate
):
    monkeypatch.chdir(tmp_path)
    # Also the name of a repository on the Hub.
    shutil.copytree(tiny_base, "start")
    lose(3, lambda: shutil.move("start", "moved"))
    knobs = {
        "finetune.freeze_layers": 1,
        "finetune.unfreeze_every": 4,
        "train.max_steps": 5,
        "train.tokens_per_step": 64,
        "train.micro_batch_size": 1,
        "data.block_size": 32,
        "eval.tokens": 64,
        "data.dir": "data",
    }
    options = [word for key, value in knobs.items() for word in (f"--{key}", str(value))]
    words = ["finetune", "--from", "start", "--data", str(text_file), "--run-dir", "run", *options]
    assert main(words) == 2
    captured = capsys.readouterr()
    line = (
        "finetune.model start: the folder that run started from is not here; put it back, or go to "
        "the folder where the run began; a run that has not ended continues with nanogpt-hf resume "
        "run\n"
    )
    assert captured.err == line
    assert "from the Hub" not in captured.out
    # A model of that name on the Hub is not what the run started from.
    before = read_checkpoint(RunFolder("run").checkpoint(4)).state.identity
    difference = "finetune.model: was a folder, which is gone"
    assert differences(before, before | {"origin": {}}) == [difference]
    for command in ("resume run", "resume run --dry-run", "verify run", "inspect run --step 1"):
        assert main(argv(command)) == 2
        captured = capsys.readouterr()
        assert captured.err == line, command
        assert "from the Hub" not in captured.out + captured.err
    assert not RunFolder("run").verified.exists()
    shutil.move("moved", "start")
    forget_accelerate()
    assert main(["resume", "run"]) == 0


@pytest.mark.long
@pytest.mark.slow
def test_lost_folder_of_a_tracker_is_one_line(pretrain, tmp_path, lose):
    pytest.importorskip("tensorboard")
    lose(3, lambda: shutil.rmtree(tmp_path / "run" / "trackers"))
    ended = pretrain("--tracking.trackers", "tensorboard", tracking__every=1, **STEPS)
    assert ended.status == 2
    assert "Traceback" not in ended.err
    assert f"{tmp_path / 'run' / 'trackers'}: cannot be written: " in ended.line
    assert "then continue with " in ended.line


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (OSError(errno.ENOSPC, "x"), "No space left on device", "free some space"),
        (OSError(errno.EDQUOT, "x"), "quota exceeded", "free some space"),
        (OSError(errno.EROFS, "x"), "Read-only file system", "mount the file system"),
        (OSError(errno.EACCES, "x"), "Permission denied", "allow this user"),
        (OSError(errno.EIO, "x"), "Input/output error", "correct that"),
        # of a library in Rust, and of another process
        (ValueError("I/O error: x (os error 30)"), "Read-only file system", "mount the file"),
        (OSError("process 1 on a: [Errno 28] x"), "process 1 on a: No space left", "free some"),
        (ValueError("a reason"), "a reason", "correct that"),
    ],
)
def test_line_of_a_file_that_cannot_be_written(tmp_path, error, reason, remedy):
    run = RunFolder(tmp_path)
    run.checkpoints.mkdir()
    line = str(run.write_error(run.best, error))
    assert line.startswith(f"{run.best}: cannot be written: ")
    assert reason in line
    assert f"; {remedy}" in line
    assert line.endswith("then start again with --overwrite")
    run.checkpoint(2).mkdir()
    line = str(run.write_error(run.best, error))
    assert line.endswith(f"then continue with nanogpt-hf resume {shlex.quote(str(tmp_path))}")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN, errno.EIO])
def test_folder_on_a_volume_that_does_not_answer_is_a_lost_one(tmp_path, monkeypatch, number):
    """Of NFS and FUSE: each question fails, also whether a folder is there."""
    run = RunFolder(tmp_path)
    run.checkpoints.mkdir()

    def stat(path, *arguments, **options):
        raise OSError(number, "x", path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        line = str(run.write_error(run.best, OSError(number, "x")))
    assert line.startswith(f"{run.best}: cannot be written: {tmp_path} is no folder any more")


@pytest.mark.parametrize(
    ("error", "is_of_the_folder"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.ENOENT, "x", "run/trackers/events"), True),
        (OSError(errno.ENOENT, "x", b"run/trackers/events"), True),
        # a tracker's own file, and the network
        (OSError(errno.ENOENT, "x", "elsewhere/log.txt"), False),
        (OSError(errno.ENOENT, "x", "run/../log.txt"), False),
        (PermissionError(errno.EACCES, "x", "/root/.netrc"), False),
        (socket.gaierror(-2, "x"), False),
        (ssl.SSLError(1, "x"), False),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), False),
        (OSError("x"), False),
    ],
)
def test_error_of_a_tracker_is_of_the_folder_if_it_is_in_there(
    tmp_path, monkeypatch, error, is_of_the_folder
):
    monkeypatch.chdir(tmp_path)
    run = RunFolder("run")
    run.checkpoints.mkdir(parents=True)
    tracking = SimpleNamespace(folder=run)
    expected = RunFolderError if is_of_the_folder else type(error)
    with pytest.raises(expected) as caught, Tracking._one_line_for_trackers(tracking):
        raise error
    assert is_of_the_folder or caught.value is error
    assert not is_of_the_folder or str(caught.value).startswith("run/trackers: cannot be written")


def test_errors_of_other_threads_have_the_hook_that_was_there(monkeypatch):
    seen = []
    kept = ValueError("raised again")
    thread = SimpleNamespace(exception=kept)
    for error in (kept, ValueError("another")):
        thrown = SimpleNamespace(exc_value=error, thread=thread)
        _leave_out_raised_again(lambda thrown: seen.append(str(thrown.exc_value)), thrown)
    assert seen == ["another"]
