"""Sweeps of runs that start from a model: each run equals its single command, and the table ranks
by the score of the model that it hands on.
"""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from arguments import argv
from assertions import at_step, numbers
from nanogpt_hf.commands import main
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics
from nanogpt_hf.training import sweep
from nanogpt_hf.training.sweep_grid import Sweep, build_grid

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
KNOBS = (
    "--data.block_size 64 --train.tokens_per_step 128 --train.micro_batch_size 2 "
    "--train.max_steps 4 --eval.every 1 --tracking.every 1 --optim.warmup_steps 0"
)
RL = (
    "--task arithmetic --rl.max_new_tokens 4 --rl.samples 2 --rl.eval_questions 4 "
    "--reward reward.py:score"
)
TAUGHT = f"{RL} --distill.teacher {{base}}"


@pytest.fixture(scope="module")
def base(tmp_path_factory, save_chat_model):
    """A chat model of bytes, of random weights."""
    folder = tmp_path_factory.mktemp("start") / "base"
    save_chat_model(folder, dropout=0.0)
    return folder


@pytest.fixture(autouse=True)
def files(text_file, tmp_path, monkeypatch):
    """Data of each method, in the test's folder."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(text_file.read_text()[:2000])
    # A model of random weights writes no right answers.
    Path("reward.py").write_text(
        "def score(prompt, completion, answer):\n    return len(set(completion))\n"
    )
    rows = {
        "pairs": [
            {"prompt": "a", "chosen": f"b{n % 7}", "rejected": f"c{n % 5}"} for n in range(40)
        ],
        "labels": [
            {"prompt": "a", "completion": f"b{n % 7}", "label": n % 3 > 0} for n in range(40)
        ],
    }
    for name, lines in rows.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))


def rows_of(folder):
    return json.loads((Path(folder) / "sweep.json").read_text())["runs"]


def facts(folder):
    """What a run has measured, without times, and its last weights."""
    (weights,) = (Path(folder) / "final").glob("*.safetensors")
    return numbers(RunFolder(folder)), weights.read_bytes()


@pytest.mark.long
@pytest.mark.one_row_per("command")
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("finetune", "--lora.rank null,2 --data text.txt"),
        ("align", "--align.beta 0.1,0.5 --data pairs.jsonl --loss dpo"),
        ("rl", f"--rl.kl 0.2,0.5 {RL} --optim.learning_rate 1e-2 --train.tokens_per_step 512"),
        ("finetune", "--finetune.freeze_layers 1,2 --data text.txt --data.dir data"),
        ("align", "--data.validation_fraction 0.2,0.3 --data labels.jsonl --loss kto"),
    ],
)
def test_run_of_a_sweep_equals_its_single_command(
    base, in_process, forget_accelerate, command, options
):
    knob, values, *more = options.split()
    words = f"--from {base} {KNOBS} {' '.join(more)}"
    assert main(argv(f"sweep {words} {knob} {values} --sweep-dir sweep")) == 0
    assert len(in_process) == 2
    for value, folder in zip(values.split(","), [*in_process], strict=True):
        forget_accelerate()
        single = f"{command} {words} {knob} {value} --run-dir single-{value}"
        assert main(argv(single)) == 0
        assert facts(f"single-{value}") == facts(f"sweep/{folder}")
        # The recorded recipes are equal, too.
        assert Path(f"single-{value}/recipe.yaml").read_text() == (
            Path("sweep", folder, "recipe.yaml").read_text()
        )
    # Runs with different values learn different weights.
    assert len({facts(f"sweep/{folder}")[1] for folder in in_process}) == 2


@pytest.mark.long
@pytest.mark.one_row_per
@pytest.mark.parametrize(
    "command",
    [
        pytest.param("finetune --data text.txt --lora 2", id="finetune"),
        pytest.param("align --data pairs.jsonl --loss dpo", id="align"),
        pytest.param(f"rl {RL}", id="rl"),
    ],
)
def test_interrupted_sweep_continues_bit_for_bit(
    base, in_process, forget_accelerate, monkeypatch, capsys, command
):
    name, _, options = command.partition(" ")
    words = f"--from {base} {KNOBS} {options} --optim.learning_rate 1e-2"
    words_of_sweep = argv(f"sweep {words} --train.seed 1,2 --sweep-dir sweep")
    with monkeypatch.context() as patch:
        at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert main(words_of_sweep) == 75
    assert "sweep: interrupted; run the same command again" in capsys.readouterr().out
    assert main(words_of_sweep) == 0
    assert in_process == ["seed=1", "seed=1", "seed=2"]
    forget_accelerate()
    assert main(argv(f"{name} {words} --train.seed 1 --run-dir single")) == 0
    assert facts("single") == facts("sweep/seed=1")
    assert {row["status"] for row in rows_of("sweep")} == {"done"}


@pytest.mark.long
def test_runs_are_ranked_by_their_best_model_and_are_done_when_out_of_patience(
    base, in_process, capsys
):
    # The second rate ruins the model in one step.
    command = f"sweep --from {base} --data text.txt {KNOBS} --eval.patience 2 --train.max_steps 6"
    words = argv(f"{command} --optim.learning_rate 1e-2,30")
    assert main(words) == 0
    folder = Path("runs/base-text-learning_rate")
    good, ruined = rows_of(folder)
    assert (good["steps"], good["best_step"], good["best"]) == (6, 6, good["val_loss"])
    assert (ruined["steps"], ruined["best_step"], ruined["status"]) == (2, 0, "done")
    assert ruined["best"] < ruined["val_loss"]
    tree = json.loads((folder / "sweep.json").read_text())
    assert [row["mean"] for row in tree["settings"]] == [good["best"], ruined["best"]]
    out = capsys.readouterr().out
    assert f"lowest val loss: {good['best']:.4f}, with optim.learning_rate 0.01" in out
    assert "learning_rate=30.0: no evaluation was better than that of its start" in out
    assert "flops" not in good
    assert good["trainable"] == good["parameters"] > 10_000
    started = [*in_process]
    assert main(words) == 0
    assert in_process == started


@pytest.mark.slow
def test_losses_of_other_scales_are_ranked_by_the_accuracy(base, in_process, capsys):
    """Each run chooses its best model by its own loss; the grid ranks these models by accuracy."""
    words = f"sweep --from {base} {KNOBS} --data pairs.jsonl --loss dpo,orpo --align.beta 0.1,1"
    assert main(argv(f"{words} --optim.learning_rate 1e-3 --sweep-dir sweep")) == 0
    tree = json.loads(Path("sweep/sweep.json").read_text())
    assert tree["score"] == "val/accuracy"
    for row in tree["runs"]:
        events = [e for e in read_metrics(RunFolder(f"sweep/{row['run']}")) if "val/loss" in e]
        best = min(events, key=lambda event: event["val/loss"])
        assert (row["best"], row["best_step"]) == (best["val/accuracy"], best["step"])
        assert row["val_loss"] == events[-1]["val/loss"]
    means = [row["mean"] for row in tree["settings"]]
    assert len(means) == len(tree["runs"]) == 4
    assert means == sorted(means, reverse=True)
    assert "highest accuracy" in capsys.readouterr().out


@pytest.mark.long
def test_runs_of_rewards_are_ranked_by_the_highest(base, in_process, capsys):
    """The second rate ruins the model, which then writes nothing but what it is rewarded for."""
    rates = "--optim.learning_rate 1e-9,3e-2 --sweep-dir sweep"
    assert main(argv(f"sweep --from {base} {KNOBS} {RL} {rates}")) == 0
    tree = json.loads(Path("sweep/sweep.json").read_text())
    assert tree["score"] == "val/reward"
    means = [row["mean"] for row in tree["settings"]]
    assert means == sorted(means, reverse=True)
    for row in tree["runs"]:
        events = read_metrics(RunFolder(f"sweep/{row['run']}"))
        assert row["best"] == max(e["val/reward"] for e in events if "val/reward" in e)
    assert f"highest reward: {means[0]:.4f}" in capsys.readouterr().out
    assert Path("sweep/sweep.png").is_file()


@pytest.mark.parametrize(
    ("options", "metric"),
    [
        (f"--optim.learning_rate 1e-4,1e-3 {RL}", "val/reward"),
        (f"--rl.kl 0,0.1 {RL}", "val/reward"),
        (f"--distill.weight 0.5,0.7 {TAUGHT}", "val/reward"),
        (f"--distill.weight 0.5,1 {TAUGHT}", "val/reward"),
        (f"--optim.learning_rate 1e-4,1e-3 --distill.weight 1 {TAUGHT}", "val/divergence"),
        (f"--distill.beta 0,1 --distill.weight 1 {TAUGHT}", "val/reward"),
        ("--optim.learning_rate 1e-4,1e-3 --loss dpo", "val/loss"),
        ("--align.beta 0.1,0.2 --loss ipo", "val/accuracy"),
        ("--align.margin 0.1,0.2 --loss simpo", "val/accuracy"),
        ("--align.desirable_weight 1,2 --loss kto", "val/accuracy"),
        ("--from {base},{other} --loss dpo", "val/accuracy"),
        ("--from {base},{other}", "val/bits_per_byte"),
        ("--optim.learning_rate 1e-4,1e-3", "val/loss"),
    ],
)
def test_score_follows_from_what_the_runs_differ_in(base, tiny_base, options, metric):
    data = "" if "--task" in options else "--data pairs.jsonl"
    words = argv(f"{data} --from {base} {options.format(base=base, other=tiny_base)}")
    names = {"--loss": "align.loss", "--data": "data.source", "--from": "finetune.model"}
    names |= {"--task": "rl.task", "--reward": "rl.reward"}
    pairs = zip(words[::2], words[1::2], strict=True)
    runs = build_grid(None, [(names.get(key, key.removeprefix("--")), text) for key, text in pairs])
    assert len(runs) == 2
    assert Sweep(None, runs, Path("sweep")).score.metric == metric


def test_folders_that_a_run_would_remove_are_refused(refused, base, in_process):
    """The model to start from is in the folder of a run, or the sweep is in that of another run."""
    shutil.copytree(base, "sweep/seed=1/best")
    words = "--data text.txt --train.seed 1,2 --overwrite"
    line = refused(*argv(f"sweep --from sweep/seed=1/best {words} --sweep-dir sweep"))
    assert "seed=1: --sweep-dir sweep/seed=1: finetune.model sweep/seed=1/best is inside" in line
    single = "--data text.txt --run-dir sweep/seed=1 --overwrite"
    line = refused(*argv(f"finetune --from sweep/seed=1/best {single}"))
    assert "--run-dir sweep/seed=1: finetune.model sweep/seed=1/best is inside it" in line
    # After the fine-tuning, which would warn that this recipe cannot be read.
    Path("sweep/seed=1/recipe.yaml").touch()
    line = refused(*argv(f"sweep --from {base} {words} --sweep-dir sweep/seed=1/best/x"))
    assert "is inside the run" in line
    assert "give another --sweep-dir" in line
    assert in_process == []


def test_grid_has_the_defaults_of_the_method(tiny_base):
    overrides = [
        ("finetune.model", str(tiny_base)),
        ("data.source", "text.txt"),
        ("lora.rank", "null,2"),
        ("lora.alpha", "4,8"),
    ]
    runs = build_grid(None, overrides)
    assert [run.name for run in runs] == ["rank=None", "rank=2_alpha=4.0", "rank=2_alpha=8.0"]
    assert {run.command for run in runs} == {"finetune"}
    assert [run.config.optim.learning_rate for run in runs] == [6e-5, 6e-4, 6e-4]
    assert {run.config.model.n_embd for run in runs} == {16}


def test_models_with_other_tokens_have_data_of_their_own(tiny_base, base):
    overrides = [("finetune.model", f"{tiny_base},{base}"), ("data.source", "text.txt")]
    for more in ([], [("data.dir", "data")]):
        runs = build_grid(None, [*overrides, *more])
        assert len({run.config.data.dir for run in runs}) == 2
    same = [*overrides, ("finetune.model", f"{tiny_base},{tiny_base}/../tiny-gpt2")]
    runs = build_grid(None, [*same, ("data.dir", "data"), ("data.tokenizer", str(tiny_base))])
    assert {run.config.data.dir for run in runs} == {"data"}


@pytest.mark.parametrize("stated", [[], [("finetune.revision", "main")]], ids=["newest", "main"])
def test_all_runs_start_from_the_commit_that_the_grid_has_found(
    base, tmp_path, monkeypatch, stated
):
    commands = []
    monkeypatch.setattr(sweep, "run_process", lambda command, stop: commands.append(command) or 3)
    overrides = [("finetune.model", str(base)), ("data.source", "text.txt"), ("lora.rank", "2,4")]
    runs = [
        replace(
            run,
            config=replace_knobs(run.config, {"finetune.revision": "abc"}),
            overrides=[*run.overrides, *stated],
        )
        for run in build_grid(None, overrides)
    ]
    assert sweep.train_runs(Sweep(None, runs, tmp_path / "sweep"))[1] == 1
    assert len(commands) == 2
    for command in commands:
        assert command.count("--finetune.revision") == 1
        assert command[command.index("--finetune.revision") + 1] == "abc"


# Recipes that leave the model to start from to the command line, with their command.
WITHOUT_A_MODEL = {
    "arithmetic_align": "align",
    "arithmetic_rl": "rl",
    "arithmetic_sft": "finetune",
    "gsm8k_rl": "rl",
    "sft_instructions": "finetune",
    "sft_mixture": "finetune",
}
# Recipes that name one of the Hub, which tests do not reach.
OF_THE_HUB = {"finetune_lora", "finetune_shakespeare", "finetune_smollm2"}


def test_recipes_name_the_command_of_their_runs(save_chat_model, tmp_path):
    save_chat_model(tmp_path / "long", n_positions=4096)
    seeds = ("train.seed", "1,2")
    model = ("finetune.model", str(tmp_path / "long"))
    found = {}
    for recipe in RECIPES:
        if recipe.stem not in OF_THE_HUB:
            overrides = [seeds, model] if recipe.stem in WITHOUT_A_MODEL else [seeds]
            found[recipe.stem] = {run.command for run in build_grid(str(recipe), overrides)}
    assert found.keys() > WITHOUT_A_MODEL.keys()
    assert found == {name: {WITHOUT_A_MODEL.get(name, "pretrain")} for name in found}


@pytest.mark.parametrize("name", WITHOUT_A_MODEL)
def test_recipe_that_leaves_the_model_to_the_command_line_is_not_trained_from_scratch(
    refused, in_process, root, name
):
    recipe = root / "recipes" / f"{name}.yaml"
    words = argv("sweep {} --optim.learning_rate 1e-4,2e-4 --train.seed 1", recipe)
    assert "start from: --from gpt2, a model folder or a run folder" in refused(*words)
    assert in_process == []
