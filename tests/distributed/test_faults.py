"""File operations that fail once, in one process and in each of two: the run ends in one line or
continues, and the resumed run's bytes are those of an undisturbed one.

Each cell tries a few operations with one error each; with EVERY_OPERATION=1 in the environment all
with all errors.
"""

import errno
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import operations
from assertions import file_contents, numbers
from nanogpt_hf.runs.folder import RunFolder

EVERY = os.environ.get("EVERY_OPERATION")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0 if EVERY else 400),
    pytest.mark.skipif(
        sys.platform != "linux" or not shutil.which("cc"),
        reason="no C compiler on Linux: faults.c makes operations fail",
    ),
]
ERRORS = ("ENOSPC", "EIO", "EACCES", "EMFILE")
KNOBS = {"model__n_layer": 1, "train__max_steps": 4, "eval__every": 2, "checkpoint__keep": 1}
KNOBS |= {"eval__samples": ["A cat "], "eval__sample_tokens": 4}


@pytest.fixture(scope="module")
def launch(start_warm, tmp_path_factory):
    with start_warm(**operations.build_faults(tmp_path_factory.mktemp("faults"))) as launch:
        yield launch


@pytest.fixture(scope="module")
def faulty(request, launch, tmp_path_factory, make_recipe):
    """A function that trains in a new folder, in which the nth operation of a rank fails; and the
    folder of a run without a fault. One process prepares the data, too; of two, either one would.
    """
    folder = tmp_path_factory.mktemp("faults")
    recipe = make_recipe(folder / "recipe.yaml", **KNOBS)

    def faulty(name: str, rank: int = 0, point: int = 0, error: str = "EIO") -> tuple[int, str]:
        """The exit status and the output; NAME.fault has the operation and their number."""
        (folder / name).mkdir(exist_ok=True)
        data = folder / name if request.param == "cpu" else folder
        ended = []
        launch(
            *(request.param, "pretrain", recipe, "--auto-resume"),
            *("--run-dir", folder / name / "run", "--data.dir", data / "data"),
            FAULT=f"{rank}:{error}:{point}",
            ends_with=lambda *end: ended.append(end),
        )
        return ended[0]

    status, output = faulty("undisturbed")
    assert status == 0, output
    return faulty, folder, request.param


def assert_one_line(error: str, status: int, output: str) -> None:
    """A command whose operation failed with `error` has gone on, or ended in one line."""
    reason = os.strerror(getattr(errno, error))
    lines = [line for line in output.splitlines() if reason in line]
    assert "Traceback" not in output
    assert status == 0 or (status == 2 and len(lines) == 1), (status, output)


def assert_undisturbed(failed: Path, undisturbed: Path) -> None:
    """Data, checkpoints, models and metrics are equal; hidden leftovers are removed at the next
    start.
    """
    ours, theirs = (
        {
            name: content
            for name, content in file_contents(folder).items()
            if name.endswith((".safetensors", ".arrow", "manifest.json", "tokenizer.json"))
            and not re.search(r"/\.\w+\.old/", f"/{name}")
        }
        for folder in (failed, undisturbed)
    )
    assert len(theirs) >= 8
    assert ours == theirs
    events = (numbers(RunFolder(folder / "run")) for folder in (failed, undisturbed))
    assert next(events) == next(events)


@pytest.mark.parametrize(
    ("faulty", "rank"),
    [("cpu", 0), ("cpu_ddp", 0), ("cpu_ddp", 1), ("fsdp2", 0), ("fsdp2", 1)],
    indirect=["faulty"],
)
def test_resume_after_a_failed_operation_is_exact(faulty, rank):
    train, folder, layout = faulty
    shutil.rmtree(folder / "counted", ignore_errors=True)
    assert train("counted", rank)[0] == 0
    count = int((folder / "counted.fault").read_text().partition("\n")[2])
    assert bool(count) == (rank == 0 or layout == "fsdp2")  # who has shards of its own
    # the eighth of the first FSDP2 process once left the others waiting
    points = range(1, count + 1) if EVERY else range(8, count + 1, 27)
    for number, point in enumerate(points):
        for error in ERRORS if EVERY else [ERRORS[number % 4]]:
            shutil.rmtree(folder / "failed", ignore_errors=True)
            status, output = train("failed", rank, point, error)
            operation = (folder / "failed.fault").read_text().partition("\n")[0]
            assert operation, (point, error)
            assert_one_line(error, status, output)
            again, output = train("failed") if status else (0, "")
            assert again == 0, (operation, error, output)
            assert_undisturbed(folder / "failed", folder / "undisturbed")
