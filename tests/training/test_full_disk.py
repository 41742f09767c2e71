"""A disk that fills up at any write of a run: one line, nothing half-written, and with room again the run goes on."""

import errno
import json
import os
import re
from types import SimpleNamespace

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.data.tokenizer import char_tokenizer, save_tokenizer
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.training import tracking


def fill(volume, room: int):
    """A file that leaves `room` bytes."""
    ballast = volume / "ballast"
    facts = os.statvfs(volume)
    with ballast.open("wb") as file:
        file.write(bytes(facts.f_bavail * facts.f_frsize - room))
    return ballast


def size_of(folder) -> int:
    return sum(-(-path.lstat().st_size // 4096) * 4096 for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, make_recipe):
    """A run that has all the room it needs, and the words that started it but for its folder."""
    folder = tmp_path_factory.mktemp("whole")
    words = ["pretrain", str(make_recipe(folder / "tiny.yaml")), "--run-dir"]
    assert main([*words, str(folder / "run")]) == 0
    return RunFolder(folder / "run"), words


def not_of_pictures(error: str) -> list[str]:
    """The lines of what was said, but for warnings about the picture and the report, which end no run."""
    return [line for line in error.splitlines() if not re.search(r"/(loss\.png|report\.html): ", line)]


@pytest.mark.parametrize(
    ("share", "file"),
    [(0, "recipe.yaml"), (20, "step_00000002"), (25, "best"), (30, "best"), (45, "step_00000004"), (60, "best")],
)
def test_a_run_that_finds_no_room_is_one_line_and_goes_on_when_there_is_some(whole, volume, capsys, share, file):
    full, words = whole
    run = RunFolder(volume / "run")
    ballast = fill(volume, size_of(full.path) * share // 100)
    assert main([*words, str(run.path)]) == 2
    (line,) = not_of_pictures(capsys.readouterr().err)
    assert file in line
    assert "No space left on device" in line
    assert not [path for path in run.path.rglob("*") if re.search(r"\.(partial|old)$", path.name)]
    ballast.unlink()
    if checkpoint := run.newest_checkpoint():
        ballast = fill(volume, 0)
        kept = (run.metrics, run.recipe, *run.checkpoints.glob("*/*"), *run.best.glob("*"))
        before = {path: path.read_bytes() for path in kept}
        assert main([*words, str(run.path), "--resume"]) == 2
        (line,) = not_of_pictures(capsys.readouterr().err)
        assert "No space left on device" in line
        assert run.newest_checkpoint() == checkpoint
        assert before == {path: path.read_bytes() for path in before}
        ballast.unlink()
    assert main([*words, str(run.path), "--auto-resume"]) == 0
    for file in (
        "best/model.safetensors",
        "final/model.safetensors",
        "checkpoints/step_00000006/optimizer.safetensors",
    ):
        assert (run.path / file).read_bytes() == (full.path / file).read_bytes()
    assert shown(run) == shown(full)


def shown(run: RunFolder) -> list[dict]:
    """What metrics.jsonl says of each step, but for time and memory."""
    timed = ("seconds", "train/tokens_per_second", "train/data_wait", "train/memory_peak_bytes")
    return [{name: value for name, value in event.items() if name not in timed} for event in read_metrics(run)]


def test_a_picture_that_finds_no_room_ends_no_run(whole, volume, capsys):
    full, words = whole
    run = RunFolder(volume / "run")
    fill(volume, size_of(full.path) * 75 // 100)
    assert main([*words, str(run.path)]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said
    assert not not_of_pictures("\n".join(said))
    assert all(line.count("cannot be written: No space left on device") == 1 for line in said)


def test_a_line_of_metrics_that_is_cut_short_is_written_again(whole, tmp_path, monkeypatch, capsys):
    full, words = whole
    run = RunFolder(tmp_path / "run")
    monkeypatch.setattr(tracking, "json", SimpleNamespace(dumps=cut_short(run, at=5)))
    assert main([*words, str(run.path)]) == 2
    assert capsys.readouterr().err == f"{run.metrics}: cannot be written: No space left on device\n"
    assert run.metrics.read_text().endswith('{"step"')
    monkeypatch.undo()
    assert main([*words, str(run.path), "--resume"]) == 0
    assert shown(run) == shown(full)


def cut_short(run: RunFolder, at: int):
    """A json.dumps after which a half of the event of step `at` is written, and then the disk is full."""

    class Half(str):
        def __add__(self, rest):
            with run.metrics.open("a", encoding="utf-8") as file:
                file.write(self[:7])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda event: (Half if event["step"] == at else str)(json.dumps(event))


def test_the_tokenizers_own_error_is_an_oserror_like_all_others(tmp_path):
    hf = char_tokenizer(list("abc")).hf
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        save_tokenizer(hf, tmp_path)
