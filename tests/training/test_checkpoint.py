"""Checkpoints: atomic, checked, compared with the model; the rules of the run folder."""

import errno
import json

import pytest
import torch
from accelerate import Accelerator

from assertions import load_newest
from nanogpt_hf.checkpoint import reader
from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.optim.optimizer import build_optimizer
from nanogpt_hf.runs import folder
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import TrainState


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.start("model: {}\n")
    return folder


def build_training():
    torch.manual_seed(0)
    model = GPTForCausalLM(GPTConfig(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    accelerator = Accelerator()
    parts = accelerator, *accelerator.prepare(model, build_optimizer(model, OptimSection()))
    train_step(*parts)
    return parts


def train_step(accelerator, model, optimizer) -> None:
    tokens = torch.arange(8)[None]
    accelerator.backward(model(tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()


def log_records(caplog) -> list[tuple[str, str]]:
    """(level, message) of this package's log records."""
    return [
        (r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("nanogpt_hf")
    ]


FILES = ["checksums.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def damage_file(path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    match damage:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(content[:-40])
        case "bit":
            content[-20] ^= 1  # one bit inside a number
            path.write_bytes(content)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncated", "missing", "bit"])
def test_damaged_checkpoint_is_named_and_older_one_loaded(
    run, file, damage, caplog, save_checkpoint
):
    parts = build_training()
    for step in (4, 8):
        train_step(*parts)
        save_checkpoint(*parts, TrainState(step=step), run, keep=2)
    damage_file(run.checkpoint(8) / file, damage)
    caplog.set_level("INFO", "nanogpt_hf")
    assert load_newest(run, *parts).step == 4
    (level, first), (_, second) = log_records(caplog)
    assert f"{run.checkpoint(8)}: damaged checkpoint: " in first
    assert level == "WARNING"
    assert second == f"resuming from {run.checkpoint(4)}"
    damage_file(run.checkpoint(4) / file, damage)
    with pytest.raises(RunFolderError, match="all checkpoints are damaged"):
        load_newest(run, *parts)


def rewrite(folder, file: str, content: dict) -> None:
    """Replace a JSON file of a checkpoint, with the right checksum."""
    (folder / file).write_text(json.dumps(content))
    sums = {
        path.name: reader.file_digest(path)
        for path in folder.iterdir()
        if path.name != "checksums.json"
    }
    (folder / "checksums.json").write_text(json.dumps(sums))


def test_checkpoint_of_another_version_is_refused(run, save_checkpoint):
    parts = build_training()
    for step in (4, 8):
        save_checkpoint(*parts, TrainState(step=step), run, keep=2)
    state = json.loads((run.checkpoint(8) / "state.json").read_text())
    for other in ({"version": 2}, {"version": None}, {"field": 0}):
        rewrite(run.checkpoint(8), "state.json", state | other)
        with pytest.raises(RunFolderError, match="step_00000008: was written by other code: "):
            load_newest(run, *parts)


def test_checkpoint_keep_counts_only_sound_checkpoints(run, save_checkpoint):
    parts = build_training()
    for step in (4, 8, 12):
        save_checkpoint(*parts, TrainState(step=step), run, keep=3)
    for step in (8, 12):
        damage_file(run.checkpoint(step) / "model.safetensors", "truncated")
    assert load_newest(run, *parts).step == 4
    save_checkpoint(*parts, TrainState(step=6), run, keep=2)
    assert [path.name for path in run.checkpoint_folders()] == ["step_00000004", "step_00000006"]


def test_later_checkpoint_that_cannot_be_removed_ends_the_run(run, monkeypatch, save_checkpoint):
    """A resume would take it."""

    def remove(path):
        raise OSError(errno.EIO, "Input/output error")

    parts = build_training()
    save_checkpoint(*parts, TrainState(step=12), run, keep=1)
    monkeypatch.setattr(folder, "remove_folder", remove)
    with pytest.raises(RunFolderError, match="Input/output error"):
        save_checkpoint(*parts, TrainState(step=8), run, keep=1)
