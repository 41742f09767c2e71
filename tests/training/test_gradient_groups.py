"""`train.gradient_groups`: the same bytes on any number of processes, also if it changes."""

import functools
import itertools
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from assertions import assert_same_experiment, file_contents, numbers
from nanogpt_hf.checkpoint.reader import read_checkpoint
from nanogpt_hf.config.load import load_config
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.provenance import read_starts
from nanogpt_hf.training.build import build_run

KNOBS = {
    "train.gradient_groups": 4,
    "train.max_steps": 12,
    "train.micro_batch_size": 1,  # 8 micro-batches
    "eval.every": 4,
    "eval.samples": '["A cat "]',
    "eval.sample_tokens": 18,  # more than the 16 positions of the model
    "checkpoint.every": 2,
    "checkpoint.keep": 99,
    "tracking.layers": True,
}
FEATURES = {
    "gpt2": {
        "model.dropout": 0.1,
        "model.n_embd": 18,
        "train.gradient_groups": 8,
        "optim.betas": "{tokens: [0.7, 0.99], vectors: [0.5, 0.6]}",
    },
    "llama, Muon": {
        "model.architecture": "llama",
        "model.n_kv_head": 1,
        "optim.name": "muon",
        "optim.max_grad_norm": 0.1,
    },
    "mixture": {"model.dropout": 0.1},
    "LoRA": {"lora.rank": 2, "lora.dropout": 0.1},
    "unfreezing": {"model.dropout": 0.1, "finetune.freeze_layers": 2, "finetune.unfreeze_every": 5},
    "conversations": {
        "data.format": "chat",
        "data.block_size": 128,
        "model.n_positions": 128,
        "train.tokens_per_step": 1024,
    },
    "rollback": {
        "train.rollback_ratio": 1.0,  # step 4 is a spike
        "optim.learning_rate": 1e-4,
        "optim.min_learning_rate": 0,
    },
}
LAYOUTS = {
    "one": ("cpu",),
    "DDP 2": ("cpu_ddp", "--num_processes=2"),
    "DDP 4": ("cpu_ddp", "--num_processes=4"),
    "FSDP2 2": ("fsdp2", "--num_processes=2"),
    "FSDP2 4": ("fsdp2", "--num_processes=4"),
    "HSDP 2 × 2": ("hsdp", "--num_processes=4"),
    "DDP 8": ("cpu_ddp", "--num_processes=8"),
    "FSDP2 8": ("fsdp2", "--num_processes=8"),
    "HSDP 4 × 2": ("hsdp", "--num_processes=8", "--parallelism_config_dp_replicate_size=4"),
}
OF_EIGHT = ("DDP 8", "FSDP2 8", "HSDP 4 × 2")  # gpt2 has as many groups


@pytest.fixture(scope="module")
def words_of(tmp_path_factory, make_recipe, text_file, chat_file, byte_tokenizer, tiny_base):
    """The command line of a feature's run in a folder."""
    folder = tmp_path_factory.mktemp("groups")
    recipe = make_recipe(folder / "recipe.yaml")
    other = folder / "other.txt"
    other.write_text("".join(f"{random.Random(n).random()} is a number\n" for n in range(300)))

    def words(feature: str, run: Path) -> list[str]:
        knobs = KNOBS | FEATURES[feature]
        start = ["pretrain", str(recipe)]
        if feature in ("LoRA", "unfreezing"):
            start = ["finetune", "--from", str(tiny_base), "--data", str(text_file)]
            knobs |= {"data.block_size": 16, "train.tokens_per_step": 128, "data.dir": folder / "l"}
        if feature == "mixture":
            sources = [{"source": str(text_file), "weight": 2}, {"source": str(other), "weight": 1}]
            knobs |= {"data.source": sources, "data.tokenizer": byte_tokenizer}
            knobs["data.dir"] = folder / "mixture"
            knobs["train.stages"] = [
                {"at": 3, "weights": {"other": 4}, "data.block_size": 8},
                {"at": 6, "train.tokens_per_step": 256, "optim.beta1": 0.5},
            ]
        if feature == "conversations":
            knobs |= {"data.source": chat_file, "data.tokenizer": byte_tokenizer}
            knobs["data.dir"] = folder / "conversations"
        options = [str(word) for key, value in knobs.items() for word in (f"--{key}", value)]
        return [*start, "--run-dir", str(run), *options, "--auto-resume"]

    return words


@pytest.fixture(scope="module")
def trained(tmp_path_factory, words_of, launch_warm):
    """A feature's run on a number of processes, trained once."""

    @functools.cache
    def trained(feature: str, layout: str) -> RunFolder:
        run = tmp_path_factory.mktemp("run") / "run"
        return launch(launch_warm, words_of(feature, run), layout)

    return trained


def launch(launch_warm, words: list[str], layout: str, **options) -> RunFolder:
    machine, *count = LAYOUTS[layout]
    return launch_warm(machine, *words, machine_options=count, **options)


def contents(run: RunFolder) -> dict[str, bytes]:
    """The tensors of all checkpoints, and the files of models."""
    found = {name: data for name, data in file_contents(run.path).items() if "model." in name}
    for folder in run.checkpoint_folders():
        saved = read_checkpoint(folder)
        for name, tensor in (dict(saved.weights) | dict(saved.optimizer_state)).items():
            found[f"{folder.name}/{name}"] = tensor.numpy().tobytes()
    return {name: data for name, data in found.items() if not name.startswith("checkpoints/")}


def cells() -> Iterator:
    """Each feature on each layout; a part of them is exhaustive."""
    for feature, layout in itertools.product(FEATURES, LAYOUTS):
        several = layout != "one" and (feature == "gpt2" or layout not in OF_EIGHT)
        first = layout == "FSDP2 4" or (feature == "gpt2" and layout not in OF_EIGHT[:2])
        if several:
            yield pytest.param(feature, layout, marks=[] if first else pytest.mark.exhaustive)


@pytest.mark.long
@pytest.mark.one_row_per
@pytest.mark.parametrize(("feature", "layout"), [*cells()])
def test_processes_end_with_the_bytes_of_one(trained, feature, layout):
    one = trained(feature, "one")
    several = trained(feature, layout)
    assert len(contents(one)) >= 14
    assert contents(several) == contents(one)
    assert numbers(several) == numbers(one)
    assert read_starts(several)[0]["processes"] > read_starts(one)[0]["processes"] == 1
    skipped = read_checkpoint(several.newest_checkpoint()).state.skipped_steps
    assert (skipped > 0) == (feature == "rollback")


def equal(status: int, output: str) -> None:
    assert status == 0, output
    assert re.search(r"\nsteps \d+ to \d+: equal\n", output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "processes", "layout"),
    [
        *(("gpt2", "HSDP 4 × 2", layout) for layout in ("one", "DDP 2", "FSDP2 2")),
        ("mixture", "FSDP2 4", "one"),
        ("rollback", "FSDP2 4", "one"),
    ],
)
def test_run_is_verified_on_fewer_processes(trained, launch_warm, feature, processes, layout):
    words = ["verify", str(trained(feature, processes).path), "--steps", "2:12"]
    launch(launch_warm, words, layout, ends_with=equal)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["DDP 2", "FSDP2 2"])
def test_plain_run_is_verified_on_the_same_processes(words_of, launch_warm, tmp_path, layout):
    words = [*words_of("gpt2", tmp_path / "run"), "--train.gradient_groups", "null"]
    run = launch(launch_warm, words, layout)
    launch(launch_warm, ["verify", str(run.path), "--sample", "2"], layout, ends_with=equal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "moves"),
    [
        ("gpt2", ("one", "DDP 4", "FSDP2 2")),
        ("gpt2", ("one", "FSDP2 4", "DDP 2")),
        ("llama, Muon", ("one", "DDP 4", "DDP 2")),
        ("llama, Muon", ("one", "FSDP2 4", "FSDP2 2")),
    ],
)
def test_run_killed_and_moved_ends_with_the_bytes_of_one_process(
    trained, words_of, launch_warm, tmp_path, feature, moves
):
    def killed(status: int, output: str) -> None:
        assert status == 9, output

    words = words_of(feature, tmp_path / "run")
    for layout in moves:
        # Changes of a folder: each shard is a file.
        change = 110 if layout == "FSDP2 4" else 75
        launch(launch_warm, words, layout, ends_with=killed, FAULT=f"0:killed:{change}")
    run = launch(launch_warm, words, moves[-1])
    starts = [(start["processes"], start["step"]) for start in read_starts(run)]
    assert [processes for processes, _ in starts] == [1, 4, 2, 2]
    assert 0 == starts[0][1] < starts[1][1] < starts[2][1] <= starts[3][1] < 12
    one = trained(feature, "one")
    assert contents(run) == contents(one)
    assert numbers(run) == numbers(one)


@pytest.mark.slow
def test_bench_counts_the_bytes_of_the_plain_mode(words_of, launch_warm, tmp_path):
    file = tmp_path / "figures.json"
    _, recipe, _, _, *knobs, _ = words_of("gpt2", tmp_path)

    def sent(*options: str) -> dict[str, int]:
        words = ["bench", recipe, *knobs, *options, "--windows", "1", "--json", str(file)]
        launch(launch_warm, words, "DDP 2")
        figures = json.loads(file.read_text())
        assert figures["step_seconds"]["median"] > 0
        assert figures["peak_memory"] > 0
        return figures["communicated_bytes"]

    grouped = sent()
    plain = sent("--train.gradient_groups", "null")
    assert grouped.keys() == {"all-to-all", "all-gather"}
    # the loss is one more number
    assert sum(grouped.values()) == pytest.approx(plain["all-reduce"], abs=16)


@pytest.mark.long
def test_grouped_run_is_the_same_experiment(train, tmp_path):
    options = {"train__max_steps": 6, "eval__every": 2, "train__micro_batch_size": 1}
    plain = train(tmp_path / "plain", **options)
    grouped = train(tmp_path / "grouped", train__gradient_groups=4, **options)
    assert_same_experiment(grouped, plain, samples=False)


def test_deterministic_kernels_are_asked_for_on_gpus(monkeypatch, make_recipe, tmp_path):
    asked = []
    monkeypatch.setattr("nanogpt_hf.training.build.check_memory", lambda *_: None)
    monkeypatch.setattr("nanogpt_hf.training.build.build_at", lambda *_: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # restored at the end
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    gpu = SimpleNamespace(device=torch.device("cuda"))
    for groups, deterministic in ((2, False), (None, True), (None, False)):
        knobs = {"train__gradient_groups": groups, "train__deterministic": deterministic}
        recipe = make_recipe(tmp_path / "recipe.yaml", **knobs)
        build_run(load_config(recipe), gpu, SimpleNamespace(vocab_size=9))
    # a later run of the same process without the knob gets the fastest kernels again
    assert (asked, os.environ["CUBLAS_WORKSPACE_CONFIG"]) == ([True, True, False], ":4096:8")
