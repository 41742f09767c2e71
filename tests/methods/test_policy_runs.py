"""Runs of reinforcement learning: they learn, resume exactly, do not depend on processes, and
report what they did.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from assertions import copy_at, same_weights, series, weights
from nanogpt_hf.commands import main
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics
from policy_runs import policy_trainer, policy_words

pytestmark = pytest.mark.long
DOCS = Path(__file__).parents[2] / "docs"
KNOBS = {
    "data.block_size": 64,
    "train.tokens_per_step": 1024,  # 16 sequences: 2 questions × 8 completions
    "train.micro_batch_size": 4,
    "train.max_steps": 6,
    "optim.learning_rate": 1e-2,
    "eval.every": 3,
    "checkpoint.every": 2,
    "rl.samples": 8,
    "rl.max_new_tokens": 6,
    "rl.eval_questions": 3,
    "rl.eval_samples": 2,
    "rl.temperature": 0.9,
}
MORE = {"rl__kl": 0.1, "rl__updates": 2, "rl__clip": 0.2, "rl__scale_advantages": "true"}
MORE["tracking__layers"] = "true"
SEVENS = "def score(prompt, completion, answer):\n    return completion.count('7') / 6\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, save_chat_model):
    """A model of random weights that answers with digits, a reward for sevens, and the runs of
    the module.
    """
    folder = tmp_path_factory.mktemp("rl")

    def like_digits(model, tokenizer):
        likely = tokenizer("0123456789", add_special_tokens=False)["input_ids"]
        # digits and the end lie along the bias before the head
        model.transformer.ln_f.bias.copy_(torch.randn(32).sign())
        likely = [*likely, tokenizer.eos_token_id]
        model.transformer.wte.weight[likely] += 0.2 * model.transformer.ln_f.bias

    save_chat_model(folder / "start", like_digits, bias=True)
    (folder / "sevens.py").write_text(SEVENS)
    return folder


@pytest.fixture(scope="module")
def arguments(folder):
    """The command line of a run with other knobs."""
    start = ["--from", str(folder / "start"), "--task", "arithmetic"]
    start += ["--reward", f"{folder / 'sevens.py'}:score"]
    return policy_words(folder, start, KNOBS)


@pytest.fixture(scope="module")
def train(folder, arguments, forget_accelerate):
    """Train with other knobs into the run folder `name`; return it."""
    return policy_trainer(folder, arguments, forget_accelerate)


@pytest.fixture(scope="module")
def plain(train) -> RunFolder:
    return train("plain")


@pytest.fixture(scope="module", params=["grpo", "gspo"])
def more(request) -> dict:
    """All parts of the objective, with ratios of tokens and of answers."""
    return MORE | {"rl__loss": request.param}


@pytest.fixture(scope="module")
def full(train, more) -> RunFolder:
    return train(f"full_{more['rl__loss']}", **more)


def test_run_reports_rewards_lengths_entropy_and_pass_rates(plain):
    events = read_metrics(plain)
    trained = [event for event in events if "train/loss" in event]
    assert [event["step"] for event in trained] == [1, 2, 3, 4, 5, 6]
    names = {"reward", "reward_std", "completion_tokens", "truncated", "entropy", "no_signal"}
    assert all(f"train/{name}" in event for event in trained for name in names)
    assert all(0 < event["train/entropy"] < 5.6 for event in trained)
    evaluated = [event for event in events if "val/reward" in event]
    assert [event["step"] for event in evaluated] == [0, 3, 6]
    assert all(0 <= event["val/pass@1"] <= event["val/pass@2"] <= 1 for event in evaluated)
    samples = [event["samples"] for event in events if "samples" in event]
    assert [len(answers) for answers in samples] == [3, 3, 3]
    assert [s["prompt"] for s in samples[0]] == [s["prompt"] for s in samples[-1]]


def test_the_pages_list_the_metrics_that_are_logged(full):
    pages = {name: (DOCS / name).read_text("utf-8") for name in ("alignment.md", "watching.md")}
    table = pages["alignment.md"].partition("### What to watch")[2].partition("###")[0]
    rows = re.findall(r"^\| (`.*?) \| (`.*?) \|", table, re.MULTILINE)
    quoted = re.compile(r"`(.+?)`")
    listed = {
        under + name
        for names, places in rows
        for name in quoted.findall(names)
        for under in quoted.findall(places)
    }
    common = set(quoted.findall("\n".join(re.findall(r"^\|(.*?)\|", pages["watching.md"], re.M))))
    # The samples are "examples" there, and the layers are by number here.
    named = re.compile(r"layers/|val/pass@|samples$").match
    logged = {name for event in read_metrics(full) for name in event if not named(name)}
    assert logged - common <= listed <= logged


def test_rewards_rise(train):
    run = train("learning", train__max_steps=25, eval__every=25)
    rewards = series(run, "train/reward")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    first, last = series(run, "val/reward")
    assert last > first + 0.1
    assert f"{last:.4f} on held-out questions" in (run.best / "README.md").read_text()


def test_run_resumes_exactly_in_the_middle(full, more, train, folder):
    parts = f"parts_{more['rl__loss']}"
    copy_at(full, 4, folder / parts)
    resumed = train(parts, "--resume", **more)
    assert same_weights(resumed, full)
    for name in ("train/loss", "train/reward", "val/reward", "layers/0/update_ratio"):
        assert series(resumed, name) == series(full, name)


def test_accumulation_does_not_change_a_run(full, more, train):
    name = f"whole_{more['rl__loss']}"
    whole = train(name, train__micro_batch_size=16, rl__batch_size=4, **more)
    assert series(whole, "train/reward") == series(full, "train/reward")
    for name in ("train/loss", "train/entropy", "train/kl", "train/clipped"):
        assert series(whole, name) == pytest.approx(series(full, name), abs=1e-5, rel=3e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2"])
def test_two_processes_equal_one(full, more, folder, arguments, launch_warm, machine):
    folder_name = f"{machine}_{more['rl__loss']}"
    run = launch_warm(machine, "rl", *arguments(folder_name, **more))
    # so the completions are the same
    assert series(run, "train/reward") == series(full, "train/reward")
    for name in ("train/completion_tokens", "samples"):
        assert series(run, name) == series(full, name)
    for name in ("train/loss", "train/kl", "train/entropy", "train/grad_norm"):
        tolerance = 1e-4 if "grad" in name else 1e-5
        assert series(run, name) == pytest.approx(series(full, name), abs=tolerance, rel=3e-5), name
    # after 12 of AdamW's updates at 0.01, whose size rounding can decide
    ours = weights(run)
    theirs = weights(full)
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < 1e-3
    held = json.loads((folder / f"{folder_name}.held.0.json").read_text())["weights"]
    assert {kind for kind, _, _ in held.values()} == (
        {"DTensor"} if machine == "fsdp2" else {"Parameter"}
    )


def test_failing_rewards_stop_the_run_or_are_counted(
    folder, arguments, train, capsys, forget_accelerate
):
    (folder / "bad.py").write_text(
        "def score(prompt, completion, answer):\n    return 1 / (len(completion) % 2)\n"
    )
    bad = ["--reward", f"{folder / 'bad.py'}:score"]
    forget_accelerate()
    assert main(["rl", *arguments("stopped"), *bad]) == 2
    error = capsys.readouterr().err.strip()
    assert "the reward function raises ZeroDivisionError" in error
    assert "--rl.reward_errors zero" in error
    assert "Traceback" not in error
    counted = train("counted", *bad, rl__reward_errors="zero", train__max_steps=2)
    assert max(series(counted, "train/reward_errors")) >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "arithmetics"], "did you mean arithmetic"),
        (["--rl.samples", "7"], "rl.samples: 7 does not divide the 16 sequences of a step"),
        (["--rl.max_new_tokens", "64"], "rl.max_new_tokens: 64 leaves no room"),
        (["--rl.max_new_tokens", "50"], "max_new_tokens 50 that is more than 64"),
    ],
)
def test_mistakes_end_in_one_line_before_the_first_step(
    arguments, folder, options, message, capsys
):
    assert main(["rl", *arguments("mistaken"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (folder / "mistaken").exists()


def test_questions_longer_than_a_block_are_left_out(folder, arguments, tmp_path, capsys):
    """Also a reward beyond float32's range ends the run in one line."""
    rows = [{"question": f"{n}+1", "answer": f"{n + 1}"} for n in range(30)]
    rows += [{"question": "1+" * 200, "answer": "1"} for _ in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[30:]))
    (tmp_path / "huge.py").write_text("def score(prompt, completion, answer):\n    return 1e30\n")
    task = ["--task", "exact", "--reward", f"{tmp_path / 'huge.py'}:score"]
    for file, message in (
        ("rows", "returns 1e+30, which is no number up to 1e+15"),
        ("long", "no question leaves room for an answer: the shortest, '1+1+"),
    ):
        source = ["--data.source", str(tmp_path / f"{file}.jsonl")]
        assert main(["rl", *arguments(f"long_{file}"), *task, *source]) == 2
        out, error = capsys.readouterr()
        assert message in error
        assert "Traceback" not in error
        if file == "rows":
            assert "; 5 leave no room for rl.max_new_tokens, left out; the first: " in out
        else:
            assert error.strip().endswith("raise data.block_size")


@pytest.mark.parametrize("name", ["arithmetic_rl", "gsm8k_rl"])
def test_shipped_rl_recipes_train(name, folder, root, tmp_path, monkeypatch, forget_accelerate):
    monkeypatch.chdir(tmp_path)
    small = {"train.max_steps": 1, "optim.warmup_steps": 0, "train.tokens_per_step": 1024}
    small |= {"train.micro_batch_size": 4}
    small |= {"data.block_size": 64, "rl.max_new_tokens": 4, "rl.eval_questions": 2}
    if name == "gsm8k_rl":
        rows = [
            {"question": f"{n} + 1?", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}
            for n in range(9)
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        small |= {"data.config": "null", "data.validation_split": "null", "rl.batch_size": 4}
        small["data.source"] = "rows.jsonl"
    options = [str(word) for key, value in small.items() for word in (f"--{key}", value)]
    forget_accelerate()
    recipe = str(root / "recipes" / f"{name}.yaml")
    assert main(["rl", recipe, "--from", str(folder / "start"), *options]) == 0
    assert series(RunFolder(tmp_path / "runs" / name), "train/reward")


@pytest.mark.parametrize("command", ["pretrain", "prepare"])
def test_commands_that_read_text_refuse_an_rl_recipe(command, root, capsys):
    assert main([command, str(root / "recipes" / "arithmetic_rl.yaml")]) == 2
    assert "its command is `nanogpt-hf rl`" in capsys.readouterr().err
