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


@pytest.mark.parametrize("name", FILES[1:])
def test_entry_that_checksums_lack_is_a_damage(run, name, save_checkpoint):
    parts = build_training()
    save_checkpoint(*parts, TrainState(step=8), run, keep=2)
    path = run.checkpoint(8) / "checksums.json"
    checksums = json.loads(path.read_text())
    del checksums[name]
    path.write_text(json.dumps(checksums))
    with pytest.raises(reader.DamagedError, match=name):
        reader.read_checkpoint(run.checkpoint(8))


DEEP = "[" * 3000 + "]" * 3000
STATES = ["", "null", "[]", "{}", "5", '"x"', DEEP, '{"step": ', '"\xff"']
FIELDS = {
    "step": (None, "8", 8.0, -1, 9, True, [8], {}),
    "tokens": (None, "0", -1, 0.5),
    "seconds": (None, "0", []),
    "evaluated_step": (None, -2, "0"),
    "skipped_steps": (None, -1, "0"),
    "last_finite_step": (None, -1, 1.5),
    "loss_average": ("1", []),
    "best_loss": ("1", {}),
    "best_step": ("1", -1, 1.0),
    "evaluation": (5, [], {}, {"loss": 1.0}, {"loss": "1", "tokens": 1, "bytes_per_token": 1}),
    "identity": (5, "x", [], {}, {"knobs": {}}, {"knobs": [], "data": {}}, {"data": {}}),
    "scaler": (5, [], {"scale": "x"}),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in FIELDS.items() for value in values]
)
def test_edited_state_with_the_right_checksum_is_a_damage(run, name, value, save_checkpoint):
    save_checkpoint(*build_training(), TrainState(step=8), run, keep=2)
    path = run.checkpoint(8) / "state.json"
    rewrite(run.checkpoint(8), "state.json", json.loads(path.read_text()) | {name: value})
    with pytest.raises(
        reader.DamagedError, match=f"damaged checkpoint: state.json: .*({name}|step)"
    ):
        reader.read_checkpoint(run.checkpoint(8))


@pytest.mark.parametrize("content", STATES)
@pytest.mark.parametrize("file", ["state.json", "checksums.json"])
def test_file_that_is_no_mapping_is_a_damage(run, file, content, caplog, save_checkpoint):
    parts = build_training()
    for step in (4, 8):
        save_checkpoint(*parts, TrainState(step=step), run, keep=2)
    rewrite(run.checkpoint(8), file, content)
    assert load_newest(run, *parts).step == 4
    assert f"{run.checkpoint(8)}: damaged checkpoint: {file}: " in caplog.text


def test_state_without_identity_is_a_damage_to_a_run(run, save_checkpoint):
    parts = build_training()
    for step in (4, 8):
        identity = {"knobs": {}, "data": {}} if step == 4 else None
        save_checkpoint(*parts, TrainState(step=step, identity=identity), run, keep=2)
    found = reader.find_checkpoint(parts[0], run, {"knobs": {}, "data": {}})
    assert found.state.step == 4


def rewrite(folder, file: str, content: dict | str) -> None:
    """Replace a JSON file of a checkpoint, with the right checksum."""
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / file).write_text(text, encoding="latin-1")
    if file == "checksums.json":
        return
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
