"""Tensor, context and pipeline parallelism: runs equal one process, resume exactly and move between
layouts. Models, precisions and kinds of data: test_layout_table.py; refusals: refusals.txt.
"""

import functools
from pathlib import Path
from typing import Any

import pytest

from assertions import (
    CHUNKS,
    EXPERIMENT,
    assert_same_experiment,
    column,
    copy_at,
    held_by_ranks,
    same_weights,
)
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.runs.metrics import read_metrics

OPTIONS = EXPERIMENT | {
    "model__n_layer": 3,  # split unevenly into stages
    "train__micro_batch_size": 1,  # 128 tokens = 1 × 16 × 8 of accumulation
}
ZERO_BUBBLE = {"pp_schedule": "zero_bubble"}
# accelerate config, processes, sizes of its parallelism_config
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one": ("cpu", 1, {}),
    "fsdp": ("fsdp2", 2, {}),
    "tp": ("tp", 2, {}),
    "tp_fsdp": ("tp_fsdp2", 4, {}),
    "cp": ("cp_fsdp2", 2, {}),
    "cp_fsdp": ("cp_fsdp2", 4, {"dp_shard_size": 2}),
    "tp_cp": ("cp_fsdp2", 4, {"tp_size": 2}),
    # their processes do not divide the heads
    "ring": ("cp_fsdp2", 2, {}),
    "ring_fsdp": ("cp_fsdp2", 4, {"dp_shard_size": 2, "cp_comm_strategy": "alltoall"}),
    "tp_ring": ("cp_fsdp2", 4, {"tp_size": 2}),
    "ddp_bf16": ("cpu_ddp", 2, {"ddp_comm_hook": "bf16"}),
    "ddp_fp16": ("cpu_ddp", 2, {"ddp_comm_hook": "fp16"}),
    "pp2": ("pp", 2, {"pp_size": 2}),
    "pp3": ("pp", 3, {"pp_size": 3}),
    "pp2_dp2": ("pp", 4, {"pp_size": 2, "dp_replicate_size": 2}),
    "pp2_fsdp2": ("pp_fsdp2", 4, {"pp_size": 2}),
    "pp2_zero_bubble": ("pp", 2, {"pp_size": 2} | ZERO_BUBBLE),
    "pp3_zero_bubble": ("pp", 3, {"pp_size": 3} | ZERO_BUBBLE),
    "pp2_fsdp2_zero_bubble": ("pp_fsdp2", 4, {"pp_size": 2} | ZERO_BUBBLE),
    "pp2_tp2": ("pp_tp", 4, {"pp_size": 2, "dp_replicate_size": 1}),
    "pp2_dp2_tp2": ("pp_tp", 8, {"pp_size": 2, "dp_replicate_size": 2}),
}
HEADS = {"ring": 3, "ring_fsdp": 3, "tp_ring": 6}  # others have 4
EXHAUSTIVE = LAYOUTS.keys() - {"cp", "tp_fsdp", "pp2_fsdp2", "pp2_tp2", "ddp_bf16"}


def layouts(*names: str) -> list:
    return [
        pytest.param(name, marks=[pytest.mark.exhaustive] * (name in EXHAUSTIVE)) for name in names
    ]


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
def launch(launch_warm, recipe):
    """Train on a layout: (layout, run folder, *arguments, recipe) -> the run."""

    def train(layout: str, folder: Path, *arguments, recipe: Path = recipe) -> RunFolder:
        machine, processes, sizes = LAYOUTS[layout]
        options = [] if layout == "one" else [f"--num_processes={processes}"]
        options += ["--fsdp_reshard_after_forward=false"] * ("zero_bubble" in layout)
        own = sizes.keys() & {"pp_size", "pp_schedule", "ddp_comm_hook"}  # `launch` passes them on
        options += [f"--parallelism_config_{k}={sizes[k]}" for k in sizes.keys() - own]
        variables = {f"PARALLELISM_CONFIG_{name.upper()}": str(sizes[name]) for name in own}
        return launch_warm(
            *(machine, "pretrain", recipe, "--data.dir", recipe.parent / "data"),
            *("--run-dir", folder, *arguments),
            machine_options=options,
            CPU_RING="true",
            **CHUNKS | variables,
        )

    return train


@pytest.fixture(scope="module")
def trained(recipes, launch):
    """(layout, heads) -> the run."""

    @functools.cache
    def train(layout: str, heads: int) -> RunFolder:
        recipe = recipes[heads]
        return launch(layout, recipe.parent / f"{layout}-{heads}", recipe=recipe)

    return train


def assert_same_experiment_and_layers(run: RunFolder, reference: RunFolder) -> None:
    assert_same_experiment(run, reference)
    layers = sorted(
        {name for event in read_metrics(reference) for name in event if name.startswith("layers/")}
    )
    assert len(layers) > 10
    for name in layers:
        assert column(run, name) == pytest.approx(column(reference, name), rel=1e-3, abs=1e-4), name


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", layouts(*(name for name in list(LAYOUTS)[2:] if name[:3] != "ddp"))
)
def test_layout_equals_one_process(trained, layout):
    heads, (_, processes, sizes) = HEADS.get(layout, 4), LAYOUTS[layout]
    assert_same_experiment_and_layers(trained(layout, heads), trained("one", heads))
    stages, copies = sizes.get("pp_size", 1), sizes.get("dp_replicate_size", 1)
    each = processes // stages
    weights = [
        {name: own / whole for name, (_, own, whole) in rank["weights"].items()}
        for rank in held_by_ranks(trained(layout, heads))
    ]
    assert len(weights) == processes
    blocks = [{name.split(".")[2] for name in names if ".h." in name} for names in weights[::each]]
    assert [len(own) for own in blocks] == {1: [3], 2: [2, 1], 3: [1, 1, 1]}[stages]
    assert len(set.union(*blocks)) == 3
    for name in ("attn.q_proj", "attn.o_proj", "mlp.fc", "mlp.proj"):
        matrix = f"transformer.h.1.{name}.weight"
        shares = [names[matrix] for names in weights if matrix in names]
        assert shares == [copies / each] * each
    embeddings = [rank.get("transformer.wte.weight") for rank in weights]
    for stage in range(stages):  # the last has a copy for its tied head
        own = embeddings[stage * each : (stage + 1) * each]
        assert own == [None] * each if 0 < stage < stages - 1 else sum(own) == copies


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    layouts("tp", "cp", "ddp_bf16", "ddp_fp16", "pp2", "pp2_fsdp2", "pp2_zero_bubble", "pp2_tp2"),
)
def test_resumed_run_with_dropout_equals_uninterrupted(launch, tmp_path, layout):
    knobs = ["--model.dropout=0.1", "--train.micro_batch_size=auto"]
    whole = launch(layout, tmp_path / "whole", *knobs)
    resumed = copy_at(whole, 5, tmp_path / "resumed")
    launch(layout, resumed.path, *knobs, "--resume")
    assert same_weights(whole, resumed)
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert column(resumed, name) == column(whole, name)
    # weights that are not split get the same gradients, so masks of the residual stream are equal
    if "tp" in layout or "ddp" in layout:
        values = [rank["whole"] for rank in held_by_ranks(whole)]
        assert len(values) >= 2
        assert values[::2] == values[1::2]


@pytest.mark.long
@pytest.mark.slow
def test_compressed_gradients_are_those_of_one_process_rounded(trained):
    norm, losses = (column(trained("one", 4), f"train/{name}") for name in ("grad_norm", "loss"))
    for layout in ("ddp_bf16", "ddp_fp16"):
        rounded = column(trained(layout, 4), "train/grad_norm")
        assert rounded[1] == pytest.approx(norm[1], rel=1e-3)
        assert rounded[1] != pytest.approx(norm[1], rel=1e-7)
        assert column(trained(layout, 4), "train/loss") == pytest.approx(losses, abs=1e-2)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(("tp", "one"), ("fsdp", "tp_fsdp"), ("tp", "cp"), ("tp_fsdp", "pp2_tp2")),
        *(
            pytest.param(*moves, marks=pytest.mark.exhaustive)
            for moves in (
                *(("one", "tp"), ("tp_fsdp", "tp"), ("cp", "one"), ("pp2_tp2", "fsdp")),
                *(("tp_cp", "cp"), ("ring", "one"), ("one", "ring")),
            )
        ),
    ],
)
def test_run_moves_to_another_layout(recipes, trained, launch, tmp_path, before, after):
    heads = HEADS.get(before, HEADS.get(after, 4))
    moved = copy_at(trained(before, heads), 5, tmp_path / "moved")
    launch(after, moved.path, "--resume", recipe=recipes[heads])
    assert_same_experiment_and_layers(moved, trained("one", heads))


@pytest.mark.long
@pytest.mark.slow
def test_non_finite_gradient_skips_the_step_on_all_stages(launch, tmp_path):
    knobs = ["--optim.learning_rate=1e20", "--train.max_steps=6", "--eval.samples=[]"]
    one, several = (
        launch(name, tmp_path / name, *knobs, "--tracking.layers=false")
        for name in ("one", "pp2_tp2")
    )
    assert len(column(one, "train/skipped_steps")) > 2
    assert column(several, "train/skipped_steps") == column(one, "train/skipped_steps")


@pytest.mark.long
@pytest.mark.slow
def test_tasks_in_training_over_stages_equal_one_process(
    letter_tasks, byte_tokenizer, launch, tmp_path
):
    knobs = ["--eval.tasks", letter_tasks[0], "--train.max_steps=4", "--eval.every=2"]
    knobs += ["--tracking.layers=false", "--data.tokenizer", byte_tokenizer]
    knobs += ["--data.dir", tmp_path / "data"]
    one, several = (launch(name, tmp_path / name, *knobs) for name in ("one", "pp2_tp2"))
    assert column(several, "task/letters/acc") == column(one, "task/letters/acc")
    assert len(column(one, "task/letters/acc")) == 3
