"""An optimizer that the package does not know is a row: trained, killed and resumed bit for bit
on every layout. A new row of the package gets a line in `TRAINED`.
"""

import pytest
import torch
from safetensors.torch import load_file

import more_optimizers
from assertions import assert_same_experiment, copy_at
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.config.optimizers import OPTIMIZERS as CHOICES
from nanogpt_hf.config.optimizers import OptimizerChoice
from nanogpt_hf.optim.optimizer import OPTIMIZERS as KINDS
from nanogpt_hf.runs.tensor_files import TensorFiles

KNOBS = {
    "train__max_steps": 6,
    "eval__every": 3,
    "checkpoint__every": 3,
    "checkpoint__keep": 5,
    "eval__tokens": 256,
}
# Name of the row: learning rate, and the names of the state of a matrix.
TRAINED = {
    "test_sign_momentum": (1e-3, ["momentum"]),
    "test_rotated_adam": (
        1e-2,
        ["step", "mean", "square.rotated", "factors.0", "factors.1", "basis.0", "basis.1"],
    ),
}


def tensors(files: TensorFiles) -> dict[str, torch.Tensor]:
    return {name: files[name] for name in files}


def test_each_state_of_an_optimizer_in_recipes_has_code_and_all_code_is_in_recipes():
    of_recipes = {(name, state) for name, row in CHOICES.items() for state in row.states}
    assert of_recipes == KINDS.keys()


@pytest.mark.parametrize("name", more_optimizers.ROWS)
def test_rows_of_the_tests_do_not_replace_one_of_the_package(monkeypatch, name):
    rows = {name: OptimizerChoice("of the package")}
    monkeypatch.setattr(more_optimizers.optimizers, "OPTIMIZERS", rows)
    with pytest.raises(ValueError, match=f"the package has an optimizer of this name: {name}$"):
        more_optimizers.add_rows()
    assert rows == {name: OptimizerChoice("of the package")}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_own_row_trains_and_resumes_bit_for_bit_and_moves(name, make_recipe, launch_warm, tmp_path):
    rate, state_names = TRAINED[name]
    recipe = make_recipe(
        tmp_path / "r.yaml",
        optim__name=name,
        optim__learning_rate=rate,
        optim__min_learning_rate=0,
        **KNOBS,
    )
    alone = launch_warm(
        "cpu", "pretrain", recipe, "--run-dir", tmp_path / "cpu", MORE_OPTIMIZERS="1"
    )
    for machine in ("cpu", "cpu_ddp", "fsdp2"):
        run = alone
        if machine != "cpu":
            run = launch_warm(
                machine, "pretrain", recipe, "--run-dir", tmp_path / machine, MORE_OPTIMIZERS="1"
            )
            assert_same_experiment(run, alone, samples=False)
        killed = copy_at(run, 3, tmp_path / f"{machine}_killed")
        launch_warm(
            machine, "pretrain", recipe, "--run-dir", killed.path, "--resume", MORE_OPTIMIZERS="1"
        )
        for end in (run, killed):
            saved = read_checkpoint(end.checkpoint(6))
            state = tensors(saved.optimizer_state) | tensors(saved.weights)
            if end is run:
                undisturbed = state
        assert state.keys() == undisturbed.keys()
        assert all(torch.equal(state[key], undisturbed[key]) for key in state)
    weight = next(key for key in saved.weights if key.endswith("fc.weight"))
    names = {key.partition(f"{weight}.")[2] for key in saved.optimizer_state} - {""}
    assert names == set(state_names)
    moved = copy_at(run, 3, tmp_path / "moved")
    launch_warm("cpu", "pretrain", recipe, "--run-dir", moved.path, "--resume", MORE_OPTIMIZERS="1")
    assert_same_experiment(moved, alone, samples=False)
    assert load_file(moved.final / "model.safetensors")
