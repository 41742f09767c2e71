"""Tensor and context parallelism: runs equal one process and move between layouts; what does not
combine is refused.
"""

import functools
import json
from pathlib import Path

import pytest
import torch

from assertions import CHUNKS, EXPERIMENT, assert_same_experiment, column, copy_at, weights
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics

OPTIONS = EXPERIMENT | {
    "model__n_head": 4,
    "model__bias": True,
    "train__micro_batch_size": 2,  # 128 tokens = 2 × 16 × 4 of accumulation
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
LAYOUTS |= {  # their processes do not divide the heads
    "ring": LAYOUTS["cp"],
    "ring_fsdp": (*LAYOUTS["cp_fsdp"], "--parallelism_config_cp_comm_strategy=alltoall"),
    "tp_ring": LAYOUTS["tp_cp"],
}
RING_HEADS = {"ring": 3, "ring_fsdp": 3, "tp_ring": 6}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory, make_recipe):
    """Heads -> the recipe."""
    folder = tmp_path_factory.mktemp("layouts")
    return {
        heads: make_recipe(
            folder / f"{heads}.yaml", **OPTIONS | {"model__n_head": heads, "model__n_embd": width}
        )
        for heads, width in {4: 16, 3: 24, 6: 24}.items()
    }


@pytest.fixture(scope="module")
def recipe(recipes) -> Path:
    return recipes[4]


@pytest.fixture(scope="module")
def launch(launch_warm):
    """Train on a layout: (layout, *arguments) -> the run."""

    def train(layout: str, *arguments) -> RunFolder:
        machine, *options = LAYOUTS[layout]
        return launch_warm(
            machine, "pretrain", *arguments, machine_options=options, CPU_RING="true", **CHUNKS
        )

    return train


@pytest.fixture(scope="module")
def trained(recipes, launch):
    """(layout, heads) -> the run."""

    @functools.cache
    def train(layout: str, heads: int = 4) -> RunFolder:
        return launch(
            layout, recipes[heads], "--run-dir", recipes[heads].parent / f"{layout}-{heads}"
        )

    return train


def assert_same_experiment_and_layers(run: RunFolder, reference: RunFolder) -> None:
    assert_same_experiment(run, reference)
    layers = sorted(
        {name for event in read_metrics(reference) for name in event if name.startswith("layers/")}
    )
    assert len(layers) > 10
    for name in layers:
        assert column(run, name) == pytest.approx(column(reference, name), rel=1e-3, abs=1e-4), name


def share_held(run: RunFolder, name: str) -> list[float]:
    """The share of a weight that each process held at its last checkpoint."""
    files = sorted(run.path.parent.glob(f"{run.path.name}.held.*.json"))
    weights = [json.loads(file.read_text())["weights"][name] for file in files]
    return [held / whole for _, held, whole in weights]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        *("cp", "tp_fsdp"),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("tp", "cp_fsdp", "tp_cp", *RING_HEADS)
        ),
    ],
)
def test_layout_equals_one_process(trained, layout):
    heads = RING_HEADS.get(layout, 4)
    run = trained(layout, heads)
    assert_same_experiment_and_layers(run, trained("one", heads))
    parts = {"tp": 2, "cp": 2, "ring": 2}.get(layout, 4)
    for name in ("attn.q_proj", "attn.o_proj", "mlp.fc", "mlp.proj"):
        assert share_held(run, f"transformer.h.1.{name}.weight") == [1 / parts] * parts
    assert sum(share_held(run, "transformer.wte.weight")) == 1


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["tp", "cp"])
def test_resumed_run_with_dropout_equals_uninterrupted(
    recipe, launch, make_recipe, tmp_path, layout
):
    recipe = make_recipe(tmp_path / "dropout.yaml", **OPTIONS | {"model__dropout": 0.2})
    whole = launch(layout, recipe, "--run-dir", tmp_path / "whole")
    resumed = copy_at(whole, 5, tmp_path / "resumed")
    launch(layout, recipe, "--run-dir", resumed.path, "--resume")
    first, second = weights(whole), weights(resumed)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    # weights that are not split get the same gradients, so masks of the residual stream are equal
    if layout == "tp":
        held = [
            json.loads(path.read_text())["whole"]
            for path in sorted(tmp_path.glob("whole.held.*.json"))
        ]
        assert len(held) == 2
        assert held[0] == held[1]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(("tp", "one"), ("fsdp", "tp_fsdp"), ("tp", "cp")),
        *(
            pytest.param(*moves, marks=pytest.mark.exhaustive)
            for moves in (
                *(("one", "tp"), ("tp_fsdp", "tp"), ("cp", "one")),
                *(("tp_cp", "cp"), ("ring", "one"), ("one", "ring")),
            )
        ),
    ],
)
def test_run_moves_to_another_layout(recipes, trained, launch, tmp_path, before, after):
    heads = RING_HEADS.get(before, RING_HEADS.get(after, 4))
    moved = copy_at(trained(before, heads), 5, tmp_path / "moved")
    launch(after, recipes[heads], "--run-dir", moved.path, "--resume")
    assert_same_experiment_and_layers(moved, trained("one", heads))
