"""Tensor and context parallelism: runs equal one process and move between layouts; what does not combine is refused."""

import functools
import json
from pathlib import Path

import pytest
import torch

from assertions import assert_same_experiment, column, copy_at, weights
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics

# several chunks of rows, so that the loss computes gradients with a gathered head
CHUNKS = {"LOGITS_PER_CHUNK": "200"}
OPTIONS = {
    "model__n_head": 4,
    "model__bias": True,
    "train__max_steps": 10,
    "train__micro_batch_size": 2,  # 128 tokens = 2 × 16 × 4 of accumulation
    "eval__every": 5,
    "eval__tokens": "all",
    "eval__samples": ["A cat "],
    "eval__sample_tokens": 20,  # more than the 16 positions of the model
    "checkpoint__every": 5,
    "checkpoint__keep": 5,
    "tracking__layers": True,
}
LAYOUTS = {
    "one": ("cpu",),
    "fsdp": ("fsdp2",),
    "tp": ("tp",),
    "tp_fsdp": ("tp_fsdp2",),
    "cp": ("cp_fsdp2",),
    "cp_fsdp": ("cp_fsdp2", "--num_processes=4", "--parallelism_config_dp_shard_size=2"),
    "tp_cp": ("cp_fsdp2", "--num_processes=4", "--parallelism_config_tp_size=2"),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, make_recipe) -> Path:
    return make_recipe(tmp_path_factory.mktemp("layouts") / "recipe.yaml", **OPTIONS)


@pytest.fixture(scope="module")
def launch(launch_warm):
    """Train on a layout: (layout, *arguments) -> the run."""

    def train(layout: str, *arguments) -> RunFolder:
        machine, *options = LAYOUTS[layout]
        return launch_warm(machine, "pretrain", *arguments, machine_options=options, **CHUNKS)

    return train


@pytest.fixture(scope="module")
def trained(recipe, launch):
    @functools.cache
    def train(layout: str) -> RunFolder:
        return launch(layout, recipe, "--run-dir", recipe.parent / layout)

    return train


def assert_same_experiment_and_layers(run: RunFolder, reference: RunFolder) -> None:
    assert_same_experiment(run, reference)
    layers = sorted({name for event in read_metrics(reference) for name in event if name.startswith("layers/")})
    assert len(layers) > 10
    for name in layers:
        assert column(run, name) == pytest.approx(column(reference, name), rel=1e-3, abs=1e-4), name


def share_held(run: RunFolder, name: str) -> list[float]:
    """The share of a weight that each process held at its last checkpoint."""
    files = sorted(run.path.parent.glob(f"{run.path.name}.held.*.json"))
    weights = [json.loads(file.read_text())["weights"][name] for file in files]
    return [held / whole for _, held, whole in weights]


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", ["tp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("cp", "tp_fsdp", "cp_fsdp", "tp_cp"))]
)
def test_layout_equals_one_process(trained, layout):
    assert_same_experiment_and_layers(trained(layout), trained("one"))
    parts = {"tp": 2, "cp": 2}.get(layout, 4)
    for name in ("attn.q_proj", "attn.o_proj", "mlp.fc", "mlp.proj"):
        assert share_held(trained(layout), f"transformer.h.1.{name}.weight") == [1 / parts] * parts
    assert sum(share_held(trained(layout), "transformer.wte.weight")) == 1


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "cp"])
def test_resumed_run_with_dropout_equals_uninterrupted(recipe, launch, make_recipe, tmp_path, layout):
    recipe = make_recipe(tmp_path / "dropout.yaml", **OPTIONS | {"model__dropout": 0.2})
    whole = launch(layout, recipe, "--run-dir", tmp_path / "whole")
    resumed = copy_at(whole, 5, tmp_path / "resumed")
    launch(layout, recipe, "--run-dir", resumed.path, "--resume")
    first, second = weights(whole), weights(resumed)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    if layout == "tp":  # weights that are not split get the same gradients, so masks of the residual stream are equal
        held = [json.loads(path.read_text())["whole"] for path in sorted(tmp_path.glob("whole.held.*.json"))]
        assert len(held) == 2
        assert held[0] == held[1]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp", "one"),
        ("one", "tp"),
        ("tp_fsdp", "tp"),
        ("fsdp", "tp_fsdp"),
        ("cp", "one"),
        ("tp", "cp"),
        ("tp_cp", "cp"),
    ],
)
def test_run_moves_to_another_layout(recipe, trained, launch, tmp_path, before, after):
    moved = copy_at(trained(before), 5, tmp_path / "moved")
    launch(after, recipe, "--run-dir", moved.path, "--resume")
    assert_same_experiment_and_layers(moved, trained("one"))
