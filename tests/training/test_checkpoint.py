"""The run folder, and checkpoints that are whole or absent."""

import json

import pytest
import torch
from accelerate import Accelerator

from nanogpt_hf.config.load import config_to_yaml, load_config
from nanogpt_hf.config.schema import OptimSection
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.model import GPTConfig, GPTForCausalLM
from nanogpt_hf.training.checkpoint import RunFolder, TrainState, load_checkpoint, save_checkpoint
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
    return accelerator, *accelerator.prepare(model, build_optimizer(model, OptimSection()))


def some_steps(accelerator, model, optimizer, count: int) -> None:
    model.eval()
    for step in range(count):
        tokens = (torch.arange(8)[None] * (step + 1)) % 11
        accelerator.backward(model(tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()


def test_what_is_loaded_goes_on_bit_for_bit(run):
    first = training()
    some_steps(*first, 3)
    evaluation = Evaluation(loss=1.25, tokens=7, bytes_per_token=1.5)
    state = TrainState(step=3, tokens=24, seconds=1.5, evaluation=evaluation, evaluated_step=3, best_loss=1.25)
    save_checkpoint(*first, state, run, keep=2)
    second = training(seed=1)
    assert load_checkpoint(*second, run.checkpoint(3)) == state
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


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_checkpoint_is_one_clear_line(run, file, damage):
    parts = training()
    some_steps(*parts, 1)
    save_checkpoint(*parts, TrainState(step=4), run, keep=2)
    path = run.checkpoint(4) / file
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RunFolderError, match="damaged checkpoint"):
        load_checkpoint(*parts, run.checkpoint(4))


def test_a_checkpoint_of_another_model_is_refused(run):
    save_checkpoint(*training(), TrainState(step=4), run, keep=2)
    with pytest.raises(RunFolderError, match="is of another model"):
        load_checkpoint(*training(n_embd=16), run.checkpoint(4))


def test_nothing_in_a_checkpoint_is_a_pickle(run):
    save_checkpoint(*training(), TrainState(step=4), run, keep=2)
    names = sorted(path.name for path in run.checkpoint(4).iterdir())
    assert names == ["model.safetensors", "optimizer.safetensors", "state.json"]
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
