"""Knobs that change at a resume: verify, inspect and branch take those that held at a step."""

import json
import shutil

import pytest

from arguments import argv
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import Config, get_value, replace_knobs
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.recipe import recipe_text
from nanogpt_hf.runs.state import changing_knobs, is_fixed
from nanogpt_hf.training.resume import change_lines

pytestmark = pytest.mark.long
# each value differs from that of the run before the resume
VALUES = {
    "optim.learning_rate": 3e-3,
    "optim.muon_learning_rate": 3e-3,
    "optim.rates": {"tokens": 0.5},
    "optim.muon_momentum": 0.8,
    "optim.muon_scale": "spectral",
    "optim.min_learning_rate": 1e-4,
    "optim.schedule": "linear",
    "optim.warmup_steps": 6,
    "optim.decay_fraction": 0.9,
    "optim.weight_decay": 0.4,
    "optim.beta1": 0.5,
    "optim.beta2": 0.6,
    "optim.betas": {"tokens": [0.5, 0.6]},
    "optim.weight_decays": {"tokens": 0.5},
    "optim.max_grad_norm": 0.01,
    "optim.decay_steps": 7,
    "train.max_steps": 9,
    "train.micro_batch_size": 1,
    "train.deterministic": False,
    "train.rollback_ratio": 50,
    "train.max_time": "9h",
    "eval.every": 3,
    "eval.tokens": 64,
    "eval.patience": 5,
    "eval.sample_tokens": 3,
    "checkpoint.every": 1,
    "checkpoint.keep": 8,
    "tracking.every": 2,
    "tracking.layers": True,
    "rl.eval_questions": 3,
    "rl.eval_samples": 3,
    "rl.reward_seconds": 3,
    "rl.reward_errors": "zero",
}
# they are rows of other tests: a model with experts, a compiler, a number of steps that they set
ELSEWHERE = {"optim.balance_loss", "optim.state", "train.tokens_per_parameter"}
ELSEWHERE |= {"train.budget", "train.epochs"}
OF_TEXT = [key for key in VALUES if not key.startswith(("optim.muon", "rl."))]
AT = 4


@pytest.fixture(scope="module")
def begun(train, tmp_path_factory) -> RunFolder:
    """A run of four steps, which no test may change."""
    folder = tmp_path_factory.mktemp("begun")
    return train(folder / "run", **BEGUN)


BEGUN = {
    "train__max_steps": AT,
    "checkpoint__keep": 9,
    "checkpoint__every": 2,
    "eval__every": 2,
    "tracking__every": 1,
    "eval__samples": ["The"],
    "eval__sample_tokens": 4,
    "optim__schedule": "wsd",
    "optim__warmup_steps": 1,
    "train__deterministic": True,
}


@pytest.fixture
def resumed(begun, train, tmp_path, make_recipe):
    """The run, continued to step 8 with other knobs."""

    def resumed(**knobs) -> RunFolder:
        run = RunFolder(shutil.copytree(begun.path, tmp_path / "run"))
        shutil.copytree(begun.path.parent / "data", tmp_path / "data")
        moved = {"data__dir": str(tmp_path / "data")}
        options = {key.replace(".", "__"): value for key, value in knobs.items()}
        return train(run.path, resume=True, **BEGUN | {"train__max_steps": 8} | options | moved)

    return resumed


@pytest.fixture
def call(capsys, forget_accelerate):
    def call(words: str, *paths) -> tuple[int, str]:
        forget_accelerate()
        capsys.readouterr()
        status = main(argv(words, *paths))
        return status, "\n".join(capsys.readouterr())

    return call


def test_each_knob_that_may_change_has_a_value(begun):
    changing = set(changing_knobs(Config()))
    assert changing == VALUES.keys() | ELSEWHERE
    assert not any(map(is_fixed, changing))
    recipe = load_config(begun.recipe)
    assert not [key for key in VALUES if get_value(recipe, key) == VALUES[key]]


def check(run: RunFolder, call, knobs: dict) -> None:
    last = run.checkpoint_folders()[-1]
    end = int(last.name.removeprefix("step_"))
    for steps in (f"0:{AT}", f"{AT}:{end}", f"2:{end}"):
        status, out = call(f"verify {{}} --steps {steps}", run.path)
        assert status == 0, out
        assert "equal" in out
    for step in (AT, end):
        status, out = call(f"inspect {{}} --step {step}", run.path)
        assert status == 0, out
    for step, other in ((2, False), (AT, False), (AT + 2, True)):
        if not run.checkpoint(step).is_dir():
            continue
        branch = run.path.parent / f"branch{step}"
        status, out = call(
            f"branch {{}} --at {step} --run-dir {{}} --train.max_steps 12", run.path, branch
        )
        assert status == 0, out
        recipe = load_config(RunFolder(branch).recipe)
        for key, value in knobs.items():
            if key != "train.max_steps":
                assert (get_value(recipe, key) == value) is other, key


def test_longer_run_with_all_other_knobs_is_equal(resumed, call):
    # The new schedule does not read this one; the next test changes it.
    knobs = {key: VALUES[key] for key in OF_TEXT if key != "optim.decay_fraction"}
    run = resumed(**knobs)
    check(run, call, knobs)
    state = json.loads((run.checkpoint_folders()[-1] / "state.json").read_text())
    assert [entry["step"] for entry in state["history"]] == [0, AT]


def test_longer_run_is_equal_and_branches_at_its_first_end(resumed, call):
    decay = {"optim.decay_fraction": VALUES["optim.decay_fraction"]}
    check(resumed(**{"train.max_steps": 9} | decay), call, decay)


@pytest.mark.slow
@pytest.mark.parametrize("key", OF_TEXT)
def test_run_with_another_knob_is_equal(key, resumed, call):
    check(resumed(**{key: VALUES[key]}), call, {key: VALUES[key]})


def test_several_resumes_and_one_before_its_evaluation(resumed, train, call):
    """The second resume is from a checkpoint that was saved before its evaluation."""
    run = resumed(**{"optim.learning_rate": 3e-3, "train.max_steps": 6})
    path = run.checkpoint(6) / "state.json"
    assert json.loads(path.read_text())["evaluated_step"] == 6
    more = BEGUN | {"data__dir": str(run.path.parent / "data"), "optim__learning_rate": 2e-3}
    train(run.path, resume=True, **more | {"train__max_steps": 7, "eval__tokens": 64})
    train(run.path, resume=True, **more | {"train__max_steps": 9, "eval__tokens": 96})
    history = json.loads((run.checkpoint(9) / "state.json").read_text())["history"]
    assert [entry["step"] for entry in history] == [0, 4, 6, 7]
    status, out = call("verify {} --steps 0:9", run.path)
    assert status == 0, out


def test_difference_names_what_was_changed(resumed, call):
    """Without its history, a longer run would differ."""
    run = resumed(**{"train.max_steps": 9})
    events = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    next(event for event in events if "train/loss" in event)["train/loss"] += 1e-3
    run.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert call("verify {} --steps 0:8", run.path)[0] == 1


def test_lost_machine_json_is_one_line(resumed, call, caplog):
    run = resumed()
    run.machine.unlink()
    assert call("verify {} --steps 0:8", run.path)[0] == 0
    assert caplog.text.count("machine.json: is lost, so the number of processes") == 1


def test_starts_of_other_steps_do_not_count(resumed, call):
    """Only those after step 4 were taken on two processes."""
    run = resumed()
    starts = json.loads(run.machine.read_text())
    assert [start["step"] for start in starts["starts"]] == [0, AT]
    starts["starts"][1]["processes"] = 2
    run.machine.write_text(json.dumps(starts))
    assert call(f"verify {{}} --steps 0:{AT}", run.path)[0] == 0
    status, out = call(f"verify {{}} --steps {AT}:8", run.path)
    assert (status, "was trained on 2 processes" in out) == (2, True)


@pytest.mark.parametrize(
    ("changes", "left_out", "follows"),
    [
        ({}, {}, None),
        ({"train.max_steps": 16}, {}, "learning rate of the next step is 0.0"),
        ({"optim.learning_rate": 0.5, "optim.min_learning_rate": 0.4}, {}, "is 0.4 instead of 0.0"),
        ({"train.micro_batch_size": 1}, {}, "dropout draws other masks"),
        ({"optim.weight_decay": 0.4}, {}, None),
        ({"train.max_time": "9h"}, {}, None),
        # It keeps the size of the run.
        ({"optim.weight_decay": 0.4}, {"train.micro_batch_size": "auto"}, None),
        # The steps are not counted yet, and with them the rates.
        (
            {"optim.learning_rate": 0.5, "optim.min_learning_rate": 0.4},
            {"train.epochs": 2.0},
            None,
        ),
    ],
)
def test_resume_says_what_follows_for_its_next_step(honest, changes, left_out, follows):
    now = replace_knobs(load_config(honest.recipe), changes | left_out)
    lines = change_lines(honest, now, step=8)
    assert len(lines) == len(changes) + bool(follows)
    assert not follows or follows in lines[-1]


@pytest.mark.parametrize(
    "dropout",
    [
        {"model.dropout": 0.1},
        {"lora.rank": 2, "lora.dropout": 0.1},
        {"model.architecture": "llama", "model.extra": {"attention_dropout": 0.1}},
    ],
)
@pytest.mark.parametrize("factor", [0, 1])
def test_resume_says_that_masks_change_with_any_dropout(tmp_path, dropout, factor):
    knobs = {key: value * factor if value == 0.1 else value for key, value in dropout.items()}
    if "model.extra" in knobs:
        knobs["model.extra"] = {"attention_dropout": 0.1 * factor}
    before = replace_knobs(Config(), knobs | {"finetune.model": "gpt2", "data.source": "my.txt"})
    run = RunFolder(tmp_path)
    run.recipe.write_text(recipe_text(before))
    lines = change_lines(run, replace_knobs(before, {"train.micro_batch_size": 1}), step=0)
    assert any("dropout draws other masks" in line for line in lines) == bool(factor)


def test_damaged_checkpoint_of_a_resume_with_a_change_is_one_warning(resumed, call, caplog):
    run = resumed()
    (run.checkpoint(8) / "state.json").write_text("{")
    status, out = call("resume {} --train.max_steps 9", run.path)
    assert status == 0, out
    assert caplog.text.count("trying an older one") == 1
    assert caplog.text.count("changed since the run began: train.max_steps: 8 -> 9") == 1
