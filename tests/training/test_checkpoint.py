"""The run folder, and checkpoints that are whole or absent."""

import json

import pytest
import torch
from accelerate import Accelerator

from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.runs import replace
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import checkpoint
from nanogpt_hf.training.checkpoint import TrainState, load_checkpoint, save_checkpoint
from nanogpt_hf.training.evaluate import Evaluation
from nanogpt_hf.training.optimizer import build_optimizer


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
    with pytest.raises(RunFolderError, match="no checkpoint is whole"):
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
