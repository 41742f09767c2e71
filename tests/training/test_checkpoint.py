"""The run folder, and checkpoints that are whole or absent."""

import copy
import json
import os
import re

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
from nanogpt_hf.training import checkpoint
from nanogpt_hf.training.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.start("model: {}\n")
    return folder


def training(seed: int = 0, n_embd: int = 8):
    torch.manual_seed(seed)
    model = GPTForCausalLM(GPTConfig(vocab_size=11, n_positions=8, n_embd=n_embd, n_layer=1, n_head=2))
    accelerator = Accelerator()
    parts = accelerator, *accelerator.prepare(model, build_optimizer(model, OptimSection()))
    some_steps(*parts, 1)
    return parts


def some_steps(accelerator, model, optimizer, count: int) -> None:
    model.eval()
    for step in range(count):
        tokens = (torch.arange(8)[None] * (step + 1)) % 11
        accelerator.backward(model(tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()


def ours(caplog) -> list[tuple[str, str]]:
    """(level, message) of what this package said."""
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("nanogpt_hf")]


def test_what_is_loaded_goes_on_bit_for_bit(run, caplog):
    first = training()
    some_steps(*first, 3)
    evaluation = Evaluation(loss=1.25, tokens=7, bytes_per_token=1.5)
    state = TrainState(step=3, tokens=24, seconds=1.5, evaluation=evaluation, evaluated_step=3, best_loss=1.25)
    save_checkpoint(*first, state, run, keep=2)
    second = training(seed=1)
    caplog.set_level("INFO", "nanogpt_hf")
    assert load_checkpoint(*second, run) == state
    assert [message for _, message in ours(caplog)] == [f"resuming from {run.checkpoint(3)}"]
    for _, model, optimizer in (first, second):
        some_steps(first[0], model, optimizer, 3)
    pairs = list(zip(first[1].parameters(), second[1].parameters(), strict=True))
    assert len(pairs) > 5
    assert all(torch.equal(a, b) for a, b in pairs)


def test_only_the_newest_are_kept(run):
    parts = training()
    for step in (1, 2, 10, 11):
        save_checkpoint(*parts, TrainState(step=step), run, keep=2)
    assert [folder.name for folder in run.checkpoint_folders()] == ["step_00000010", "step_00000011"]


def test_a_checkpoint_that_was_being_written_does_not_count(run):
    save_checkpoint(*training(), TrainState(step=4), run, keep=2)
    (run.checkpoints / ".step_00000008.partial").mkdir()
    assert [folder.name for folder in run.checkpoint_folders()] == ["step_00000004"]


FILES = ["checksums.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def spoil(path, damage: str) -> None:
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-40])
    else:
        content[-20] ^= 1  # one bit, in the middle of a number
        path.write_bytes(content)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["cut", "gone", "bit"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(run, file, damage, caplog):
    parts = training()
    for step in (4, 8):
        some_steps(*parts, 1)
        save_checkpoint(*parts, TrainState(step=step), run, keep=2)
    spoil(run.checkpoint(8) / file, damage)
    caplog.set_level("INFO", "nanogpt_hf")
    assert load_checkpoint(*parts, run).step == 4
    (warned, first), (_, second) = ours(caplog)
    assert f"{run.checkpoint(8)}: damaged checkpoint: " in first
    assert warned == "WARNING"
    assert second == f"resuming from {run.checkpoint(4)}"
    spoil(run.checkpoint(4) / file, damage)
    with pytest.raises(RunFolderError, match="all checkpoints are damaged"):
        load_checkpoint(*parts, run)


@pytest.mark.parametrize(
    ("module", "step"), [(checkpoint, "save_file"), (replace, "flush"), (checkpoint, "_file_digest")]
)
def test_a_full_disk_is_one_clear_line_and_leaves_the_checkpoints_before(run, monkeypatch, module, step):
    parts = training()
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


def test_a_checkpoint_of_another_model_is_refused(run):
    save_checkpoint(*training(), TrainState(step=4), run, keep=2)
    with pytest.raises(RunFolderError, match="is of another model"):
        load_checkpoint(*training(n_embd=16), run)


def rewrite(folder, file: str, content) -> None:
    """Put tensors, facts or bytes into a file of a checkpoint, with the right checksum."""
    if file.endswith(".safetensors"):
        save_file(content, folder / file)
    else:
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    sums = {path.name: checkpoint._file_digest(path) for path in folder.iterdir() if path.name != "checksums.json"}
    (folder / "checksums.json").write_text(json.dumps(sums))


CHANGES = {
    "other shape": lambda tensors, name: tensors | {name: torch.zeros(*tensors[name].shape, 2)},
    "flat": lambda tensors, name: tensors | {name: tensors[name].reshape(1, -1).clone()},
    "fewer values": lambda tensors, name: tensors | {name: tensors[name].reshape(-1)[:0].clone()},
    "other dtype": lambda tensors, name: tensors | {name: tensors[name].double()},
    "whole numbers": lambda tensors, name: tensors | {name: tensors[name].int()},
    "eight bits": lambda tensors, name: tensors | {name: tensors[name].to(torch.float8_e4m3fn)},
    "gone": lambda tensors, name: {other: tensor for other, tensor in tensors.items() if other != name},
    "one more": lambda tensors, name: tensors | {f"more.{name}": tensors[name].clone()},
}


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_of_another_name_shape_or_dtype_is_refused_before_anything_is_copied(run, file, change):
    parts = training()
    save_checkpoint(*parts, TrainState(step=4), run, keep=2)
    tensors = load_file(run.checkpoint(4) / file)
    some_steps(*parts, 1)
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


def test_an_optimizer_in_8_bits_is_compared_too(run):
    pytest.importorskip("torchao", reason="torchao is not installed")
    save_checkpoint(*training(n_embd=8), TrainState(step=4), run, keep=2)
    small = load_file(run.checkpoint(4) / "optimizer.safetensors")
    torch.manual_seed(0)
    model = GPTForCausalLM(GPTConfig(vocab_size=11, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    accelerator = Accelerator()
    parts = accelerator, *accelerator.prepare(model, build_optimizer(model, OptimSection(state="8bit")))
    rewrite(run.checkpoint(4), "model.safetensors", {name: p.detach() for name, p in model.named_parameters()})
    rewrite(run.checkpoint(4), "optimizer.safetensors", small)
    with pytest.raises(RunFolderError, match=r"is of another model: optimizer state .* instead of"):
        load_checkpoint(*parts, run)
    assert not parts[2].state


def test_facts_of_wrong_types_are_one_line(run):
    parts = training()
    evaluation = Evaluation(loss=1.25, tokens=7, bytes_per_token=1.5)
    save_checkpoint(*parts, TrainState(step=4, evaluation=evaluation), run, keep=2)
    facts = json.loads((run.checkpoint(4) / "state.json").read_text())
    assert len(facts) > 10
    wrong = [[], None, 3, "x", {}, [facts], facts | {"more": 1}, facts | {"step": 5}]
    wrong += ["", "{", "[" * 100_000, "9" * 5000, json.dumps(facts).replace("4", "9" * 5000, 1)]
    for name in facts.keys() - {"last_finite_step", "scaler", "identity"}:  # which older versions did not write
        wrong.append({other: value for other, value in facts.items() if other != name})
    for name in facts.keys() - {"evaluated_step", "identity"}:
        wrong += [facts | {name: value} for value in ("1", [1], True, {"a": "b"}, 2**63, -2, -1, [None])]
    wrong += [facts | {"step": None}, facts | {"tokens": 1.5}, facts | {"seconds": None}]
    for name in facts["evaluation"]:
        for value in ("1", None, [], True):
            wrong.append(facts | {"evaluation": facts["evaluation"] | {name: value}})
    for content in wrong:
        rewrite(run.checkpoint(4), "state.json", content)
        with pytest.raises(RunFolderError, match="all checkpoints are damaged"):
            load_checkpoint(*parts, run)
        with pytest.raises(RunFolderError, match="step_00000004: damaged checkpoint: ") as caught:
            read_checkpoint(run.checkpoint(4))
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600
    rewrite(run.checkpoint(4), "state.json", facts)
    assert load_checkpoint(*parts, run).step == 4
    # an older version's
    rewrite(
        run.checkpoint(4), "state.json", {k: v for k, v in facts.items() if k not in ("last_finite_step", "scaler")}
    )
    assert load_checkpoint(*parts, run).last_finite_step == 4


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "endless", "link to itself"])
def test_a_file_of_a_checkpoint_that_is_no_file_does_not_hang(run, file, kind):
    parts = training()
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
    save_checkpoint(*parts, TrainState(step=8), run, keep=2)  # takes its place
    assert load_checkpoint(*parts, run).step == 8


def test_damaged_checkpoints_are_not_counted_among_those_that_are_kept(run):
    parts = training()
    for step in (4, 8, 12):
        save_checkpoint(*parts, TrainState(step=step), run, keep=3)
    for step in (8, 12):
        spoil(run.checkpoint(step) / "model.safetensors", "cut")
    assert load_checkpoint(*parts, run).step == 4
    save_checkpoint(*parts, TrainState(step=6), run, keep=2)
    assert [path.name for path in run.checkpoint_folders()] == ["step_00000004", "step_00000006"]


def test_nothing_in_a_checkpoint_is_a_pickle(run):
    save_checkpoint(*training(), TrainState(step=4), run, keep=2)
    names = sorted(path.name for path in run.checkpoint(4).iterdir())
    assert names == FILES
    assert json.loads((run.checkpoint(4) / "state.json").read_text())["step"] == 4


def test_a_folder_with_a_run_is_refused_unless_told(run):
    with pytest.raises(RunFolderError, match="holds a run; add --resume"):
        run.check(resume=False, overwrite=False)
    run.check(resume=False, overwrite=True)
    with pytest.raises(RunFolderError, match="no checkpoint to resume from"):
        run.check(resume=True, overwrite=False)
    with pytest.raises(RunFolderError, match="exclude each other"):
        run.check(resume=True, overwrite=True)


def test_a_resumed_run_may_change_how_it_trains_but_not_what(write_recipe, tmp_path):
    before = load_config(write_recipe())
    run = RunFolder(tmp_path / "run")
    run.start(config_to_yaml(before))
    assert run.changes(before) == []
    longer = load_config(write_recipe(train__max_steps=9, train__micro_batch_size=2))
    assert run.changes(longer) == ["train.max_steps: 6 -> 9", "train.micro_batch_size: 4 -> 2"]
    for other in ({"train__seed": 3}, {"model__n_layer": 3}, {"data__order": "random"}):
        with pytest.raises(RunFolderError, match="the recipe has changed: "):
            run.changes(load_config(write_recipe(**other)))


def test_what_a_killed_process_left_is_put_right_only_once_nobody_else_is_in(run):
    run.best.mkdir()
    run.best.rename(run.path / ".best.old")  # killed between the two renames
    (run.checkpoints / ".step_00000008.partial").mkdir()
    save_checkpoint(*training(), TrainState(step=4), run, keep=2)
    run.check(resume=True, overwrite=False)
    assert not run.best.exists()
    run.lock()
    assert run.best.exists()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000004"]
    run.unlock()


def test_one_process_at_a_time_trains_in_a_folder(tmp_path):
    first, second = (RunFolder(tmp_path / "new" / "run") for _ in range(2))
    first.lock()
    with pytest.raises(RunFolderError, match="another process is training in it"):
        second.lock()
    first.check(resume=False, overwrite=False)  # its own lock is in nobody's way
    first.unlock()
    assert not (tmp_path / "new").exists()  # nothing was begun
    second.lock()
    second.start("model: {}\n")
    second.unlock()
    assert second.recipe.exists()


def test_a_folder_that_is_not_ours_is_refused_even_to_overwrite(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(RunFolderError, match="is not empty and holds no run"):
            RunFolder(tmp_path).check(resume=False, overwrite=overwrite)
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder(tmp_path / "thesis.tex").check(resume=False, overwrite=True)
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").check(resume=False, overwrite=False)


def test_starting_anew_keeps_what_is_not_the_runs(run):
    (run.path / "notes.txt").write_text("mine")
    run.metrics.write_text("{}\n")
    run.best.mkdir()
    run.start("model: {}\n")
    assert (run.path / "notes.txt").exists()
    assert not run.metrics.exists()
    assert not run.best.exists()
