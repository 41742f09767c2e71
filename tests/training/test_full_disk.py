"""A disk that becomes full during a run: one line, nothing half-written, and the run resumes
when there is space.
"""

import os
import re

import pytest

from assertions import numbers
from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder

pytestmark = pytest.mark.long


def fill_disk(volume, room: int):
    """Write a file that leaves `room` bytes free."""
    ballast = volume / "ballast"
    usage = os.statvfs(volume)
    with ballast.open("wb") as file:
        file.write(bytes(usage.f_bavail * usage.f_frsize - room))
    return ballast


def size_of(folder) -> int:
    return sum(-(-path.lstat().st_size // 4096) * 4096 for path in folder.rglob("*"))


@pytest.fixture(scope="module", autouse=True)
def draw_plots(loss_plots):
    with loss_plots():
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory, make_recipe, draw_plots):
    """A run with enough space, and the arguments that started it without the folder."""
    folder = tmp_path_factory.mktemp("reference")
    arguments = ["pretrain", str(make_recipe(folder / "tiny.yaml")), "--run-dir"]
    assert main([*arguments, str(folder / "run")]) == 0
    return RunFolder(folder / "run"), arguments


def errors(stderr: str) -> list[str]:
    """The lines of stderr without warnings about plot and report, which do not end a run."""
    return [
        line for line in stderr.splitlines() if not re.search(r"/(loss\.png|report\.html): ", line)
    ]


@pytest.mark.one_row_per
@pytest.mark.parametrize(
    ("share", "file"),
    [
        (0, "recipe.yaml"),
        (18, "step_00000002"),
        pytest.param(26, "best", marks=pytest.mark.slow),
        (34, "best"),
        pytest.param(50, "step_00000004", marks=pytest.mark.slow),
        pytest.param(66, "best", marks=pytest.mark.slow),
    ],
)
def test_full_disk_is_one_line_and_resumes_exactly(reference, volume, capsys, share, file):
    complete, arguments = reference
    run = RunFolder(volume / "run")
    ballast = fill_disk(volume, size_of(complete.path) * share // 100)
    assert main([*arguments, str(run.path)]) == 2
    (line,) = errors(capsys.readouterr().err)
    assert file in line
    assert "No space left on device" in line
    assert not [path for path in run.path.rglob("*") if re.search(r"\.(partial|old)$", path.name)]
    ballast.unlink()
    if checkpoint := run.newest_checkpoint():
        ballast = fill_disk(volume, 0)
        files = (run.metrics, run.recipe, *run.checkpoints.glob("*/*"), *run.best.glob("*"))
        before = {path: path.read_bytes() for path in files}
        assert main([*arguments, str(run.path), "--resume"]) == 2
        (line,) = errors(capsys.readouterr().err)
        assert "No space left on device" in line
        assert run.newest_checkpoint() == checkpoint
        assert before == {path: path.read_bytes() for path in before}
        ballast.unlink()
    assert main([*arguments, str(run.path), "--auto-resume"]) == 0
    for file in (
        "best/model.safetensors",
        "final/model.safetensors",
        "checkpoints/step_00000006/optimizer.safetensors",
    ):
        assert (run.path / file).read_bytes() == (complete.path / file).read_bytes()
    assert numbers(run) == numbers(complete)


def test_plot_without_space_does_not_end_the_run(reference, volume, capsys):
    complete, arguments = reference
    run = RunFolder(volume / "run")
    fill_disk(volume, size_of(complete.path) * 90 // 100)
    assert main([*arguments, str(run.path)]) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert warnings
    assert not errors("\n".join(warnings))
    assert all(line.count("cannot be written: No space left on device") == 1 for line in warnings)
