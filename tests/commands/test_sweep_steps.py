"""Sweeps of runs that find their number of steps when they start, by train.epochs or train.budget:
each equals its single command, and the table has the steps that it took.
"""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from arguments import argv
from assertions import at_step, numbers
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training import budget, clock

KNOBS = {"optim__warmup_steps": 0.125, "eval__every": 8, "tracking__every": 1}
FROM_A_MODEL = (
    "--data.block_size 64 --train.tokens_per_step 128 --train.micro_batch_size 2 --eval.every 2 "
    "--eval.patience null"
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def recipe(write_recipe):
    # The default, which is not left out with a line.
    return write_recipe(**KNOBS, train__max_steps=600_000)


@pytest.fixture
def timed(monkeypatch):
    """Each step takes 0.5 s in the timing, each evaluation 2 s."""

    def time_of(device, work, times=1):
        for _ in range(times):
            work()
        return 0.5 if work.__name__ == "step" else 2.0

    monkeypatch.setattr(clock, "time_of", time_of)
    monkeypatch.setattr(budget, "time_of", time_of)


@pytest.fixture
def base(tmp_path, save_chat_model, text_file):
    save_chat_model(tmp_path / "base", dropout=0.0)
    Path("text.txt").write_text(text_file.read_text()[:2000])
    pairs = [{"prompt": "a", "chosen": f"b{n % 7}", "rejected": f"c{n % 5}"} for n in range(40)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return "base"


def rows_of(folder="sweep"):
    return json.loads((Path(folder) / "sweep.json").read_text())["runs"]


def facts(folder):
    """What a run has measured, without times, its last weights, and its recipe."""
    weights = Path(folder, "final", "model.safetensors").read_bytes()
    return numbers(RunFolder(folder)), weights, Path(folder, "recipe.yaml").read_text()


def recorded_steps(name):
    return load_config(Path("sweep", name, "recipe.yaml")).train.max_steps


def dry_rows(words):
    assert main(argv(f"{words} --dry-run --json dry.json")) == 0
    return json.loads(Path("dry.json").read_text())["runs"]


def check_runs(command, words, knob, values, in_process, forget_accelerate):
    """Sweep a knob; return the rows of the runs, which equal their single commands."""
    assert main(argv(f"sweep {words} {knob} {','.join(values)} --sweep-dir sweep")) == 0
    started = [*in_process]
    assert len(started) == len(values)
    for value, name in zip(values, started, strict=True):
        forget_accelerate()
        assert main(argv(f"{command} {words} {knob} {value} --run-dir single-{value}")) == 0
        assert facts(f"single-{value}") == facts(f"sweep/{name}")
    # The same command again finds all of them done.
    forget_accelerate()
    assert main(argv(f"sweep {words} {knob} {','.join(values)} --sweep-dir sweep")) == 0
    assert in_process == started
    rows = rows_of()
    assert [row["steps"] for row in rows] == [recorded_steps(name) for name in started]
    assert {row["status"] for row in rows} == {"done"}
    return rows


@pytest.mark.long
@pytest.mark.one_row_per
@pytest.mark.parametrize(
    ("knob", "values", "more"),
    [
        ("--optim.learning_rate", ["0.01", "0.02"], "--train.epochs 0.02"),
        ("--train.epochs", ["0.01", "0.03"], ""),
        ("--optim.learning_rate", ["0.01", "0.02"], "--train.budget 21s"),
        ("--train.budget", ["15s", "21s"], ""),
    ],
)
def test_runs_equal_their_single_commands(
    recipe, in_process, forget_accelerate, timed, knob, values, more
):
    words = f"{recipe} {more}"
    rows = check_runs("pretrain", words, knob, values, in_process, forget_accelerate)
    tokens = load_config(recipe).train.tokens_per_step
    assert [row["tokens"] for row in rows] == [row["steps"] * tokens for row in rows]
    assert len({row["flops"] / row["tokens"] for row in rows}) == 1
    # The knob that was swept with the steps changes them, and no other one.
    assert len({row["steps"] for row in rows}) == (1 if more else 2)


@pytest.mark.long
@pytest.mark.one_row_per
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("finetune", "--data text.txt --train.epochs 0.1,0.5"),
        ("align", "--data pairs.jsonl --loss dpo --train.epochs 1,2"),
        (
            "finetune",
            "--data text.txt --finetune.freeze_layers 1 --finetune.unfreeze_every 3 "
            "--train.epochs 0.1,0.5",
        ),
    ],
)
def test_runs_from_a_model_equal_their_single_commands(
    base, in_process, forget_accelerate, command, options
):
    *more, knob, values = options.split()
    words = f"--from {base} {FROM_A_MODEL} {' '.join(more)}"
    rows = check_runs(command, words, knob, values.split(","), in_process, forget_accelerate)
    first, second = rows
    assert 0 < first["steps"] < second["steps"]


def test_dry_run_lists_the_steps_that_are_known(recipe, in_process, capsys):
    words = f"sweep {recipe} --train.epochs 0.02,0.04,null --sweep-dir sweep"
    rows = dry_rows(words)
    assert [(row["steps"], row["tokens"], row["flops"]) for row in rows[:2]] == [(None,) * 3] * 2
    out = capsys.readouterr().out
    assert "steps of train.epochs: counted after `prepare`" in out
    assert "train.budget" not in out
    (line,) = [line for line in out.splitlines() if line.startswith("epochs=0.02 ")]
    assert line.split()[2:5] == ["–"] * 3
    config = load_config(recipe)
    assert rows[2]["steps"] == config.train.max_steps
    prepare(config)
    rows = dry_rows(words)
    assert "counted after" not in capsys.readouterr().out
    # 0.02 and 0.04 of the blocks, rounded up to whole steps
    half, whole, plain = (row["steps"] for row in rows)
    assert half in (-(-whole // 2), whole // 2 + 1)
    assert (half < whole, plain) == (True, config.train.max_steps)
    assert [row["tokens"] for row in rows] == [
        row["steps"] * config.train.tokens_per_step for row in rows
    ]
    assert in_process == []
    assert not Path("sweep").exists()


def test_dry_run_of_a_budget_times_nothing(recipe, in_process, capsys):
    words = f"sweep {recipe} --train.budget 5m,10m --sweep-dir sweep"
    assert [row["steps"] for row in dry_rows(words)] == [None, None]
    assert "steps of train.budget: timed when the run starts" in capsys.readouterr().out


@pytest.mark.long
def test_other_epochs_in_the_same_folder_are_refused(
    recipe, in_process, forget_accelerate, refused
):
    words = f"sweep {recipe} --train.seed 1,2 --sweep-dir sweep --train.epochs"
    assert main(argv(f"{words} 0.02")) == 0
    steps = recorded_steps("seed=1")
    line = refused(*argv(f"{words} 0.03"))
    assert f"holds a run of another recipe (train.max_steps: {steps} -> " in line
    assert "give another --sweep-dir" in line
    # Prepared data that is gone is prepared again, and the runs are at their end.
    shutil.rmtree(load_config(recipe).data.dir)
    before = facts("sweep/seed=1")
    forget_accelerate()
    assert main(argv(f"{words} 0.02")) == 0
    assert in_process[2:] == ["seed=1", "seed=2"]
    assert facts("sweep/seed=1") == before
    forget_accelerate()
    assert main(argv(f"{words} 0.03 --overwrite")) == 0
    assert recorded_steps("seed=1") > steps


@pytest.mark.long
def test_run_of_a_budget_that_began_keeps_its_steps(
    recipe, in_process, forget_accelerate, timed, monkeypatch, caplog
):
    caplog.set_level("INFO")
    words = f"sweep {recipe} --train.seed 1,2 --sweep-dir sweep --train.budget 21s"
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert main(argv(words)) == 75
    steps = recorded_steps("seed=1")
    # This machine is slower now.
    monkeypatch.setattr(budget, "MARGIN", 0.5)
    forget_accelerate()
    assert main(argv(words)) == 0
    assert f"seed=1: began before, so it keeps its train.max_steps {steps}" in caplog.text
    assert in_process == ["seed=1", "seed=1", "seed=2"]
    first, second = rows_of()
    assert (first["status"], first["steps"]) == ("done", steps)
    assert second["steps"] == recorded_steps("seed=2") < steps


def test_too_long_warm_up_is_found_before_the_first_run(recipe, in_process, refused):
    prepare(load_config(recipe))
    words = f"sweep {recipe} --optim.warmup_steps 2,1000 --train.epochs 0.02 --sweep-dir sweep"
    for dry_run in ("", " --dry-run"):
        line = refused(*argv(words + dry_run))
        assert "warmup_steps=1000: optim.warmup_steps: 1,000 is more than the " in line
        assert line.endswith("no run was started")
    assert in_process == []


def test_data_that_cannot_be_counted_is_one_line_with_its_run(base, in_process, refused):
    Path("pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    words = f"sweep --from {base} {FROM_A_MODEL} --data pairs.jsonl --loss dpo --train.epochs 1,2"
    line = refused(*argv(f"{words} --sweep-dir sweep"))
    assert line.startswith("epochs=1: ")
    assert line.endswith("no run was started")
    assert in_process == []
