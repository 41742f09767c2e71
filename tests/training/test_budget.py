"""train.budget: the number of steps that fit into a time, found once and recorded."""

import importlib.util
import json
import shutil
from functools import partial

import pytest

from assertions import numbers, tensor_files
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.errors import ConfigError
from nanogpt_hf.reports.page import write_report
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.provenance import read_starts, steps_from
from nanogpt_hf.runs.recipe import changed_knobs
from nanogpt_hf.training import budget, clock
from nanogpt_hf.training.budget import steps_within

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or shutil.which("g++") is None,
    reason="DeepSpeed or g++ (to compile its CPU operations) is not installed",
)


@pytest.mark.parametrize(
    ("seconds", "step", "evaluation", "every", "steps"),
    [
        (3600, 1.5, 0, 1, 2400),
        (3600, 1.5, 60, 1000, 2240),  # evaluations at steps 0, 1,000, 2,000 and 2,240
        (100, 1, 10, 10, 40),  # 0, 10, 20, 30, 40; the next step would need another evaluation
        (101, 1, 10, 10, 41),
        (109, 1, 10, 10, 49),
        (21, 1, 10, 10, 1),  # before the first step and after it
        (20.9, 1, 10, 10, 0),
        (0.5, 1, 0, 1, 0),
        (10**9, 1e-9, 0, 1, 10**15),
    ],
)
def test_steps_within_counts_evaluations(seconds, step, evaluation, every, steps):
    assert steps_within(seconds, step, evaluation, every) == steps


def test_one_more_step_does_not_fit():
    for every in (1, 3, 7, 50):
        for seconds in range(0, 90, 7):
            steps = steps_within(seconds, 0.25, 2.0, every)
            for number in (steps, steps + 1):
                evaluated = {0, number, *range(0, number, every)}
                needed = 0.25 * number + 2.0 * len(evaluated)
                assert (needed <= seconds) is (number == steps) or number == 0


@pytest.fixture
def timed(monkeypatch):
    """The calls of the timing, in which each call of a step takes 0.5 s and each other 2 s."""
    calls = []

    def time_of(device, work, times=1):
        for _ in range(times):
            work()
        calls.append((work.__name__, times))
        return 0.5 if work.__name__ == "step" else 2.0

    monkeypatch.setattr(clock, "time_of", time_of)
    monkeypatch.setattr(budget, "time_of", time_of)
    return calls


KNOBS = {
    "model__dropout": 0.1,
    "optim__warmup_steps": 0.125,
    "eval__every": 4,
    "eval__samples": ["A cat "],
    "eval__sample_tokens": 4,
    "checkpoint__every": 4,
    "checkpoint__keep": 9,
    "tracking__every": 1,
}
# 95% of 21 s: 16 steps of 0.5 s, and evaluations of 2 s at the steps 0, 4, 8, 12 and 16.
BUDGET = ("--train.budget", "21s")
FROM = "train.budget 21s"


def report_of(run: RunFolder) -> str:
    write_report(run, run.report)
    return run.report.read_text()


@pytest.fixture
def knobs() -> dict:
    return KNOBS


@pytest.mark.long
@pytest.mark.one_row_per
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"optim__name": "muon", "train__micro_batch_size": "auto"},
        {"train__gradient_groups": 2},
    ],
    ids=["AdamW", "Muon, auto", "gradient groups"],
)
def test_run_is_the_run_of_its_recorded_recipe(pretrain, timed, tmp_path, kind, caplog):
    """The steps that are timed leave no trace."""
    caplog.set_level("INFO")
    ended = pretrain(*BUDGET, **kind)
    assert ended.status == 0, ended.err
    # three to warm up, one window of one step, and the second of two evaluations
    assert timed == [("step", 1)] * 4 + [("evaluate", 1)]
    (line,) = [text for text in caplog.messages if text.startswith("train.budget 21s: ")]
    assert "16 steps and 5 evaluations, with 5% left for checkpoints" in line
    assert "a step takes 0.5 s here, an evaluation 2 s" in line
    recorded = load_config(ended.run.recipe)
    assert (recorded.train.max_steps, recorded.train.budget) == (16, None)
    assert recorded.optim.warmup_steps == 2
    timed.clear()
    plain = pretrain(name="plain", train__max_steps=16, **kind)
    assert timed == []
    assert plain.run.recipe.read_bytes() == ended.run.recipe.read_bytes()
    assert [steps_from(run, 16) for run in (ended.run, plain.run)] == [FROM, ""]
    assert numbers(ended.run) == numbers(plain.run)
    for step in (4, 16):
        assert tensor_files(ended.run, step) == tensor_files(plain.run, step)
        assert history(ended.run, step) == history(plain.run, step)


def history(run, step: int) -> list:
    return json.loads((run.checkpoint(step) / "state.json").read_text())["history"]


@pytest.fixture
def interrupted(pretrain, timed):
    """A finished run of a budget, and a function that takes it back to step 8."""
    run = pretrain(*BUDGET).run
    whole = RunFolder(shutil.copytree(run.path, run.path.with_name("whole")))
    timed.clear()

    def back() -> RunFolder:
        for step in (12, 16):
            shutil.rmtree(run.checkpoint(step))
        return whole

    return back


@pytest.mark.long
@pytest.mark.one_row_per
@pytest.mark.parametrize("lost", [False, True], ids=["with its recipe", "without its recipe"])
def test_resume_does_not_time_again(pretrain, interrupted, timed, lost, caplog):
    whole = interrupted()
    caplog.set_level("INFO")
    if lost:
        whole.path.with_name("run").joinpath("recipe.yaml").unlink()
    dry = pretrain("--resume", "--dry-run", *BUDGET)
    assert (dry.status, "step_00000008" in dry.out) == (0, True), dry.err
    resumed = pretrain("--auto-resume", *BUDGET)
    assert resumed.status == 0, resumed.err
    assert timed == []
    assert "times a run when it begins; this one keeps its train.max_steps 16" in caplog.text
    assert "changed since" not in caplog.text
    assert numbers(resumed.run) == numbers(whole)
    assert tensor_files(resumed.run, 16) == tensor_files(whole, 16)
    assert resumed.run.recipe.read_bytes() == whole.recipe.read_bytes()
    # a later start is not timed, and the report shows the first one's
    assert [start.get("steps_from") for start in read_starts(resumed.run)] == [FROM, None]
    assert f"done: 16 steps; train.max_steps 16 follows from {FROM}." in report_of(resumed.run)
    assert main(["verify", str(resumed.run.path), "--steps", "0:16"]) == 0
    # A run that is not resumed is timed.
    assert pretrain("--overwrite", *BUDGET).status == 0
    assert len(timed) == 5


@pytest.mark.long
def test_resume_logs_a_changed_share_of_warm_up(pretrain, interrupted, caplog):
    interrupted()
    caplog.set_level("INFO")
    options = ("--resume", *BUDGET, "--optim.warmup_steps", "0.5")
    dry = pretrain(*options, "--dry-run")
    assert "changed since the run began: optim.warmup_steps: 2 -> 8" in dry.out
    assert pretrain(*options).status == 0
    changes = [text for text in caplog.messages if text.startswith("changed since")]
    assert changes == ["changed since the run began: optim.warmup_steps: 2 -> 8"]


@pytest.mark.long
def test_branch_has_steps_and_no_budget(interrupted, capsys, tmp_path):
    run = interrupted().path
    words = ["branch", run, "--at", "8", "--run-dir", tmp_path / "branch"]
    assert main([*map(str, words), *BUDGET]) == 2
    assert "branch: train.budget 21s: a run times its steps" in capsys.readouterr().err
    assert not (tmp_path / "branch").exists()


@pytest.mark.long
def test_resume_with_more_steps_is_as_ever(pretrain, interrupted):
    interrupted()
    longer = pretrain("--resume", train__max_steps=18)
    assert longer.status == 0
    assert load_config(longer.run.recipe).train.max_steps == 18
    assert "follows from" not in report_of(longer.run)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--train.budget", "4s"],
            ["train.budget: 4s is too short for one step and 2 evaluations", "eval.tokens"],
        ),
        (
            ["--train.budget", "21s", "--optim.warmup_steps", "17"],
            ["optim.warmup_steps: 17 is more than the 16 steps of train.budget 21s"],
        ),
    ],
)
def test_too_short_budget_is_one_line_before_anything_is_written(pretrain, timed, options, words):
    ended = pretrain(*options)
    assert ended.status == 2
    assert all(word in ended.line for word in words), ended.line
    assert not ended.run.path.exists()


def test_steps_that_are_timed_take_a_small_share_of_the_budget(pretrain, timed):
    """Windows of one step: ten in a long budget, and 2% of a short one."""
    for time, windows in (("1h", 10), ("100s", 4), ("21s", 1)):
        timed.clear()
        run = pretrain("--train.budget", time, name=time, optim__warmup_steps=10**5)
        assert run.status == 2
        assert timed.count(("step", 1)) == 3 + windows


@pytest.mark.long
@pytest.mark.parametrize(
    "machine",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("cpu_ddp", "fsdp2", "pp", "tp")),
        pytest.param("deepspeed_zero2", marks=[pytest.mark.slow, needs_deepspeed]),
    ],
)
def test_slowest_process_decides_for_all(machine, write_recipe, tmp_path, launch_warm):
    """Each step takes 0.5 s on one process, and 1 s on the other: 11 steps, not 16."""
    # Tensor parallelism has no dropout.
    knobs = KNOBS | {"model__dropout": 0.0 if machine == "tp" else 0.1}
    words = ["pretrain", write_recipe(**knobs), *BUDGET, "--run-dir"]
    options = ["--num_processes=2"]
    variables = {"PARALLELISM_CONFIG_PP_SIZE": "2"} if machine == "pp" else {}
    launch = partial(launch_warm, machine, machine_options=options, **variables)
    run = launch(*words, tmp_path / "run", SECONDS_PER_STEP="0.5")
    recorded = load_config(run.recipe)
    assert (recorded.train.max_steps, recorded.train.budget) == (11, None)
    plain = launch("pretrain", run.recipe, "--run-dir", tmp_path / "plain")
    assert numbers(run) == numbers(plain)
    assert tensor_files(run, 11) == tensor_files(plain, 11)


def test_recorded_budget_is_no_change_of_a_run(write_run):
    """A resume compares neither the budget nor the steps that follow from it."""
    run = write_run("run")
    config = replace_knobs(load_config(run.recipe), {"train.budget": "9m", "train.max_steps": 9})
    assert changed_knobs(run, config) == []


@pytest.mark.parametrize("text", ["0s", "55", "m", "1h 5m", "-5m", "5.5m", 400 * "9" + "h", "٣m"])
def test_no_duration_is_refused(write_recipe, text):
    with pytest.raises(ConfigError, match=r"train.budget: expected a time such as 11h30m"):
        load_config(write_recipe(), {"train.budget": text})
