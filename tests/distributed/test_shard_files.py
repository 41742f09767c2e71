"""Checkpoints of several processes: each writes its parts; the loss of one, or of its disk,
leaves the older ones.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from assertions import held_by_ranks, tensor_files
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.runs.folder import RunFolder

pytestmark = pytest.mark.long
OPTIONS = {
    "model__dropout": 0.1,
    "train__max_steps": 4,
    "train__micro_batch_size": 2,
    "eval__every": 100,
    "checkpoint__every": 1,
    "checkpoint__keep": 9,
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, make_recipe) -> Path:
    return make_recipe(tmp_path_factory.mktemp("shards") / "recipe_of_shards.yaml", **OPTIONS)


@pytest.fixture(scope="module")
def train(recipe, launch_warm):
    def train(machine: str, folder: Path, *arguments: str, **options) -> RunFolder:
        return launch_warm(machine, "pretrain", "--run-dir", folder, recipe, *arguments, **options)

    return train


@pytest.fixture(scope="module")
def uninterrupted(train, recipe) -> RunFolder:
    return train("fsdp2", recipe.parent / "uninterrupted")


def test_each_process_writes_its_parts(uninterrupted):
    folder = uninterrupted.checkpoint(4)
    names = [
        f"{kind}-0000{n}-of-00002.safetensors" for kind in ("model", "optimizer") for n in (1, 2)
    ]
    assert sorted(path.name for path in folder.iterdir()) == [
        "checksums.json",
        *names,
        "state.json",
    ]
    assert sorted(json.loads((folder / "checksums.json").read_text())) == [*names, "state.json"]
    for kind in ("model", "optimizer"):
        sizes = [path.stat().st_size for path in folder.glob(f"{kind}-*")]
        assert max(sizes) < 0.6 * sum(sizes)


# Process 1 only writes its two files of each checkpoint: 2 changes each, before and after it is
# opened. Process 0 also creates, names and removes folders.
KILLS = [f"1:killed:{n}" for n in (1, 2, 3, 4, 7)] + [
    f"0:killed:{n}" for n in (9, 12, 14, 16, 18, 20, 23, 26, 30)
]


@pytest.mark.parametrize(
    "fault",
    [
        KILLS[0],
        *(pytest.param(fault, marks=pytest.mark.slow) for fault in KILLS[1:12:5]),
        *(
            pytest.param(fault, marks=pytest.mark.exhaustive)
            for fault in KILLS[1:]
            if fault not in KILLS[1:12:5]
        ),
    ],
)
def test_resume_after_a_process_is_killed_during_a_write_is_exact(
    train, uninterrupted, tmp_path, fault
):
    def ends_with(status: int, output: str) -> None:
        assert status == 9, output  # the other process is lost, too, with status 1

    run = train("fsdp2", tmp_path / "run", FAULT=fault, ends_with=ends_with)
    for folder in run.checkpoint_folders():
        read_checkpoint(folder)
    train("fsdp2", tmp_path / "run", "--auto-resume")
    assert len(tensor_files(run, 4)) == 5
    assert tensor_files(run, 4) == tensor_files(uninterrupted, 4)
    assert not [path for path in run.path.rglob("*") if re.search(r"\.(partial|old)$", path.name)]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_full_disk_of_one_process_is_one_line(train, uninterrupted, tmp_path, rank):
    lines = []

    def ends_with(status: int, output: str) -> None:
        assert status == 2, output
        lines.extend(line for line in output.splitlines() if "No space left" in line)

    run = train("fsdp2", tmp_path / "run", FAULT=f"{rank}:full:2", ends_with=ends_with)
    (line,) = lines  # the main process prints it for all
    target = re.escape(str(run.checkpoint(2)))
    where = r"process 1 on \S+: " if rank else ""
    reason = rf"{where}No space left on device; free some space, then continue with \S+ .*resume .*"
    assert re.fullmatch(rf"{target}: cannot be written: {reason}", line)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000001"]
    train("fsdp2", tmp_path / "run", "--resume")
    assert tensor_files(run, 4) == tensor_files(uninterrupted, 4)


@pytest.mark.slow
def test_missing_or_damaged_part_is_named_and_older_checkpoint_loaded(
    train, uninterrupted, tmp_path
):
    shutil.copytree(uninterrupted.path, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    (run.checkpoint(4) / "optimizer-00002-of-00002.safetensors").unlink()
    damaged = run.checkpoint(3) / "model-00002-of-00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    shutil.rmtree(run.final)
    outputs = []
    train("fsdp2", run.path, "--resume", ends_with=lambda status, output: outputs.append(output))
    assert re.search(r"step_00000004: damaged checkpoint: .*optimizer-00002-of", outputs[0])
    assert (
        "step_00000003: damaged checkpoint: model-00002-of-00002.safetensors was changed"
    ) in outputs[0]
    assert f"resuming from {run.checkpoint(2)}" in outputs[0]
    assert tensor_files(run, 4) == tensor_files(uninterrupted, 4)
    verified = [process["verified"] for process in held_by_ranks(run)]
    shares = [
        [name for name in names if re.match(r"step_00000002/.*safetensors", name)]
        for names in verified
    ]
    assert [len(share) for share in shares] == [2, 2]
    assert len({*shares[0], *shares[1]}) == 4
