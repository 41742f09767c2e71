"""train.epochs: the number of steps that take these epochs, counted and recorded."""

import json
import shutil
from fractions import Fraction
from math import ceil

import numpy as np
import pytest

from assertions import numbers, tensor_files
from nanogpt_hf.config.finetune import finetune_defaults
from nanogpt_hf.config.load import load_config
from nanogpt_hf.config.methods import NEXT_TOKEN
from nanogpt_hf.config.schema import replace_knobs
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.data.prepared import load_prepared
from nanogpt_hf.runs.provenance import steps_from
from nanogpt_hf.runs.recipe import changed_knobs
from nanogpt_hf.training.epochs import steps_of, with_steps_of_known_data
from nanogpt_hf.training.resume import check_resume


@pytest.mark.parametrize(
    ("epochs", "sequences", "per_step", "steps"),
    [
        (1, 100, 10, 10),
        (1, 101, 10, 11),
        (3, 101, 10, 31),  # not three times 11: an epoch begins within a step
        (0.5, 101, 10, 6),
        # In floating-point numbers 0.1 · 30 is more than 3.
        (0.1, 30, 1, 3),
        (1.1, 10, 1, 11),
        (0.001, 10, 10, 1),
        (1, 3, 8, 1),
        (1e6, 10**10, 7, ceil(Fraction(10**16, 7))),
        (3.0, 10 / 3, 1, 10),  # windows at random offsets: the number is no whole one
        (1.5, 1000 / 7, 3, 72),
    ],
)
def test_steps_are_rounded_up(epochs, sequences, per_step, steps):
    assert steps_of(epochs, sequences, per_step, largest_divisor=64) == steps


KNOBS = {
    "model__dropout": 0.1,
    "optim__warmup_steps": 0.125,
    "eval__every": 8,
    "checkpoint__every": 4,
    "checkpoint__keep": 99,
    "tracking__every": 1,
}


@pytest.fixture
def knobs() -> dict:
    return KNOBS


@pytest.fixture
def prepared():
    """Prepare the data of a recipe; return its config and the data."""

    def prepared(recipe):
        config = load_config(recipe)
        prepare(config)
        return config, load_prepared(config)

    return prepared


def expected_steps(recipe, epochs: float) -> int:
    """Counted from the blocks that the steps take, one after another."""
    config = load_config(recipe)
    blocks = load_prepared(config).train
    sequences = config.train.tokens_per_step // config.data.block_size
    wanted = epochs * len(blocks)
    steps = 0
    while steps * sequences < wanted:
        steps += 1
    return steps


@pytest.mark.long
@pytest.mark.parametrize("epochs", ["0.03", "0.08"])
def test_run_is_the_run_of_its_recorded_recipe(pretrain, epochs, caplog):
    caplog.set_level("INFO")
    ended = pretrain("--train.epochs", epochs)
    assert ended.status == 0, ended.err
    steps = expected_steps(ended.run.recipe, float(epochs))
    recorded = load_config(ended.run.recipe)
    assert (recorded.train.max_steps, recorded.train.epochs) == (steps, None)
    assert recorded.optim.warmup_steps == round(0.125 * steps)
    (line,) = [text for text in caplog.messages if text.startswith("train.epochs ")]
    assert f"train.max_steps {steps}" in line
    plain = pretrain(name="plain", train__max_steps=steps)
    assert plain.run.recipe.read_bytes() == ended.run.recipe.read_bytes()
    found = [steps_from(run, steps) for run in (ended.run, plain.run)]
    assert found == [f"train.epochs {epochs}", ""]
    assert numbers(ended.run) == numbers(plain.run)
    assert tensor_files(ended.run, steps) == tensor_files(plain.run, steps)
    state = [
        run / "state.json" for run in (ended.run.checkpoint(steps), plain.run.checkpoint(steps))
    ]
    assert (
        json.loads(state[0].read_text())["history"] == json.loads(state[1].read_text())["history"]
    )


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"data__order": "random"},
        {"data__order": "shifted"},
        {"data__packing": "documents"},
        {"train__tokens_per_step": 448},
        {
            "data__format": "chat",
            "data__block_size": 128,
            "model__n_positions": 128,
            "train__tokens_per_step": 1024,
        },
    ],
    ids=str,
)
def test_an_epoch_reads_every_block_once(kind, write_recipe, chat_file, byte_tokenizer, prepared):
    """With the steps of an epoch every block is taken, and with one step fewer not."""
    if kind.get("data__format"):
        kind = kind | {"data__source": str(chat_file), "data__tokenizer": str(byte_tokenizer)}
    config, data = prepared(write_recipe(**kind))
    config = replace_knobs(config, {"train.epochs": 1.0, "optim.warmup_steps": 0})
    known = with_steps_of_known_data(config)
    assert known.train.epochs is None
    steps = known.train.max_steps
    sequences = config.train.tokens_per_step // config.data.block_size
    batches = Batches(
        data.train, order=config.data.order, seed=1, micro_batch_size=sequences, accumulation=1
    )
    assert batches.epochs(steps)[0] >= 1 > batches.epochs(steps - 1)[0]
    if config.data.order == "shuffled":
        taken = np.concatenate([batches.indices(step) for step in range(steps)])
        assert set(taken.tolist()) == set(range(len(data.train)))
        assert len(taken) - sequences < len(data.train)


@pytest.mark.long
def test_resume_keeps_the_steps_and_more_epochs_are_more_steps(pretrain, caplog):
    caplog.set_level("INFO")
    whole = pretrain("--train.epochs", "0.03", name="whole").run
    last = load_config(whole.recipe).train.max_steps
    run = pretrain("--train.epochs", "0.03").run
    for folder in run.checkpoint_folders():
        if folder != run.checkpoint(4):
            shutil.rmtree(folder)
    caplog.clear()
    dry = pretrain("--resume", "--dry-run", "--train.epochs", "0.03")
    assert (dry.status, "step_00000004" in dry.out) == (0, True), dry.err
    assert f"tokens in {last:,} steps" in dry.out
    resumed = pretrain("--resume", "--train.epochs", "0.03")
    assert resumed.status == 0, resumed.err
    assert "changed since" not in caplog.text
    assert numbers(resumed.run) == numbers(whole)
    assert tensor_files(resumed.run, last) == tensor_files(whole, last)
    assert resumed.run.recipe.read_bytes() == whole.recipe.read_bytes()
    # More steps, and another number of steps of the warm-up that is a share of them.
    longer = pretrain("--resume", "--train.epochs", "0.05")
    assert longer.status == 0, longer.err
    more = load_config(longer.run.recipe).train.max_steps
    assert steps_from(longer.run, more) == "train.epochs 0.05"
    assert more == expected_steps(longer.run.recipe, 0.05) > last
    warmups = [round(0.125 * steps) for steps in (last, more)]
    for knob, before, now in (
        ("train.max_steps", last, more),
        ("optim.warmup_steps", warmups[0], warmups[1]),
    ):
        assert before != now
        assert f"changed since the run began: {knob}: {before} -> {now}" in caplog.text
    shorter = pretrain("--resume", "--train.epochs", "0.01")
    assert shorter.status == 2
    assert f"step {more} is past train.max_steps" in shorter.line
    assert "--train.epochs" in shorter.line


def test_dry_run_of_a_resume_needs_no_data_to_count_steps(pretrain):
    """Without the data only the real resume knows whether the run is past its last step."""
    run = pretrain(train__max_steps=2, eval__every=2, checkpoint__every=2).run
    recorded = load_config(run.recipe)
    shutil.rmtree(recorded.data.dir)
    # Fine-tuning has so few steps by default, which epochs replace.
    config = replace_knobs(recorded, {"train.epochs": 9.0, "train.max_steps": 1})
    not_prepared, resumes = check_resume(config, run.path, resume=True)
    assert not_prepared.endswith(f"{recorded.data.dir} is not prepared yet")
    assert resumes == f"resumes from {run.checkpoint(2)}"


def test_dry_run_names_the_steps_of_prepared_data(pretrain, prepared, write_recipe):
    ended = pretrain("--dry-run", "--train.epochs", "2")
    assert "as many steps as 2 epochs take, counted after `prepare`" in ended.out
    prepared(write_recipe(**KNOBS))
    ended = pretrain("--dry-run", "--train.epochs", "2")
    steps = expected_steps(write_recipe(**KNOBS), 2)
    assert f"tokens in {steps:,} steps" in ended.out
    assert f"max_steps: {steps}\n" in ended.out
    assert not ended.run.path.exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "words"),
    [("cosine", "steps of train"), ("wsd", "before the decay of train")],
)
def test_too_long_warm_up_is_one_line_before_anything_is_written(pretrain, schedule, words):
    options = ("--optim.schedule", schedule, "--optim.warmup_steps", "1000")
    ended = pretrain("--train.epochs", "0.01", *options)
    assert ended.status == 2
    assert ended.line.count("optim.warmup_steps: 1,000 is more than the ") == 1
    assert words in ended.line
    assert "train.epochs 0.01" in ended.line
    assert not ended.run.path.exists()


@pytest.mark.parametrize("knob", ["train.epochs", "train.budget"])
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_warm_up_is_not_compared_with_a_default_number_of_steps(knob, schedule):
    """Fine-tuning has 500 steps by default, and epochs may be more."""
    knobs = {"optim.schedule": schedule, "optim.warmup_steps": 450 if schedule == "wsd" else 600}
    knobs |= {"data.source": "my.txt", knob: "1h" if knob == "train.budget" else 3.0}
    config = load_config(None, knobs, {"train.max_steps": 500}, "name")
    assert config.optim.warmup_steps == knobs["optim.warmup_steps"]


def test_warm_up_of_fine_tuning_is_a_share_of_few_steps():
    options = {"block_size": 8, "lora": False, "method": NEXT_TOKEN, "dropout": None, "rates": {}}
    options["muon_scale"] = "original"
    steps = finetune_defaults({}, max_steps=None, epochs=None, **options)
    share = finetune_defaults({}, max_steps=None, epochs=3.0, **options)
    assert steps["optim.warmup_steps"] == 20
    assert share["optim.warmup_steps"] * share["train.max_steps"] == 20


def test_recorded_epochs_are_no_change_of_a_run(write_run):
    run = write_run("run")
    config = replace_knobs(load_config(run.recipe), {"train.epochs": 9.0, "train.max_steps": 9})
    assert changed_knobs(run, config) == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2"])
def test_two_processes_take_the_same_steps(machine, pretrain, write_recipe, tmp_path, launch_warm):
    alone = pretrain("--train.epochs", "0.03").run
    words = ["pretrain", write_recipe(**KNOBS), "--train.epochs", "0.03", "--run-dir"]
    run = launch_warm(machine, *words, tmp_path / "both", machine_options=["--num_processes=2"])
    assert run.recipe.read_bytes() == alone.recipe.read_bytes()
