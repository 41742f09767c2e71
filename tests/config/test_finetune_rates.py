"""Default learning rates: of fine-tuning, after the run that trained the model; of Muon."""

import shutil

import pytest

from nanogpt_hf.commands import main
from nanogpt_hf.config.finetune import rates_after
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.methods import NEXT_TOKEN, POLICY, PREFERENCES
from nanogpt_hf.config.schema import Config, knob_values, replace_knobs
from nanogpt_hf.config.stages import stages_of
from nanogpt_hf.errors import RunFolderError
from nanogpt_hf.methods.finetuning import finetune_config
from nanogpt_hf.own_files import log_once
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.recipe import (
    changed_knobs,
    read_recipe,
    recipe_text,
    recipe_that_trained,
)

LEARNING_RATE = "optim.learning_rate"
MUON_RATE = "optim.muon_learning_rate"
ADAMW = {"optim.learning_rate": 3e-3}
MUON = {"optim.name": "muon", "optim.learning_rate": 4e-3, "optim.muon_learning_rate": 0.02}
TUNED = {"finetune.model": "base", "data.source": "my.txt"}
TASK = {"rl.task": "arithmetic", "rl.max_new_tokens": 8}


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
        # of Muon with another scale of updates
        (MUON | {"optim.muon_scale": "match_rms_adamw"}, "muon", False, {LEARNING_RATE: 4e-4}),
        # A run that trained nothing.
        ({LEARNING_RATE: 0.0}, "adamw", False, {}),
        ({LEARNING_RATE: 0.0} | TUNED, "adamw", True, {}),
        # the rates of another optimizer or method are no measure
        (ADAMW, "muon", False, {}),
        (ADAMW | TUNED | {"align.loss": "dpo"}, "adamw", False, {}),
        (ADAMW | TUNED | {"rl.task": "arithmetic"}, "adamw", False, {}),
    ],
)
def test_rates_after_a_run(before, optimizer, lora, rates):
    assert rates_after(replace_knobs(Config(), before), optimizer, lora=lora) == rates


@pytest.mark.parametrize("name", ["run", "a; run"])
def test_recipe_of_a_model_in_a_run_folder(tmp_path, caplog, name):
    run = RunFolder(tmp_path / name)
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
    (line,) = caplog.messages
    assert line.startswith(f"{run.recipe}: ")
    assert line.endswith("got '3'; the default rates do not follow from it")


def test_recipe_of_a_model_by_other_names_of_its_folder(tmp_path, monkeypatch):
    run = RunFolder(tmp_path / "run")
    run.best.mkdir(parents=True)
    run.recipe.write_text(recipe_text(replace_knobs(Config(), ADAMW | {"data.source": "my.txt"})))
    (tmp_path / "link").symlink_to(run.best)
    (tmp_path / "moved").mkdir()
    run.final.symlink_to(tmp_path / "moved")
    monkeypatch.chdir(run.best)
    for name in (".", "../best/", "../../link", run.final):
        assert recipe_that_trained(str(name)).optim.learning_rate == 3e-3, name
    # A Hub id.
    monkeypatch.chdir(run.path)
    run.best.rmdir()
    assert recipe_that_trained("best") is None


def test_default_rate_is_a_line_of_a_run_that_is_not_refused(
    refused, tiny_base, tmp_path, text_file, capsys
):
    run = RunFolder(tmp_path / "run")
    shutil.copytree(tiny_base, run.best)
    run.recipe.write_text(recipe_text(replace_knobs(Config(), ADAMW | {"data.source": "my.txt"})))
    words = ["finetune", "--from", str(run.path), "--data", str(text_file)]
    line = "optim.learning_rate 0.0003: the default for a model trained with 0.003\n"
    log_once.cache_clear()
    assert "optim.name" in refused(*words, "--optim.name", "lion")
    # What is refused after the model was read.
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    other.recipe.touch()
    for run_dir, reason in ((run.path, "is inside it"), (other.path, "holds a run")):
        log_once.cache_clear()
        assert reason in refused(*words, "--run-dir", run_dir)
    log_once.cache_clear()
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.count(line) == 1
    log_once.cache_clear()
    assert main([*words, "--dry-run", "--optim.learning_rate", "1e-3"]) == 0
    assert line not in capsys.readouterr().out
    run.recipe.write_text("optim: 3")
    log_once.cache_clear()
    assert "is inside it" in refused(*words, "--run-dir", run.path)
    log_once.cache_clear()
    assert main([*words, "--dry-run"]) == 0
    assert "the default rates do not follow from it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "override"),
    [
        ({"optim__name": "muon", "optim__muon_momentum": 0.9}, ("--optim.name", "adamw")),
        ({"optim__min_learning_rate": 1e-3}, ("--optim.learning_rate", "1e-4")),
    ],
)
def test_line_of_a_knob_that_is_left_out_is_of_a_run_that_is_not_refused(
    refused, write_recipe, tmp_path, capsys, recipe, override
):
    words = ["pretrain", str(write_recipe(**recipe)), *override]
    other = RunFolder(tmp_path / "other")
    other.path.mkdir()
    other.recipe.touch()
    log_once.cache_clear()
    assert "holds a run" in refused(*words, "--run-dir", other.path)
    log_once.cache_clear()
    assert main([*words, "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count(": left out, ") == 1
    assert captured.out.endswith("nothing was started\n")


@pytest.mark.parametrize(
    ("method", "knobs", "rate"),
    [
        (NEXT_TOKEN, {}, 2e-3),
        (NEXT_TOKEN, {"optim.muon_scale": "match_rms_adamw"}, 6e-5),
        (NEXT_TOKEN, {"optim.muon_scale": "match_rms_adamw", LEARNING_RATE: 1e-4}, 1e-4),
        (PREFERENCES, {}, 3e-5),
        (PREFERENCES, {"optim.muon_scale": "match_rms_adamw"}, 1e-6),
        (POLICY, TASK, 3e-5),
        (POLICY, TASK | {"optim.muon_scale": "match_rms_adamw"}, 1e-6),
    ],
)
def test_default_rate_of_muon_fits_the_scale_of_its_updates(tiny_base, method, knobs, rate):
    stated = {"finetune.model": tiny_base, "optim.name": "muon"} | knobs
    if method is not POLICY:
        stated["data.source"] = "my.txt"
    stated = {key: str(value) for key, value in stated.items()}
    config, _ = finetune_config(None, [*stated.items()], method)
    assert config.optim.muon_learning_rate == rate


SCALED = {"optim.name": "muon", "optim.muon_scale": "match_rms_adamw"}


@pytest.mark.parametrize(
    ("knobs", "rate"),
    [
        # AdamW reads none.
        ({}, None),
        ({"optim.name": "muon"}, 0.02),
        (SCALED, 6e-4),
        (SCALED | {LEARNING_RATE: 1e-4}, 1e-4),
        (SCALED | {MUON_RATE: 0.02}, 0.02),
        (SCALED | {MUON_RATE: 0.02, LEARNING_RATE: 1e-4}, 0.02),
        # AdamW does not read the number that was the default.
        ({MUON_RATE: 0.02}, 0.02),
    ],
)
def test_default_rate_of_muon_in_pretraining_fits_its_scale(knobs, rate):
    config = load_config(None, {"data.source": "my.txt"} | knobs)
    assert config.optim.muon_learning_rate == rate
    # What was resolved stays, whatever the other knobs become.
    assert config.unstated == (set() if MUON_RATE in knobs else {MUON_RATE})
    recorded = load_config(None, knob_values(config))
    assert recorded.optim == config.optim
    assert recorded.unstated == ({MUON_RATE} if rate is None else set())


def test_default_rate_of_muon_follows_in_each_stage():
    stages = [
        {"at": 2, LEARNING_RATE: 1e-4},
        {"at": 4, "optim.muon_scale": "original"},
        {"at": 6, MUON_RATE: 3e-5},
    ]
    config = load_config(None, {"data.source": "my.txt", "train.stages": stages} | SCALED)
    rates = [stage.config.optim.muon_learning_rate for stage in stages_of(config)]
    assert rates == [6e-4, 1e-4, 0.02, 3e-5]


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        # The default of earlier versions.
        (SCALED | {MUON_RATE: 0.02}, SCALED, "set --optim.muon_learning_rate 0.02"),
        (SCALED | {MUON_RATE: 0.02}, SCALED | {MUON_RATE: 0.02}, ""),
        (SCALED | {MUON_RATE: 0.02}, SCALED | {MUON_RATE: 6e-4}, ""),
        (SCALED, SCALED, ""),
        (SCALED, SCALED | {LEARNING_RATE: 1e-4}, ""),
        # The rate of the recipe is the run's, whatever its other rate has become.
        (SCALED | {MUON_RATE: 6e-4, LEARNING_RATE: 1e-3}, SCALED, ""),
        ({"optim.name": "muon"}, {"optim.name": "muon"}, ""),
        ({"optim.name": "muon"}, SCALED, ""),
        ({}, {}, ""),
        # Earlier versions recorded it for AdamW, too.
        ({MUON_RATE: 0.02}, {}, ""),
    ],
)
def test_resume_does_not_change_to_a_new_default_of_muon(tmp_path, before, now, line):
    text = {"data.source": "my.txt"}
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.recipe.write_text(recipe_text(load_config(None, text | before, name="run")))
    config = load_config(None, text | now, name="run")
    if line:
        with pytest.raises(RunFolderError, match=line):
            changed_knobs(run, config)
    else:
        changed_knobs(run, config)
    # By its own recipe it continues as it began.
    assert changed_knobs(run, read_recipe(run)) == []
