"""Runs of on-policy distillation: they learn the teacher, resume exactly, do not depend on
processes, and refuse teachers and knobs that do not fit.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from assertions import copy_at, file_contents, same_weights, series, weights
from nanogpt_hf.commands import main
from nanogpt_hf.config.methods import POLICY
from nanogpt_hf.methods.finetuning import finetune_config
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.start import prepare_run
from nanogpt_hf.training.tracking import read_metrics
from policy_runs import (
    MIXED,
    TAUGHT,
    policy_trainer,
    save_student_and_teacher,
    taught_words,
)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory, save_chat_model):
    folder = tmp_path_factory.mktemp("on_policy")
    save_student_and_teacher(folder, save_chat_model)
    return folder


@pytest.fixture(scope="module")
def arguments(folder):
    """The command line of a run with other knobs."""
    return taught_words(folder)


@pytest.fixture(scope="module")
def train(folder, arguments, forget_accelerate):
    """Train with other knobs into the run folder `name`; return it."""
    return policy_trainer(folder, arguments, forget_accelerate)


@pytest.fixture(scope="module")
def mixed(train) -> RunFolder:
    return train("mixed", **MIXED)


def test_student_learns_the_teacher_on_its_own_answers(train):
    run = train("learning", train__max_steps=25, eval__every=25)
    divergences = series(run, "train/divergence")
    assert divergences[-1] < 0.5 * divergences[0]
    assert series(run, "train/loss") == pytest.approx(divergences, rel=1e-6)
    first, last = series(run, "val/divergence")
    assert last < 0.5 * first
    assert len(series(run, "train/reward")) == 25
    sevens = [
        event["samples"][0]["text"].count("7") for event in read_metrics(run) if "samples" in event
    ]
    assert sevens[-1] > sevens[0]
    assert f"{last:.4f} on held-out questions" in (run.best / "README.md").read_text()


def test_figures_of_rewards_are_logged_where_they_mean_something(train, mixed):
    """One answer has no spread, and a teacher alone teaches through equal rewards, too."""
    alone = train("one_sample", rl__samples=1, train__max_steps=1)
    logged = {name for event in read_metrics(alone) for name in event}
    assert "train/reward" in logged
    assert logged.isdisjoint({"train/reward_std", "train/no_signal"})
    assert series(mixed, "train/reward_std")
    assert series(mixed, "train/no_signal")


def test_run_resumes_exactly_in_the_middle(mixed, train, folder):
    copy_at(mixed, 4, folder / "parts")
    resumed = train("parts", "--resume", **MIXED)
    assert same_weights(resumed, mixed)
    for name in ("train/loss", "train/divergence", "train/reward", "val/divergence"):
        assert series(resumed, name) == series(mixed, name)


def test_accumulation_does_not_change_a_run(mixed, train):
    whole = train("whole", train__micro_batch_size=16, rl__batch_size=4, **MIXED)
    assert series(whole, "train/reward") == series(mixed, "train/reward")
    for name in ("train/loss", "train/divergence", "train/kl", "train/clipped", "val/divergence"):
        assert series(whole, name) == pytest.approx(series(mixed, name), abs=1e-5, rel=3e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2"])
def test_two_processes_equal_one(mixed, folder, arguments, launch_warm, machine):
    run = launch_warm(machine, "rl", *arguments(machine, **MIXED))
    # so the completions are the same
    for name in ("train/reward", "train/completion_tokens", "samples"):
        assert series(run, name) == series(mixed, name)
    for name in ("train/loss", "train/divergence", "train/kl", "train/grad_norm", "val/divergence"):
        tolerance = 1e-4 if "grad" in name else 1e-5
        assert series(run, name) == pytest.approx(series(mixed, name), abs=tolerance, rel=3e-5), (
            name
        )
    # after 12 of AdamW's updates at 0.01, whose size rounding can decide
    ours = weights(run)
    theirs = weights(mixed)
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < 1e-3
    held = json.loads((folder / f"{machine}.held.0.json").read_text())["weights"]
    assert {kind for kind, _, _ in held.values()} == (
        {"DTensor"} if machine == "fsdp2" else {"Parameter"}
    )


def test_share_of_on_policy_answers(train, folder):
    """With a share of 0 the student learns the reference answers, and samples nothing."""
    given = train("given", distill__on_policy=0.0, distill__weight=0.0, train__max_steps=20)
    losses = series(given, "train/loss")
    assert losses[-1] < 0.8 * losses[0]
    assert not any("train/reward" in event for event in read_metrics(given))
    assert len(series(given, "val/reward")) == len(series(given, "val/divergence")) == 8
    one = train("one", rl__samples=1, train__tokens_per_step=256, train__max_steps=2)
    assert len(series(one, "train/reward")) == 2


def test_changed_teacher_is_one_line_at_resume(mixed, folder, arguments, capsys, forget_accelerate):
    copy_at(mixed, 4, folder / "swapped")
    before = file_contents(folder / "swapped")
    path = folder / "teacher" / "model.safetensors"
    whole = path.read_bytes()
    tensors = load_file(path)
    tensors["transformer.wte.weight"][0, 0] += 1
    try:
        save_file(tensors, path, metadata={"format": "pt"})
        forget_accelerate()
        assert main(["rl", *arguments("swapped", **MIXED), "--resume"]) == 2
    finally:
        path.write_bytes(whole)
    error = capsys.readouterr().err.strip()
    assert "distill.teacher: its weights changed: sha256:" in error
    assert "Traceback" not in error
    assert file_contents(folder / "swapped") == before


def test_teacher_of_another_tokenizer_is_one_line(folder, arguments, letter_model, capsys):
    words = arguments(
        "other", distill__teacher=str(letter_model), data__block_size=32, rl__max_new_tokens=1
    )
    assert main(["rl", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert "its tokenizer has 11 tokens, and is not the tokenizer of the student, with 257" in error
    assert error.endswith("name another model")
    assert not (folder / "other").exists()


@pytest.fixture(scope="module")
def resized(folder, save_chat_model):
    """A function that gives the folder of a model whose embedding has other rows than tokens."""

    def resized(rows: int) -> str:
        path = folder / f"rows_{rows}"
        save_chat_model(path, lambda model, _: model.resize_token_embeddings(rows), bias=True)
        return str(path)

    return resized


@pytest.mark.one_row_per
@pytest.mark.parametrize(("student", "teacher"), [(320, 257), (257, 320), (320, 288)])
def test_padded_vocabularies_of_student_and_teacher_may_differ(student, teacher, train, resized):
    """A student of random weights samples padding, which the teacher may not be able to read."""
    knobs = {"train__max_steps": 1, "distill__teacher": resized(teacher)}
    run = train(f"padded_{student}_{teacher}", "--from", resized(student), **knobs)
    assert series(run, "val/divergence")[-1] > 0


WRONG_TEACHERS = {
    "a file": (lambda path: path.write_text("x"), "not a model folder"),
    "an empty folder": (lambda path: path.mkdir(), "not a model folder (no config.json in it)"),
    "nothing": (lambda path: None, "no such folder"),
}


@pytest.mark.parametrize("case", WRONG_TEACHERS)
def test_what_is_no_model_is_no_teacher(case, folder, arguments, tmp_path, capsys):
    write, message = WRONG_TEACHERS[case]
    write(tmp_path / "model")
    words = arguments("wrong", distill__teacher=str(tmp_path / "model"))
    assert main(["rl", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert f"distill.teacher: {tmp_path / 'model'}: " in error
    assert "\n" not in error
    assert not (folder / "wrong").exists()


def test_teacher_with_fewer_rows_than_tokens_is_one_line(folder, arguments, resized, capsys):
    assert main(["rl", *arguments("few", distill__teacher=resized(200))]) == 2
    error = capsys.readouterr().err.strip()
    assert error.endswith("rows_200: its tokenizer has 257 tokens, its model only 200")
    assert "distill.teacher: " in error
    assert not (folder / "few").exists()


def drawn(folder, name: str, **knobs) -> tuple:
    """The rollouts of step 1 of a run that has just begun, and their batch of all rows."""
    stated = {key.replace("__", "."): value for key, value in knobs.items()}
    places = {"finetune.model": str(folder / "student"), "distill.teacher": str(folder / "teacher")}
    config, _ = finetune_config(None, TAUGHT | {"rl.task": "arithmetic"} | stated | places, POLICY)
    run = prepare_run(config, folder / name)
    rollouts = run.data.train
    rollouts.draw(run.accelerator, run.model, 1)
    run.folder.unlock()
    return rollouts, rollouts.batch(np.arange(16))


def test_given_rows_are_reference_answers_without_advantages(folder, forget_accelerate, tmp_path):
    (tmp_path / "long.py").write_text(
        "def score(prompt, completion, answer):\n    return len(completion)\n"
    )
    reward = {"rl__reward": f"{tmp_path / 'long.py'}:score", "distill__weight": 0.5}
    forget_accelerate()
    own, whole = drawn(folder, "drawn_own", **reward)
    forget_accelerate()
    rollouts, batch = drawn(folder, "drawn_half", distill__on_policy=0.5, **reward)
    forget_accelerate()
    # Questions 4 to 7 of the run: the student answers the second and the fourth of them.
    assert batch["sampled"].tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 4 + [1.0] * 4
    assert whole["sampled"].all()
    given = batch["sampled"] == 0
    assert not batch["advantages"][given].any()
    assert torch.equal(batch["advantages"][~given], whole["advantages"][~given])
    assert batch["advantages"].any()
    texts = rollouts.sampler.texts(rollouts._answers, range(16))
    asked = rollouts.questions_at(1)
    assert [texts[row] for row in (0, 3, 8, 11)] == [asked[n].answer for n in (0, 0, 2, 2)]
    assert texts[4:8] == own.sampler.texts(own._answers, range(4, 8))
    for row in range(16):
        targets = batch["shift_labels"][row][batch["shift_labels"][row] != -100]
        assert (targets[-1] == rollouts.sampler.tokenizer.eos_token_id) or not given[row]
    figures = rollouts.metrics()
    rewards = own._answers.rewards
    assert figures["reward"] == pytest.approx(rewards[[*range(4, 8), *range(12, 16)]].mean().item())
    assert rollouts.num_targets(np.arange(16)) == (batch["shift_labels"] != -100).sum()
    question = replace(asked[0], answer="9" * 50)
    assert len(rollouts.given(question)[1]) == 6
