"""`train.gradient_groups`: the same bytes on any number of processes, also if it changes."""

import functools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from assertions import assert_same_experiment, file_contents, numbers
from nanogpt_hf.commands import main
from nanogpt_hf.data.batches import Batches
from nanogpt_hf.data.blocks import TokenBlocks, TokenStream
from nanogpt_hf.distributed.gradient_tree import GradientTree
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.provenance import read_starts

KNOBS = {
    "train.gradient_groups": 4,
    "train.max_steps": 12,
    "train.micro_batch_size": 1,  # 8 micro-batches
    "eval.every": 4,
    "eval.samples": '["A cat "]',
    "checkpoint.every": 2,
    "checkpoint.keep": 99,
    "tracking.layers": True,
}
FEATURES = {
    "gpt2": {"model.dropout": 0.1, "model.n_embd": 20},
    "llama, Muon": {
        "model.architecture": "llama",
        "model.n_kv_head": 1,
        "optim.name": "muon",
        "optim.max_grad_norm": 0.1,
    },
    "mixture": {"model.dropout": 0.1},
    "LoRA": {"lora.rank": 2, "lora.dropout": 0.1},
}


@pytest.fixture(scope="module")
def words_of(tmp_path_factory, make_recipe, text_file, byte_tokenizer, tiny_base):
    """The command line of a feature's run in a folder."""
    folder = tmp_path_factory.mktemp("groups")
    recipe = make_recipe(folder / "recipe.yaml")
    other = folder / "other.txt"
    other.write_text("".join(f"{random.Random(n).random()} is a number\n" for n in range(300)))

    def words(feature: str, run: Path) -> list[str]:
        knobs, start = KNOBS | FEATURES[feature], ["pretrain", str(recipe)]
        if feature == "LoRA":
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
        options = [str(word) for key, value in knobs.items() for word in (f"--{key}", value)]
        return [*start, "--run-dir", str(run), *options, "--auto-resume"]

    return words


@pytest.fixture(scope="module")
def trained(tmp_path_factory, words_of, launch_warm):
    """A feature's run on a number of processes, trained once."""

    @functools.cache
    def trained(feature: str, processes: int) -> RunFolder:
        run = tmp_path_factory.mktemp("run") / "run"
        return launch(launch_warm, words_of(feature, run), processes)

    return trained


def launch(launch_warm, words: list[str], processes: int, **options) -> RunFolder:
    count = [f"--num_processes={processes}"] if processes > 1 else []
    machine = "cpu_ddp" if processes > 1 else "cpu"
    return launch_warm(machine, *words, machine_options=count, **options)


def contents(run: RunFolder) -> dict[str, bytes]:
    """The tensors of all checkpoints and models, as they are on the disk."""
    files = file_contents(run.path)
    return {name: data for name, data in files.items() if name.endswith(".safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "processes"),
    [(name, processes) for name in FEATURES for processes in (2, 4)],
)
def test_processes_end_with_the_bytes_of_one(trained, feature, processes):
    one, several = trained(feature, 1), trained(feature, processes)
    assert len(contents(one)) >= 14
    assert contents(several) == contents(one)
    assert numbers(several) == numbers(one)
    assert (read_starts(one)[0]["processes"], read_starts(several)[0]["processes"]) == (
        1,
        processes,
    )


@pytest.mark.slow
def test_run_of_four_processes_is_verified_on_one(trained, forget_accelerate, capsys):
    forget_accelerate()
    assert main(["verify", str(trained("mixture", 4).path), "--steps", "2:12"]) == 0
    assert capsys.readouterr().out.endswith("\nsteps 2 to 12: equal\n")


@pytest.mark.long
@pytest.mark.parametrize("feature", ["gpt2", pytest.param("llama, Muon", marks=pytest.mark.slow)])
def test_run_killed_and_moved_ends_with_the_bytes_of_one_process(
    trained, words_of, launch_warm, tmp_path, feature
):
    def killed(status: int, output: str) -> None:
        assert status == 9, output

    words = words_of(feature, tmp_path / "run")
    for processes, change in ((1, 60), (4, 60)):
        launch(
            launch_warm, words, processes, FAULT=f"0:killed:{change}", RANK="0", ends_with=killed
        )
    run = launch(launch_warm, words, 2)
    starts = [(start["processes"], start["step"]) for start in read_starts(run)]
    assert [processes for processes, _ in starts] == [1, 4, 2]
    assert 0 == starts[0][1] < starts[1][1] < starts[2][1] < 12
    one = trained(feature, 1)
    assert contents(run) == contents(one)
    assert numbers(run) == numbers(one)


@pytest.mark.long
def test_grouped_run_is_the_same_experiment(train, tmp_path):
    options = {"train__max_steps": 6, "eval__every": 2, "train__micro_batch_size": 1}
    plain = train(tmp_path / "plain", **options)
    grouped = train(tmp_path / "grouped", train__gradient_groups=4, **options)
    assert_same_experiment(grouped, plain, samples=False)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_branches_of_processes_are_those_of_one_tree(processes):
    # sums of these depend on their order
    values = [3e7, 1.0, -3e7, 1.0, 5e6, 1e-3, -5e6, 0.1, 1.0, 7e7, 0.3, -7e7, 0.7, 2e7, -2e7, 3.0]

    def summed(values: list[float], per_group: int) -> tuple[float, float]:
        weight = torch.nn.Parameter(torch.zeros(1))
        tree = GradientTree([weight], per_group)
        for value in values:
            (weight * value).backward()
            tree.add(torch.tensor(2 * value))
        loss = tree.finish()
        return weight.grad.item(), loss.item()

    share = len(values) // processes
    branches = [summed(values[n * share :][:share], 2)[0] for n in range(processes)]
    expected = summed(values, 2)
    assert summed(branches, 1)[0] == expected[0] != sum(values)
    assert expected[1] == 2 * expected[0]


def test_micro_batches_of_a_group_are_the_same_on_any_number_of_ranks():
    def drawn(ranks: int) -> list[int]:
        shares = (
            Batches(
                TokenBlocks(TokenStream([np.arange(9)]), 1),
                order="shuffled",
                seed=0,
                micro_batch_size=1,
                accumulation=8 // ranks,
                dp_rank=rank,
                dp_size=ranks,
                contiguous=True,
            )
            for rank in range(ranks)
        )
        return [share.micro_batch_number(n) for share in shares for n in range(8 // ranks)]

    assert drawn(1) == drawn(2) == drawn(4) == list(range(8))
