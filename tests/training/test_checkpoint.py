"""Checkpoints: atomic, checked, compared with the model; the rules of the run folder."""

import copy
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.optim.optimizer import build_optimizer
from nanogpt_hf.runs import replace
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.state import Evaluation, TrainState
from nanogpt_hf.training import checkpoint, checkpoint_writer
from nanogpt_hf.training.checkpoint import load_checkpoint, read_checkpoint


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.start("model: {}\n")
    return folder


def build_training(seed: int = 0, n_embd: int = 8):
    torch.manual_seed(seed)
    model = GPTForCausalLM(GPTConfig(vocab_size=11, n_positions=8, n_embd=n_embd, n_layer=1, n_head=2))
    accelerator = Accelerator()
    parts = accelerator, *accelerator.prepare(model, build_optimizer(model, OptimSection()))
    train_steps(*parts, 1)
    return parts


def train_steps(accelerator, model, optimizer, count: int) -> None:
    model.eval()
    for step in range(count):
        tokens = (torch.arange(8)[None] * (step + 1)) % 11
        accelerator.backward(model(tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()


def log_records(caplog) -> list[tuple[str, str]]:
    """(level, message) of this package's log records."""
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("nanogpt_hf")]


def test_resume_from_loaded_checkpoint_is_exact(run, caplog, save_checkpoint):
    first = build_training()
    train_steps(*first, 3)
    evaluation = Evaluation(loss=1.25, tokens=7, bytes_per_token=1.5)
    state = TrainState(step=3, tokens=24, seconds=1.5, evaluation=evaluation, evaluated_step=3, best_loss=1.25)
    save_checkpoint(*first, state, run, keep=2)
    second = build_training(seed=1)
    caplog.set_level("INFO", "nanogpt_hf")
    assert load_checkpoint(*second, run) == state
    assert [message for _, message in log_records(caplog)] == [f"resuming from {run.checkpoint(3)}"]
    for _, model, optimizer in (first, second):
        train_steps(first[0], model, optimizer, 3)
    pairs = list(zip(first[1].parameters(), second[1].parameters(), strict=True))
    assert len(pairs) > 5
    assert all(torch.equal(a, b) for a, b in pairs)


def test_checkpoint_of_an_older_version_is_read(run):
    # written by the version that gathered everything in the main process, after two steps
    shutil.copytree(Path(__file__).with_name("older_checkpoint"), run.checkpoint(3))
    first, second = build_training(), build_training(seed=1)
    train_steps(*first, 2)
    state = load_checkpoint(*second, run)
    assert (state.step, state.tokens, state.evaluation) == (3, 24, Evaluation(1.25, 7, 1.5))
    for parts in (first, second):
        train_steps(*parts, 3)
    ours, theirs = (dict(parts[1].named_parameters()) for parts in (first, second))
    for name in ours:
        if not name.endswith("k_proj.bias"):  # its gradient is 0, and what is computed is rounding: each CPU's own
            torch.testing.assert_close(theirs[name], ours[name], atol=1e-6, rtol=0, msg=name)


def test_only_newest_checkpoints_are_kept(run, save_checkpoint):
    parts = build_training()
    for step in (1, 2, 10, 11):
        save_checkpoint(*parts, TrainState(step=step), run, keep=2)
    assert [folder.name for folder in run.checkpoint_folders()] == ["step_00000010", "step_00000011"]


def test_partial_checkpoint_is_ignored(run, save_checkpoint):
    save_checkpoint(*build_training(), TrainState(step=4), run, keep=2)
    (run.checkpoints / ".step_00000008.partial").mkdir()
    assert [folder.name for folder in run.checkpoint_folders()] == ["step_00000004"]


FILES = ["checksums.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def damage_file(path, damage: str) -> None:
    content, checksums = bytearray(path.read_bytes()), path.with_name("checksums.json")
    listed = json.loads(checksums.read_text())
    match damage:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(content[:-40])
        case "bit":
            content[-20] ^= 1  # one bit inside a number
            path.write_bytes(content)
        case "beside another":
            shutil.copy(path, path.with_name(f"{path.stem}-00002-of-00002.safetensors"))
        case _:  # in the checksums
            digest = listed.pop(path.name, None)
            if damage == "under another name":
                listed[path.name.upper()] = digest
            checksums.write_text(json.dumps(listed if digest else [damage]))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "damage", ["truncated", "missing", "bit", "under another name", "not listed", "beside another"]
)
def test_damaged_checkpoint_is_named_and_older_one_loaded(run, file, damage, caplog, save_checkpoint):
    parts = build_training()
    for step in (4, 8):
        train_steps(*parts, 1)
        save_checkpoint(*parts, TrainState(step=step), run, keep=2)
    damage_file(run.checkpoint(8) / file, damage)
    caplog.set_level("INFO", "nanogpt_hf")
    assert load_checkpoint(*parts, run).step == 4
    (level, first), (_, second) = log_records(caplog)
    assert f"{run.checkpoint(8)}: damaged checkpoint: " in first
    assert level == "WARNING"
    assert second == f"resuming from {run.checkpoint(4)}"
    damage_file(run.checkpoint(4) / file, damage)
    with pytest.raises(RunFolderError, match="all checkpoints are damaged"):
        load_checkpoint(*parts, run)


@pytest.mark.parametrize(
    ("module", "step"), [(checkpoint_writer, "write_tensors"), (replace, "flush"), (checkpoint_writer, "file_digest")]
)
def test_save_on_full_disk_keeps_older_checkpoints(run, monkeypatch, module, step, save_checkpoint):
    parts = build_training()
    save_checkpoint(*parts, TrainState(step=4), run, keep=1)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, step, full)
    with pytest.raises(RunFolderError, match=r"older ones are intact: .*No space left") as caught:
        save_checkpoint(*parts, TrainState(step=8), run, keep=1)
    assert "\n" not in str(caught.value)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000004"]
    monkeypatch.undo()
    assert load_checkpoint(*parts, run).step == 4


def test_checkpoint_of_another_model_is_refused(run, save_checkpoint):
    save_checkpoint(*build_training(), TrainState(step=4), run, keep=2)
    with pytest.raises(RunFolderError, match="is of another model"):
        load_checkpoint(*build_training(n_embd=16), run)


def rewrite(folder, file: str, content) -> None:
    """Replace a file of a checkpoint by tensors, JSON or text, with the right checksum."""
    if file.endswith(".safetensors"):
        save_file(content, folder / file)
    else:
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    sums = {path.name: checkpoint.file_digest(path) for path in folder.iterdir() if path.name != "checksums.json"}
    (folder / "checksums.json").write_text(json.dumps(sums))


CHANGES = {
    "other shape": lambda tensors, name: tensors | {name: torch.zeros(*tensors[name].shape, 2)},
    "flat": lambda tensors, name: tensors | {name: tensors[name].reshape(1, -1).clone()},
    "fewer values": lambda tensors, name: tensors | {name: tensors[name].reshape(-1)[:0].clone()},
    "other dtype": lambda tensors, name: tensors | {name: tensors[name].double()},
    "integers": lambda tensors, name: tensors | {name: tensors[name].int()},
    "eight bits": lambda tensors, name: tensors | {name: tensors[name].to(torch.float8_e4m3fn)},
    "missing": lambda tensors, name: {other: tensor for other, tensor in tensors.items() if other != name},
    "additional": lambda tensors, name: tensors | {f"more.{name}": tensors[name].clone()},
}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("change", CHANGES)
def test_tensor_of_other_name_shape_or_dtype_is_refused(run, file, change, save_checkpoint):
    parts = build_training()
    save_checkpoint(*parts, TrainState(step=4), run, keep=2)
    tensors = load_file(run.checkpoint(4) / file)
    train_steps(*parts, 1)
    before = [p.detach().clone() for p in parts[1].parameters()], copy.deepcopy(parts[2].state_dict()["state"])
    assert len(tensors) >= 16
    for name in tensors:
        rewrite(run.checkpoint(4), file, CHANGES[change](tensors, name))
        with pytest.raises(
            RunFolderError, match=f"step_00000004: is of another model: .*{re.escape(name)} is "
        ) as caught:
            load_checkpoint(*parts, run)
        assert "\n" not in str(caught.value)
    assert all(map(torch.equal, before[0], parts[1].parameters()))
    for index, state in parts[2].state_dict()["state"].items():
        assert all(torch.equal(state[key], before[1][index][key]) for key in state)


def test_8bit_optimizer_state_of_another_model_is_refused(run, save_checkpoint):
    pytest.importorskip("torchao", reason="torchao is not installed")
    save_checkpoint(*build_training(n_embd=8), TrainState(step=4), run, keep=2)
    small = load_file(run.checkpoint(4) / "optimizer.safetensors")
    torch.manual_seed(0)
    model = GPTForCausalLM(GPTConfig(vocab_size=11, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    accelerator = Accelerator()
    parts = accelerator, *accelerator.prepare(model, build_optimizer(model, OptimSection(state="8bit")))
    rewrite(run.checkpoint(4), "model.safetensors", {name: p.detach() for name, p in model.named_parameters()})
    rewrite(run.checkpoint(4), "optimizer.safetensors", small)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(RunFolderError, match=r"is of another model: optimizer state .* instead of"):
        load_checkpoint(*parts, run)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_invalid_state_json_is_one_line(run, save_checkpoint):
    parts = build_training()
    evaluation = Evaluation(loss=1.25, tokens=7, bytes_per_token=1.5)
    save_checkpoint(*parts, TrainState(step=4, evaluation=evaluation), run, keep=2)
    state = json.loads((run.checkpoint(4) / "state.json").read_text())
    assert len(state) > 10
    contents = [[], None, 3, "x", {}, [state], state | {"more": 1}, state | {"step": 5}]
    contents += ["", "{", "[" * 100_000, "9" * 5000, json.dumps(state).replace("4", "9" * 5000, 1)]
    older = {"last_finite_step", "reported_step", "clipped_steps", "not_finite_steps", "scaler", "identity"}
    for name in state.keys() - older:  # older versions did not write these
        contents.append({other: value for other, value in state.items() if other != name})
    for name in state.keys() - {"evaluated_step", "identity"}:
        contents += [state | {name: value} for value in ("1", [1], True, {"a": "b"}, 2**63, -2, -1, [None])]
    contents += [state | {"step": None}, state | {"tokens": 1.5}, state | {"seconds": None}]
    for name in state["evaluation"]:
        for value in ("1", None, [], True):
            contents.append(state | {"evaluation": state["evaluation"] | {name: value}})
    for content in contents:
        rewrite(run.checkpoint(4), "state.json", content)
        with pytest.raises(RunFolderError, match="all checkpoints are damaged"):
            load_checkpoint(*parts, run)
        with pytest.raises(RunFolderError, match="step_00000004: damaged checkpoint: ") as caught:
            read_checkpoint(run.checkpoint(4))
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600
    rewrite(run.checkpoint(4), "state.json", state)
    assert load_checkpoint(*parts, run).step == 4
    # written by an older version
    rewrite(
        run.checkpoint(4), "state.json", {k: v for k, v in state.items() if k not in ("last_finite_step", "scaler")}
    )
    assert load_checkpoint(*parts, run).last_finite_step == 4


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "endless", "link to itself"])
def test_special_file_in_checkpoint_does_not_hang(run, file, kind, save_checkpoint):
    parts = build_training()
    for step in (4, 8):
        save_checkpoint(*parts, TrainState(step=step), run, keep=2)
    path = run.checkpoint(8) / file
    path.unlink()
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link to itself":
            path.symlink_to(path)
        case _:
            path.symlink_to("/dev/zero" if kind == "endless" else "/dev/null")
    assert load_checkpoint(*parts, run).step == 4
    save_checkpoint(*parts, TrainState(step=8), run, keep=2)  # replaces it
    assert load_checkpoint(*parts, run).step == 8


def test_checkpoint_keep_counts_only_sound_checkpoints(run, save_checkpoint):
    parts = build_training()
    for step in (4, 8, 12):
        save_checkpoint(*parts, TrainState(step=step), run, keep=3)
    for step in (8, 12):
        damage_file(run.checkpoint(step) / "model.safetensors", "truncated")
    assert load_checkpoint(*parts, run).step == 4
    save_checkpoint(*parts, TrainState(step=6), run, keep=2)
    assert [path.name for path in run.checkpoint_folders()] == ["step_00000004", "step_00000006"]


def test_checkpoint_holds_no_pickle(run, save_checkpoint):
    save_checkpoint(*build_training(), TrainState(step=4), run, keep=2)
    names = sorted(path.name for path in run.checkpoint(4).iterdir())
    assert names == FILES
    assert json.loads((run.checkpoint(4) / "state.json").read_text())["step"] == 4


def test_recipe_that_is_removed_while_a_run_trains_is_written_again(run, save_checkpoint):
    run.recipe.unlink()
    save_checkpoint(*build_training(), TrainState(step=4), run, keep=2)
    assert run.recipe.read_text() == "model: {}\n"


def test_existing_run_needs_resume_or_overwrite(run):
    with pytest.raises(RunFolderError, match="holds a run; add --resume"):
        run.check(resume=False, overwrite=False)
    run.check(resume=False, overwrite=True)
    with pytest.raises(RunFolderError, match="no checkpoint to resume from"):
        run.check(resume=True, overwrite=False)
    with pytest.raises(RunFolderError, match="exclude each other"):
        run.check(resume=True, overwrite=True)


def test_resume_may_change_steps_but_not_model_data_or_seed(write_recipe, tmp_path):
    before = load_config(write_recipe())
    run = RunFolder(tmp_path / "run")
    run.start(config_to_yaml(before))
    assert run.changes(before) == []
    longer = load_config(write_recipe(train__max_steps=9, train__micro_batch_size=2))
    assert run.changes(longer) == ["train.max_steps: 6 -> 9", "train.micro_batch_size: 4 -> 2"]
    for other in ({"train__seed": 3}, {"model__n_layer": 3}, {"data__order": "random"}):
        with pytest.raises(RunFolderError, match="the recipe has changed: "):
            run.changes(load_config(write_recipe(**other)))


def test_lock_repairs_what_a_killed_process_left(run, save_checkpoint):
    run.best.mkdir()
    run.best.rename(run.path / ".best.old")  # killed between the two renames
    (run.checkpoints / ".step_00000008.partial").mkdir()
    save_checkpoint(*build_training(), TrainState(step=4), run, keep=2)
    run.check(resume=True, overwrite=False)
    assert not run.best.exists()
    run.lock()
    assert run.best.exists()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000004"]
    run.unlock()


def test_run_folder_lock_is_exclusive(tmp_path):
    first, second = (RunFolder(tmp_path / "new" / "run") for _ in range(2))
    first.lock()
    with pytest.raises(RunFolderError, match="another process is training in it"):
        second.lock()
    first.check(resume=False, overwrite=False)  # it may hold the lock itself
    first.unlock()
    assert not (tmp_path / "new").exists()  # nothing was started
    second.lock()
    second.start("model: {}\n")
    second.unlock()
    assert second.recipe.exists()


def test_folder_without_run_is_never_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(RunFolderError, match="is not empty and holds no run"):
            RunFolder(tmp_path).check(resume=False, overwrite=overwrite)
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder(tmp_path / "thesis.tex").check(resume=False, overwrite=True)
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").check(resume=False, overwrite=False)


def test_start_keeps_other_files(run):
    (run.path / "notes.txt").write_text("mine")
    run.metrics.write_text("{}\n")
    run.best.mkdir()
    run.start("model: {}\n")
    assert (run.path / "notes.txt").exists()
    assert not run.metrics.exists()
    assert not run.best.exists()
