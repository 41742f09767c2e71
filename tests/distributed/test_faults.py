"""File operations that fail on one of two processes: both end, and the resumed run's bytes are
those of an undisturbed one.
"""

import shutil
import sys

import pytest

import operations
from assertions import assert_undisturbed

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        sys.platform != "linux" or not shutil.which("cc"),
        reason="no C compiler on Linux: faults.c makes operations fail",
    ),
]
KNOBS = {"model__n_layer": 1, "train__max_steps": 4, "eval__every": 2, "checkpoint__keep": 1}


@pytest.fixture(scope="module")
def launch(start_warm, tmp_path_factory):
    with start_warm(**operations.build_faults(tmp_path_factory.mktemp("faults"))) as launch:
        yield launch


@pytest.fixture(scope="module", params=["cpu_ddp", "fsdp2"])
def faulty(request, launch, tmp_path_factory, make_recipe):
    """A function that trains on two processes in a new folder, in which the nth operation of a rank
    fails; and the folder of a run without a fault.
    """
    folder = tmp_path_factory.mktemp("faults")
    recipe = make_recipe(folder / "recipe.yaml", **KNOBS)

    def faulty(name: str, rank: int = 0, point: int = 0, error: str = "EIO") -> tuple[int, str]:
        """The exit status and the output; NAME.fault has the operation and their number."""
        (folder / name).mkdir(exist_ok=True)
        ended = []
        launch(
            *(request.param, "pretrain", recipe, "--auto-resume"),
            *("--run-dir", folder / name / "run"),
            FAULT=f"{rank}:{error}:{point}",
            ends_with=lambda *end: ended.append(end),
        )
        return ended[0]

    status, output = faulty("undisturbed")  # prepares the data
    assert status == 0, output
    return faulty, folder


@pytest.mark.parametrize(("rank", "stride"), [(0, 57), (1, 11)])
def test_resume_after_a_failed_operation_of_a_rank_is_exact(faulty, rank, stride):
    """Every 11th operation of rank 1, and fewer of rank 0, since one process has those, too."""
    train, folder = faulty
    assert train("counted", rank)[0] == 0
    _, _, count = (folder / "counted.fault").read_text().partition("\n")
    for number, point in enumerate(range(1, int(count) + 1, stride)):
        shutil.rmtree(folder / "failed", ignore_errors=True)
        error = operations.ERRORS[number % 4]
        status, output = train("failed", rank, point, error)
        operations.check_fault(error, status, output)
        if status:
            status, output = train("failed")
        assert status == 0, (point, error, output)
        assert_undisturbed(folder / "failed", folder / "undisturbed", 8)
