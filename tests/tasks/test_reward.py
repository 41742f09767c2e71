"""Reward functions: a user's own file, and scores that raise, hang or return no number."""

import math
import os
import sys

import pytest
import torch

from assertions import refusal
from nanogpt_hf.errors import UserError
from nanogpt_hf.tasks import reward
from nanogpt_hf.tasks.reward import RewardFunction, load_reward
from nanogpt_hf.tasks.task import Question

QUESTION = Question([{"role": "user", "content": "2+2"}], "4")


def raises(completion, question):
    raise ValueError("no such\nkey")


def hangs(completion, question):
    while True:
        try:
            math.factorial(50)
        except Exception:  # what a time limit must pass
            continue


class Unprintable(BaseException):
    def __str__(self):
        raise ValueError


def unprintable(completion, question):
    raise Unprintable


FAILING = {
    "ValueError: no such key,": raises,
    "0.1 seconds": hangs,
    "SystemExit: 0": lambda completion, question: sys.exit(0),
    "Unprintable": unprintable,
    "nan": lambda completion, question: math.nan,
    "TypeError": lambda completion, question: None,
}


@pytest.mark.parametrize("message", FAILING)
def test_failing_reward_is_zero_and_counted_or_one_line(message):
    def score(completion, question):
        return FAILING[message](completion, question) if completion == "bad" else 0.5

    counted = RewardFunction(score, 0.1, "zero")
    rewards = counted.rewards(["good", "bad", "good"], [QUESTION] * 3)
    assert rewards.values == [0.5, 0.0, 0.5]
    assert len(rewards.errors) == 1
    assert message in rewards.errors[0]
    counted.check(rewards.errors)
    line = refusal(RewardFunction(score, 0.1, "stop").check, rewards.errors, error=UserError)
    assert all(word in line for word in ("'bad'", "'2+2'", "--rl.reward_errors zero"))


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_reward_that_catches_every_exception_cannot_hang():
    def score(completion, question):
        while True:
            try:
                while True:  # the time limit always ends in here, never between two attempts
                    math.factorial(50)
            except BaseException:
                continue

    if not (child := os.fork()):
        RewardFunction(score, 0.01, "zero").rewards(["4"], [QUESTION])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_reward_changes_folder_and_gradients_for_itself_only(tmp_path, monkeypatch):
    def score(completion, question):
        os.chdir("/")
        torch.set_grad_enabled(False)

    monkeypatch.chdir(tmp_path)
    RewardFunction(score, 5.0, "zero").rewards(["4"], [QUESTION])
    assert os.path.samefile(".", tmp_path)
    assert torch.is_grad_enabled()


def test_load_reward_calls_the_users_function(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def score(prompt, completion, answer):\n    return len(prompt) + (completion == answer)\n"
    )
    score, digest = load_reward(f"{path}:score")
    assert score("4", QUESTION) == 4
    assert score("5", QUESTION) == 3
    before = digest
    path.write_text("def score(*_):\n    return 0\n")
    assert load_reward(f"{path}:score")[1] != before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("score", "'score'"),
        ("mine.txt:score", "'mine.txt:score'"),
        ("mine.py:other", "'other'"),
        ("broken.py:score", "SyntaxError"),
        ("hangs.py:score", "0.1 seconds"),
    ],
)
def test_load_reward_refuses_what_is_no_function_of_the_user(tmp_path, monkeypatch, spec, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(*_):\n    return 0\n")
    (tmp_path / "broken.py").write_text("def score(:")
    (tmp_path / "hangs.py").write_text("while True:\n    pass")
    monkeypatch.setattr(reward, "_IMPORT_SECONDS", 0.1)
    line = refusal(load_reward, spec, error=UserError)
    assert line.startswith("rl.reward: ")
    assert message in line
