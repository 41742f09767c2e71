"""Reward functions: a user's own file, and scores that raise, hang or return no number."""

import json
import math

import pytest

from nanogpt_hf.errors import UserError
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


FAILING = {
    "raises ValueError: no such key,": raises,
    "takes more than 0.1 seconds": hangs,
    "returns nan": lambda completion, question: math.nan,
    "returns inf": lambda completion, question: math.inf,
    "raises TypeError": lambda completion, question: None,
    "raises ValueError: could not": lambda completion, question: "much",
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
    with pytest.raises(UserError, match=r"the reward function .*'bad' of '2\+2'.*--rl.reward_errors zero") as caught:
        RewardFunction(score, 0.1, "stop").check(rewards.errors)
    assert "\n" not in str(caught.value)


def test_load_reward_calls_the_users_function(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def score(prompt, completion, answer):\n    return len(prompt) + (completion == answer)\n")
    score, digest = load_reward(f"{path}:score")
    assert score("4", QUESTION) == 4
    assert score("5", QUESTION) == 3
    before = digest
    path.write_text("def score(*_):\n    return 0\n")
    assert load_reward(f"{path}:score")[1] != before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("score", "expected a Python file and a function"),
        ("mine.txt:score", "expected a Python file and a function"),
        ("user/repo:score", "expected a Python file and a function"),
        ("missing.py:score", "no such file"),
        ("mine.py:other", "has no function 'other'"),
        ("broken.py:score", "cannot be imported: SyntaxError"),
        ("model/mine.py:score", "is in a model folder"),
        ("model/code/mine.py:score", "is in a model folder"),
    ],
)
def test_load_reward_refuses_what_is_no_function_of_the_user(tmp_path, monkeypatch, spec, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model" / "code").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps({}))
    (tmp_path / "model" / "model.safetensors").touch()
    for folder in (tmp_path, tmp_path / "model", tmp_path / "model" / "code"):
        (folder / "mine.py").write_text("def score(*_):\n    return 0\n")
    (tmp_path / "broken.py").write_text("def score(:")
    with pytest.raises(UserError, match=message) as caught:
        load_reward(spec)
    assert "\n" not in str(caught.value)
