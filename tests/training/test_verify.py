"""`verify`: an honest run is equal; each thing that was edited is found and named."""

import json
import os
import shutil
import signal
import tempfile
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from arguments import argv
from assertions import at_step, file_contents, replace_step
from nanogpt_hf.checkpoint.files import CHECKSUMS
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.commands import main
from nanogpt_hf.data.blocks import read_column
from nanogpt_hf.distributed import accelerate_config
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.distributed.updates import Updater
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.own_files import file_sha256
from nanogpt_hf.replay import verify as replay
from nanogpt_hf.replay.verify import first_difference, recipe_of, run_at
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.provenance import add_start, read_starts, read_verifications
from nanogpt_hf.training.start import prepare_run
from nanogpt_hf.training.step import train_step

pytestmark = pytest.mark.long


@pytest.fixture
def run(honest, tmp_path) -> RunFolder:
    """A copy that a test may edit."""
    return RunFolder(shutil.copytree(honest.path, tmp_path / "run"))


@pytest.fixture
def verify(capsys, forget_accelerate):
    def verify(run: RunFolder, options: str = "") -> tuple[int, list[str]]:
        forget_accelerate()
        capsys.readouterr()
        status = main(argv("verify {}", run.path) + options.split())
        return status, capsys.readouterr().out.splitlines()

    return verify


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ("", ["2 to 8"]),
        ("--sample 2", ["4 to 6", "6 to 8"]),
        ("--sample 99", ["2 to 4", "4 to 6", "6 to 8"]),  # all that there are
    ],
)
def test_honest_run_is_equal_and_reports_only(run, verify, options, steps):
    before = file_contents(run.path)
    status, lines = verify(run, options)
    assert (status, lines[1:]) == (0, [f"steps {segment}: equal" for segment in steps])
    assert lines[0].startswith(f"repeating steps {', '.join(steps)}: about ")
    events = read_verifications(run)
    assert [(f"{e['from']} to {e['step']}", e["result"]) for e in events] == [
        (segment, "equal") for segment in steps
    ]
    assert f"<td>{steps[-1]}</td><td>equal</td><td>{events[-1]['time']}" in run.report.read_text()
    run.verified.unlink()
    changed = {
        name: run.path / name
        for name, data in file_contents(run.path).items()
        if data != before[name]
    }
    assert list(changed) == ["report.html"]


def test_signal_removes_the_temporary_folder(run, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    clip = Updater.clip

    def signalled(*arguments):
        assert list((tmp_path / "temporary").iterdir())
        os.kill(os.getpid(), signal.SIGTERM)
        return clip(*arguments)

    monkeypatch.setattr(Updater, "clip", signalled)
    assert main(argv("verify {}", run.path)) == 75
    assert not list((tmp_path / "temporary").iterdir())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_run_of_another_user_is_equal(run, verify):
    (run.path / ".lock").chmod(0o444)
    assert verify(run)[0] == 0


def test_other_compiler_is_refused(run, verify, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    assert main(argv("verify {}", run.path)) == 2
    line = capsys.readouterr().err
    assert "2 to 8 were computed with dynamo_backend no, and would be repeated with eager" in line
    assert line.endswith("under an accelerate config with it, by launch --config_file F\n")
    # An older version did not record it: the steps are repeated under the accelerate config.
    machine = json.loads(run.machine.read_text())
    del machine["starts"][-1]["dynamo"]
    run.machine.write_text(json.dumps(machine))
    compilers = _spy_on_compilers(monkeypatch)
    verify(run)
    assert compilers == ["eager"]
    torch.compiler.reset()


def _spy_on_compilers(monkeypatch) -> list[str]:
    """The compilers of the runs that `verify` prepares, as they come."""
    compilers = []

    def prepared(*arguments, **options):
        run = prepare_run(*arguments, **options)
        compilers.append(run.mesh.compiler)
        return run

    monkeypatch.setattr(replay, "prepare_run", prepared)
    return compilers


def test_one_gpu_repeats_with_the_compiler_of_the_run(train, tmp_path, verify, monkeypatch):
    """Also where the accelerate config does not state it. The GPU computes as a CPU here."""
    torch.compiler.reset()
    with monkeypatch.context() as config:
        config.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
        config.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true")
        run = train(tmp_path / "run", checkpoint__keep=9)
    (start,) = read_starts(run)
    assert start["dynamo"] == "eager, regional"
    monkeypatch.setattr(accelerate_config, "chooses_for_one_gpu", lambda: True)
    monkeypatch.setattr(accelerate_config, "requested_precision", lambda: "no")
    compilers = _spy_on_compilers(monkeypatch)
    status, lines = verify(run, "--sample 2")
    assert (status, lines[1:]) == (0, ["steps 2 to 4: equal", "steps 4 to 6: equal"])
    assert compilers == ["eager, regional"] * 2
    torch.compiler.reset()


@pytest.mark.parametrize(("steps", "differs"), [("2:4", False), ("4:8", True)])
def test_machine_is_compared_with_the_start_of_the_steps(run, verify, caplog, steps, differs):
    """A later start on another machine does not matter to them."""
    (start,) = read_starts(run)
    other = start | {"step": 4, "fingerprint": start["fingerprint"] | {"numpy": "1.0"}}
    add_start(run, other)
    assert verify(run, f"--steps {steps}")[0] == 0
    found = [line for line in caplog.messages if "start at step 4: numpy 1.0 ->" in line]
    assert bool(found) == differs
    assert len(caplog.messages) == len(found)


def test_other_precision_is_refused(run, verify, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert main(argv("verify {}", run.path)) == 2
    line = capsys.readouterr().err
    assert "were computed with mixed_precision fp32, and would be repeated with bf16, which" in line


@pytest.mark.parametrize(
    ("step", "name", "found"),
    [(5, "train/loss", 5), (6, "train/grad_norm", 6), (8, "val/loss", 8), (7, None, 7)],
)
def test_edited_metrics_line_is_named(run, verify, step, name, found):
    events = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for event in [event for event in events if event["step"] == step]:
        if name is None:
            events.remove(event)
        elif name in event:
            event[name] = event[name] * (1 + 1e-15)
    run.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    status, lines = verify(run)
    assert (status, lines[1]) == (1, f"step {found}: differs")
    assert lines[2].startswith(f"  {name or 'train/loss'}: recorded ")
    assert ("nothing" in lines[2]) == (name is None)


@pytest.mark.parametrize(("error", "status"), [(0.0, 0), (1e-5, 0), (8e-4, 0), (2e-3, 1)], ids=str)
def test_run_without_deterministic_kernels_is_compared_to_rounding(run, verify, error, status):
    starts = json.loads(run.machine.read_text())
    assert [start["deterministic"] for start in starts["starts"]] == [True]
    starts["starts"][0]["deterministic"] = False
    run.machine.write_text(json.dumps(starts))
    events = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for event in events:
        for name in ("train/loss", "train/grad_norm", "val/loss"):
            if name in event:
                event[name] *= 1 + error
    run.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    found, lines = verify(run)
    assert found == status
    equal = (
        "steps 2 to 8: equal to rounding, within 0.001 of each number, since the run was trained "
        "without train.deterministic"
    )
    assert lines[1] == ("step 3: differs" if status else equal)


def test_other_weights_differ_also_to_rounding(run, verify):
    starts = json.loads(run.machine.read_text())
    starts["starts"][0]["deterministic"] = False
    run.machine.write_text(json.dumps(starts))
    folder = run.checkpoint(8)
    path = folder / "model.safetensors"
    tensors = {name: tensor * 1.01 for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    checksums = json.loads((folder / CHECKSUMS).read_text())
    checksums[path.name] = file_sha256(path)
    (folder / CHECKSUMS).write_text(json.dumps(checksums))
    status, lines = verify(run, "--steps 6:8")
    assert (status, lines[1]) == (1, "step 8: differs")
    assert lines[2] == f"  {folder}: weights 9.9e-03 of their norm away"


@pytest.mark.parametrize(("kind", "number"), [("model", 3), ("optimizer", 5)])
def test_edited_checkpoint_is_named_by_its_tensor(run, verify, kind, number):
    folder = run.checkpoint(6)
    path = folder / f"{kind}.safetensors"
    tensors = load_file(path)
    name = sorted(name for name in tensors if tensors[name].numel() > 1)[number]
    tensors[name].view(-1)[1] += 1e-3
    save_file(tensors, path, {"format": "pt"})
    status, lines = verify(run)
    assert (status, lines[1:]) == (
        1,
        [f"differs: {folder}: damaged checkpoint: {path.name} was changed after it was written"],
    )
    checksums = json.loads((folder / CHECKSUMS).read_text())
    checksums[path.name] = file_sha256(path)
    (folder / CHECKSUMS).write_text(json.dumps(checksums))
    status, (_, first, second) = verify(run)
    assert (status, first) == (1, "step 6: differs")
    assert second == f"  {folder}: 1 tensor: {name}"
    status, (_, first, *_) = verify(run, "--steps 6:8")  # what follows from it differs, too
    # the optimizer's state changes weights after step 7, and so the loss of step 8
    assert (status, first) == (1, f"step {8 if kind == 'optimizer' else 7}: differs")


def test_changed_document_of_the_data_is_named(run, verify, honest):
    (shard,) = (honest.path.parent / "data" / "train").glob("*.arrow")
    content = shard.read_bytes()
    ids = read_column(shard.parent, "input_ids")[0].flatten().to_numpy()
    at = content.index(ids[1000:1020].tobytes())
    try:
        shard.write_bytes(content[:at] + ids[:1].tobytes() + content[at + ids.itemsize :])
        status, (_, line) = verify(run)
    finally:
        shard.write_bytes(content)
    assert status == 1
    assert line.startswith(f"differs: {shard}: is damaged: its sha256 has changed")


def test_data_that_was_prepared_anew_from_another_text_is_named(run, verify, honest):
    manifest = honest.path.parent / "data" / "manifest.json"
    content = manifest.read_text()
    sha256 = json.loads(content)["train"]["sha256"]
    try:
        manifest.write_text(content.replace(sha256, "0" * 64))
        status, (_, line) = verify(run)
    finally:
        manifest.write_text(content)
    assert status == 1
    assert "the newest checkpoint is of another run or other data: data train sha256: " in line


@pytest.mark.parametrize(
    ("bit", "step", "name"),
    [(22, 5, "  train/grad_norm: recorded "), (8, 6, "checkpoints/step_00000006: ")],
)
def test_flipped_bit_of_one_gradient_is_named(
    train, tmp_path, verify, monkeypatch, bit, step, name
):
    clip = Updater.clip

    def flipped(updater, *others):
        parameter = updater.optimizer.in_model_order[0]
        parameter.grad.view(-1).view(torch.int32)[3] ^= 1 << bit
        return clip(updater, *others)

    def flipping_step(run, *arguments):
        with monkeypatch.context() as patch:
            if run.state.step == 4:
                patch.setattr(Updater, "clip", flipped)
            return train_step(run, *arguments)

    with monkeypatch.context() as patch:
        replace_step(patch, flipping_step)
        run = train(tmp_path / "run", checkpoint__keep=9)
    status, lines = verify(run)
    assert (status, lines[1]) == (1, f"step {step}: differs")
    assert any(name in line for line in lines[2:]), lines


def test_run_that_was_stopped_before_an_evaluation_is_equal(
    write_recipe, tmp_path, verify, monkeypatch
):
    run = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert main(argv("pretrain {} --run-dir {}", write_recipe(), run.path)) == 75
    assert verify(run)[1][1:] == ["steps 2 to 3: equal"]


@pytest.mark.parametrize("first", [0, 4])
def test_repeated_progress_is_the_recorded_one(run, first):
    with run_at(run, recipe_of(run, first + 1), first, Mesh.from_environment()) as repeated:
        assert first_difference(repeated, run, 8, 0.0) is None
    saved = read_checkpoint(run.checkpoint(8)).state
    # Times are another machine's, and what the monitor counts for its log is not repeated.
    for name in (
        "step",
        "tokens",
        "evaluation",
        "evaluated_step",
        "score",
        "best_loss",
        "best_step",
    ):
        assert getattr(repeated.state, name) == getattr(saved, name), name
    assert repeated.state.best_step


def test_full_temporary_folder_is_one_line_of_verify(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise RunFolderError("x;y: cannot be written: No space; left", "free some; --overwrite")

    monkeypatch.setattr(replay, "CheckpointWriter", full)
    copy = SimpleNamespace(accelerator=None, folder=RunFolder(tmp_path))
    with pytest.raises(RunFolderError) as caught:
        replay._start_again(copy)
    assert str(caught.value) == (
        "x;y: cannot be written: No space; left; correct that, or set TMPDIR to another folder"
    )
