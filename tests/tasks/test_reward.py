"""Reward functions: a user's own file, and scores that raise, hang or return no number."""

import hashlib
import math
import os
import sys

import pytest
import torch

from assertions import refusal
from nanogpt_hf.errors import UserError
from nanogpt_hf.tasks import user_code
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
    "returns nan, which is no number up to 1e+15,": lambda completion, question: math.nan,
    "returns inf, which is no": lambda completion, question: math.inf,
    "returns 1e+300, which is no": lambda completion, question: 1e300,
    "returns 1e+30, which is no": lambda completion, question: 10**30,
    "returns -1.1e+15, which is no": lambda completion, question: -1.1e15,
    "returns 1e+16, which is no": lambda completion, question: torch.tensor(1e16),
    "OverflowError": lambda completion, question: 10**400,
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


def test_largest_reward_is_taken():
    rewards = RewardFunction(lambda *_: -1e15, 5.0, "stop").rewards(["4"], [QUESTION])
    assert (rewards.values, rewards.errors) == ([-1e15], [])


CHANGES = {
    "gradients": lambda: torch.set_grad_enabled(False),
    "no_grad": lambda: torch.no_grad().__enter__(),
    "device": lambda: torch.set_default_device("meta"),
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "algorithms": lambda: torch.use_deterministic_algorithms(True),
    "folder": lambda: os.chdir("/"),
}


def settings():
    return (
        torch.is_grad_enabled(),
        torch.ones(1).device.type,
        torch.ones(1).dtype,
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        os.getcwd(),
    )


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_reward_changes_folder_and_settings_for_itself_only(tmp_path, monkeypatch, what, raises):
    changed = []

    def score(completion, question):
        CHANGES[what]()
        changed.append(settings())
        if raises:
            raise ValueError
        return 1.0

    monkeypatch.chdir(tmp_path)
    before = settings()
    RewardFunction(score, 5.0, "zero").rewards(["4", "5"], [QUESTION] * 2)
    assert settings() == before
    assert len(changed) == 2
    assert before not in changed


def test_reward_file_changes_settings_for_itself_only(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\ntorch.set_default_device('meta')\ntorch.set_grad_enabled(False)\n"
        "def score(*_):\n    return 0\n"
    )
    before = settings()
    load_reward(f"{path}:score")
    assert settings() == before


@pytest.mark.parametrize(
    "body",
    [
        "async def score(*_):\n    return 1",
        "def score(*_):\n    yield 1",
        "async def score(*_):\n    yield 1",
        "class Score:\n    async def __call__(self, *_):\n        return 1\nscore = Score()",
    ],
)
def test_reward_that_returns_no_number_is_refused_at_once(tmp_path, body):
    path = tmp_path / "mine.py"
    path.write_text(f"{body}\n")
    line = refusal(load_reward, f"{path}:score", error=UserError)
    assert line.startswith(f"rl.reward: {path}: score: is asynchronous or a generator")


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


MODULES = {
    "helper.py": "VALUE = 1",
    "pack/__init__.py": "",
    "pack/inner.py": "from . import other\nfrom .deep.last import VALUE",
    "pack/other.py": "import math, json, torch.nn.functional",
    "pack/deep/last.py": "from ..other import math\nVALUE = 2",
    "broken.py": "def (",
    "unused.py": "VALUE = 3",
}
# Statements of a reward file, and the modules in which a change is one of its reward.
IMPORTS = {
    "import json, torch": [],
    "from nanogpt_hf.errors import UserError": [],
    "import helper": ["helper"],
    "from helper import VALUE": ["helper"],
    "import pack": ["pack"],
    "from pack import other": ["pack", "pack.other"],
    "import pack.other as x": ["pack", "pack.other"],
    "from pack.inner import *": ["pack", "pack.deep.last", "pack.inner", "pack.other"],
    "def f():\n    import helper": ["helper"],
    "def f():\n    import broken": ["broken"],
    "try:\n    import nothing\nexcept ImportError:\n    import helper": ["helper"],
}


@pytest.mark.parametrize("statements", IMPORTS)
def test_digest_is_of_the_users_own_modules_too(statements, tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    path = tmp_path / "mine.py"
    path.write_text(f"{statements}\ndef score(*_):\n    return 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("helper", "pack", "pack.inner", "pack.other", "pack.deep", "pack.deep.last"):
        # Set first, so that it is removed at the end.
        monkeypatch.setitem(sys.modules, module, None)
        del sys.modules[module]
    before = load_reward(f"{path}:score")[1]
    assert before.startswith(f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}")
    changing = []
    for name, text in MODULES.items():
        (tmp_path / name).write_text(f"{text}\n# changed")
        if load_reward(f"{path}:score")[1] != before:
            changing.append(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        (tmp_path / name).write_text(text)
    assert sorted(changing) == IMPORTS[statements]
    assert load_reward(f"{path}:score")[1] == before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("score", "'score'"),
        ("mine.txt:score", "'mine.txt:score'"),
        ("missing.py:score", "no such file"),
        ("mine.py:other", "'other'"),
        ("broken.py:score", "SyntaxError"),
        ("exits.py:score", "SystemExit: 0"),
        ("hangs.py:score", "0.1 seconds"),
    ],
)
def test_load_reward_refuses_what_is_no_function_of_the_user(tmp_path, monkeypatch, spec, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(*_):\n    return 0\n")
    (tmp_path / "broken.py").write_text("def score(:")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)")
    (tmp_path / "hangs.py").write_text("while True:\n    pass")
    monkeypatch.setattr(user_code, "_IMPORT_SECONDS", 0.1)
    line = refusal(load_reward, spec, error=UserError)
    assert line.startswith("rl.reward: ")
    assert message in line


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [
        ("prompt, completion, answer", True),
        ("*_", True),
        ("p, c, a=None, **rest", True),
        ("completions, **kwargs", False),  # TRL's
        ("completion", False),
        ("prompt, completion, answer, more", False),
        ("prompt, completion, *, answer", False),
        ("", False),
    ],
)
def test_parameters_of_a_reward_are_checked_before_the_run(tmp_path, parameters, fits):
    path = tmp_path / "mine.py"
    path.write_text(f"def score({parameters}):\n    return 1\nbuilt_in = max\n")
    load_reward(f"{path}:built_in")
    if fits:
        assert load_reward(f"{path}:score")[0]("4", QUESTION) == 1
    else:
        line = refusal(load_reward, f"{path}:score", error=UserError)
        assert f"score({parameters}) is called" in line
        assert "score(prompt, completion, answer)" in line
