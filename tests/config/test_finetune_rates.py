"""Default learning rates of fine-tuning, after the run that trained the model."""

import pytest

from nanogpt_hf.config.finetune import rates_after
from nanogpt_hf.config.schema import Config, replace_knobs
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.recipe import recipe_text, recipe_that_trained

ADAMW = {"optim.learning_rate": 3e-3}
MUON = {"optim.name": "muon", "optim.learning_rate": 4e-3, "optim.muon_learning_rate": 0.02}
TUNED = {"finetune.model": "base", "data.source": "my.txt"}


@pytest.mark.parametrize(
    ("before", "optimizer", "lora", "rates"),
    [
        (ADAMW, "adamw", False, {"optim.learning_rate": 3e-4}),
        (ADAMW, "adamw", True, {"optim.learning_rate": 3e-3}),
        (ADAMW | TUNED, "adamw", False, {"optim.learning_rate": 3e-3}),
        (ADAMW | TUNED, "adamw", True, {"optim.learning_rate": 3e-2}),
        (ADAMW | TUNED | {"lora.rank": 2}, "adamw", False, {"optim.learning_rate": 3e-4}),
        (ADAMW | TUNED | {"lora.rank": 2}, "adamw", True, {"optim.learning_rate": 3e-3}),
        (MUON, "muon", False, {"optim.learning_rate": 4e-4, "optim.muon_learning_rate": 2e-3}),
        (MUON, "adamw", False, {"optim.learning_rate": 4e-4}),
        (MUON | {"optim.learning_rate": 3e-3}, "adamw", False, {"optim.learning_rate": 3e-4}),
        (MUON | {"optim.learning_rate": 0.02}, "adamw", False, {"optim.learning_rate": 4e-4}),
        (MUON | {"optim.learning_rate": 0.02}, "adamw", True, {"optim.learning_rate": 4e-3}),
        # the rates of another optimizer or method are no measure
        (ADAMW, "muon", False, {}),
        (ADAMW | TUNED | {"align.loss": "dpo"}, "adamw", False, {}),
        (ADAMW | TUNED | {"rl.task": "arithmetic"}, "adamw", False, {}),
    ],
)
def test_rates_after_a_run(before, optimizer, lora, rates):
    assert rates_after(replace_knobs(Config(), before), optimizer, lora=lora) == rates


def test_recipe_of_a_model_in_a_run_folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    for folder in (run.best, run.final, run.checkpoints / "step_1", tmp_path / "model"):
        folder.mkdir(parents=True)
    config = replace_knobs(Config(), ADAMW | {"data.source": "my.txt"})
    run.recipe.write_text(recipe_text(config))
    for folder in (run.best, run.final):
        assert recipe_that_trained(str(folder)).optim.learning_rate == 3e-3
    others = (run.path, run.checkpoints / "step_1", tmp_path / "model", "gpt2", "me/model")
    assert [recipe_that_trained(str(name)) for name in others] == [None] * 5
    run.recipe.write_text("optim: 3")
    assert recipe_that_trained(str(run.best)) is None
