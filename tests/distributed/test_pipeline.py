"""Pipeline parallelism: a run in stages equals one process and moves to it and back; what does
not fit is refused. Models, precisions and kinds of data: test_layout_table.py.
"""

import dataclasses
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleavedZeroBubble

from assertions import CHUNKS, EXPERIMENT, assert_same_experiment, column, copy_at, weights
from nanogpt_hf.config.load import load_config
from nanogpt_hf.distributed.layout import Machine, check_layout
from nanogpt_hf.distributed.mesh import Mesh
from nanogpt_hf.errors import UserError
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics

OPTIONS = EXPERIMENT | {
    "model__n_layer": 3,  # split unevenly
    "train__micro_batch_size": 1,  # 128 tokens = 1 × 16 × 8 of accumulation
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, make_recipe) -> Path:
    return make_recipe(tmp_path_factory.mktemp("pipeline") / "recipe.yaml", **OPTIONS)


@pytest.fixture(scope="module")
def launch(launch_warm):
    """Train on `processes` in stages: (machine, stages, processes, schedule, *arguments) -> the
    run.
    """

    def train(machine: str, stages: int, processes: int, schedule: str, *arguments) -> RunFolder:
        options = (
            [] if machine == "cpu" else [f"--num_processes={processes}", "--mixed_precision=no"]
        )
        options += ["--fsdp_reshard_after_forward=false"] * (schedule == "zero_bubble")
        variables = CHUNKS | {
            "PARALLELISM_CONFIG_PP_SIZE": str(stages),
            "PARALLELISM_CONFIG_PP_SCHEDULE": schedule,
        }
        return launch_warm(machine, "pretrain", *arguments, machine_options=options, **variables)

    return train


LAYOUTS = {
    "one": ("cpu", 1, 1, "1f1b"),
    "pp2": ("pp", 2, 2, "1f1b"),
    "pp3": ("pp", 3, 3, "1f1b"),
    "pp2_dp2": ("cpu_ddp", 2, 4, "1f1b"),
    "pp2_fsdp2": ("pp_fsdp2", 2, 4, "1f1b"),
    "pp2_zero_bubble": ("pp", 2, 2, "zero_bubble"),
    "pp3_zero_bubble": ("pp", 3, 3, "zero_bubble"),
    "pp2_dp2_zero_bubble": ("cpu_ddp", 2, 4, "zero_bubble"),
    "pp2_fsdp2_zero_bubble": ("pp_fsdp2", 2, 4, "zero_bubble"),
}


@pytest.fixture(scope="module")
def trained(recipe, launch):
    @functools.cache
    def train(layout: str) -> RunFolder:
        return launch(*LAYOUTS[layout], recipe, "--run-dir", recipe.parent / layout)

    return train


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name[:2] == "pp"])
def test_pipeline_equals_one_process(trained, layout):
    assert_same_experiment(trained(layout), trained("one"))
    # what each process held at its last checkpoint (launched.py): a stage, of which FSDP2 shards
    # the matrices
    files = sorted(trained(layout).path.parent.glob(f"{layout}.held.*.json"))
    held = [
        {name: own for name, (_, own, _) in json.loads(f.read_text())["weights"].items()}
        for f in files
    ]
    _, stages, processes, _ = LAYOUTS[layout]
    assert len(held) == processes
    own_blocks = [
        {name.split(".")[2] for name in names if ".h." in name}
        for names in held[:: processes // stages]
    ]
    assert [len(blocks) for blocks in own_blocks] == {2: [2, 1], 3: [1, 1, 1]}[stages]
    assert len(set.union(*own_blocks)) == 3
    matrix = "transformer.wte.weight"  # of the tied head, too
    assert [matrix in names for names in held] == [
        rank * stages // processes in (0, stages - 1) for rank in range(processes)
    ]
    if "fsdp" in layout:
        assert held[0][matrix] + held[1][matrix] == weights(trained("one"))[matrix].numel()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "pp2_fsdp2", "pp2_zero_bubble", "pp2_fsdp2_zero_bubble"])
def test_layer_stats_of_stages_equal_one_process(trained, layout):
    several, one = read_metrics(trained(layout)), read_metrics(trained("one"))
    for ours, theirs in zip(several, one, strict=True):
        assert ours.keys() == theirs.keys()
        layers = {name: value for name, value in theirs.items() if name.startswith("layers/")}
        assert {name: ours[name] for name in layers} == pytest.approx(layers, rel=1e-3, abs=1e-5)
    assert sum("layers/2/attention_logit_max" in event for event in one) == 3


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [("pp2", "one"), ("one", "pp2"), ("pp2_fsdp2", "pp2_zero_bubble"), ("pp2_dp2", "pp2_fsdp2")],
)
def test_pipelined_run_moves(recipe, trained, launch, tmp_path, before, after):
    moved = copy_at(trained(before), 5, tmp_path / "moved")
    launch(*LAYOUTS[after], recipe, "--run-dir", moved.path, "--resume")
    assert_same_experiment(moved, trained("one"))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "pp2_fsdp2", "pp2_zero_bubble"])
def test_pipelined_run_with_dropout_resumes_exactly(recipe, launch, tmp_path, layout):
    knobs = ["--model.dropout=0.1", "--train.micro_batch_size=auto"]

    def train(name: str, *arguments: str) -> RunFolder:
        data = ["--data.dir", recipe.parent / "data"]
        return launch(
            *LAYOUTS[layout], recipe, *knobs, *data, "--run-dir", tmp_path / name, *arguments
        )

    uninterrupted = train("uninterrupted")
    resumed = copy_at(uninterrupted, 5, tmp_path / "resumed")
    train("resumed", "--resume")
    model = "model.safetensors"
    assert (resumed.final / model).read_bytes() == (uninterrupted.final / model).read_bytes()
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert column(resumed, name) == column(uninterrupted, name)


@pytest.mark.long
@pytest.mark.slow
def test_non_finite_gradient_skips_the_step_on_all_stages(recipe, launch, tmp_path):
    knobs = [
        "--optim.learning_rate=1e20",
        "--train.max_steps=6",
        "--eval.samples=[]",
        "--tracking.layers=false",
    ]
    one, several = (
        launch(
            *LAYOUTS[name],
            recipe,
            *knobs,
            "--data.dir",
            recipe.parent / "data",
            "--run-dir",
            tmp_path / name,
        )
        for name in ("one", "pp2")
    )
    assert len(column(one, "train/skipped_steps")) > 2
    assert column(several, "train/skipped_steps") == column(one, "train/skipped_steps")


@pytest.mark.long
@pytest.mark.slow
def test_signal_to_cli_launch_saves_on_all_stages(root, recipe, launch, tmp_path):
    run = RunFolder(tmp_path / "run")
    command = [
        sys.executable,
        root / "cli.py",
        "launch",
        "--config_file",
        root / "accelerate_configs" / "pp.yaml",
    ]
    command += ["--mixed_precision=no", "--parallelism_config_pp_schedule=zero_bubble"]
    command += ["--num_cpu_threads_per_process=1", "pretrain", recipe, "--run-dir", run.path]
    command += ["--data.dir", recipe.parent / "data"]
    process = subprocess.Popen(
        list(map(str, [*command, "--train.max_steps", 100_000])),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""},
    )
    end = time.monotonic() + 120
    while not (run.metrics.exists() and '"step": 5,' in run.metrics.read_text()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 75, out
    assert "2-way pipeline-parallel (zero_bubble)" in out
    saved = int(run.newest_checkpoint().name.removeprefix("step_"))
    assert saved >= 5
    data = ["--data.dir", recipe.parent / "data"]
    launch(
        *LAYOUTS["one"],
        recipe,
        *data,
        "--run-dir",
        run.path,
        "--resume",
        "--train.max_steps",
        saved + 1,
    )
    assert list(column(run, "train/loss")) == list(range(1, saved + 2))


@pytest.mark.long
def test_stages_that_accelerate_launch_does_not_pass_on_are_refused(recipe, launch_warm, tmp_path):
    with pytest.raises(
        AssertionError,
        match=(
            r"every size 1 = 1 process, but 2 were started: .* `python "
            r"cli.py launch`"
        ),
    ):
        launch_warm(
            "pp",
            "pretrain",
            recipe,
            "--run-dir",
            tmp_path / "run",
            machine_options=["--mixed_precision=no"],
        )
    assert not (tmp_path / "run").exists()


ZERO_BUBBLE = {"pp_schedule": "zero_bubble"}
REFUSED = {
    "sizes that do not multiply to the processes": (
        {},
        {},
        {"pp_size": 2, "dp_replicate_size": 2},
        "= 4 processes",
    ),
    "pp_size that does not divide the processes": (
        {},
        {"world_size": 3},
        {"pp_size": 2},
        "3 were started",
    ),
    "tensor parallelism": (
        {},
        {"world_size": 4, "tp_size": 2},
        {"pp_size": 2, "tp_size": 2},
        "pipeline stages (pp_size 2) does not combine with tensor parallelism (tp_size 2)",
    ),
    "ZeRO": ({}, {"sharding": "zero"}, {}, "pp_size 2) does not combine with DeepSpeed"),
    "HSDP": (
        {},
        {"sharding": "fsdp", "world_size": 8},
        {"pp_size": 2, "dp_replicate_size": 2, "dp_shard_size": 2},
        "set dp_replicate_size 1",
    ),
    "weights resharded in a zero bubble": (
        {},
        {"sharding": "fsdp", "world_size": 4, "reshards": True} | ZERO_BUBBLE,
        {},
        "fsdp_reshard_after_forward does not combine with pp_schedule zero_bubble",
    ),
    "unequal rounds of a zero bubble": (
        {"train.tokens_per_step": 144},
        ZERO_BUBBLE,
        {},
        (
            "cannot divide 9 micro-batches into 4 equal rounds; set train.micro_batch_size to 3 or "
            "set pp_schedule 1f1b"
        ),
    ),
    "layer decay": (
        {"finetune.model": "base", "finetune.layer_decay": 0.9},
        {},
        {},
        "finetune.layer_decay 0.9 does not combine with pipeline stages",
    ),
    "fewer layers than stages": (
        {"model.n_layer": 1},
        {},
        {},
        "model.n_layer is 1, fewer than the 2 stages",
    ),
    "fewer micro-batches than stages": (
        {"train.micro_batch_size": 8},
        {},
        {},
        (
            "fewer micro-batches than stages; set train.micro_batch_size to 4 or raise "
            "train.tokens_per_step"
        ),
    ),
    "architecture": (
        {"model.architecture": "falcon"},
        {},
        {},
        "model.architecture falcon (it cannot be cut into stages",
    ),
}


@pytest.mark.parametrize(("knobs", "machine", "sizes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_stages_cannot_train_is_refused(recipe, knobs, machine, sizes, message):
    config = load_config(recipe, [(key, str(value)) for key, value in knobs.items()])
    of_mesh = {field.name for field in dataclasses.fields(Mesh)}
    mesh = {"world_size": 2, "pp_size": 2} | {
        key: value for key, value in machine.items() if key in of_mesh
    }
    rest = {key: value for key, value in machine.items() if key not in of_mesh}
    with pytest.raises(UserError) as error:
        check_layout(config, Mesh(**mesh, stated_sizes=sizes or {"pp_size": 2}), Machine(**rest))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("machine", "sizes"),
    [
        (Machine(), {"pp_size": 2}),
        (Machine(), {"pp_size": 2, "dp_replicate_size": 2, "dp_shard_size": 1}),
        (Machine("fsdp", "bf16", compiles=True, reshards=True), {"pp_size": 2, "dp_shard_size": 2}),
    ],
)
def test_layouts_with_stages_that_are_not_refused(recipe, machine, sizes):
    mesh = Mesh(world_size=4, pp_size=2, stated_sizes=sizes)
    check_layout(load_config(recipe), mesh, machine)


@pytest.mark.parametrize("machine", [Machine(), Machine("fsdp", "bf16")])
def test_zero_bubbles_that_are_not_refused(recipe, machine):
    check_layout(
        load_config(recipe),
        Mesh(world_size=4, pp_size=2, pp_schedule="zero_bubble", stated_sizes={"pp_size": 2}),
        machine,
    )


def slots_and_held(schedule: str, stages: int, micro_batches: int) -> tuple[int, list[int]]:
    """What torch's order takes, if the forward pass and each part of the backward pass take one
    slot.

    The slots of a step, and how many micro-batches each stage holds at most, until its backward
    pass is complete.
    """
    fields = {
        "num_stages": stages,
        "group_size": stages,
        "group_rank": 0,
        "stage_index": 0,
        "submod": None,
    }
    stage: Any = SimpleNamespace(**fields)
    if schedule == "1f1b":
        actions = Schedule1F1B(stage, micro_batches).pipeline_order
    else:
        actions = ScheduleInterleavedZeroBubble([stage], micro_batches).pipeline_order
    kinds = {
        rank: [action.computation_type.value for action in own if action]
        for rank, own in actions.items()
    }
    orders = {
        rank: [kind for kind in own if kind in ("F", "B", "I", "W")] for rank, own in kinds.items()
    }
    changes = {"F": 1, "B": -1, "I": 0, "W": -1}
    held = [max(itertools.accumulate(changes[kind] for kind in own)) for own in orders.values()]
    # of each stage's passes, by micro-batch
    ends: dict[tuple[int, str], list[int]] = defaultdict(list)
    clock = [0] * stages
    while any(orders.values()):
        remaining = sum(map(len, orders.values()))
        for rank, own in orders.items():
            while own:
                kind = {"I": "B"}.get(own[0], own[0])
                index = len(ends[rank, kind])
                needs = [] if kind == "F" else [ends[rank, "F"]]
                neighbor = rank + (-1 if kind == "F" else 1)
                needs += [ends[neighbor, kind]] if kind != "W" and neighbor in orders else []
                if any(len(times) <= index for times in needs):
                    break
                duration = 2 if own.pop(0) == "B" else 1
                clock[rank] = max([clock[rank], *(times[index] for times in needs)]) + duration
                ends[rank, kind].append(clock[rank])
        assert sum(map(len, orders.values())) < remaining
    return max(clock), held


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 32), (8, 32)])
def test_idle_slots_are_those_of_torchs_orders(stages, micro_batches):
    one_fewer_each, all_alike = list(range(stages, 0, -1)), [stages] * stages
    cases = ("1f1b", 3 * stages - 3, one_fewer_each), ("zero_bubble", stages - 1, all_alike)
    for schedule, idle, expected in cases:
        slots, held = slots_and_held(schedule, stages, micro_batches)
        assert slots - 3 * micro_batches == idle
        assert held == expected


@pytest.mark.long
@pytest.mark.slow
def test_tasks_in_training_over_stages_equal_one_process(
    letter_tasks, byte_tokenizer, recipe, launch, tmp_path
):
    knobs = [
        "--eval.tasks",
        letter_tasks[0],
        "--train.max_steps=4",
        "--eval.every=2",
        "--tracking.layers=false",
    ]
    knobs += ["--data.tokenizer", byte_tokenizer]
    one, several = (
        launch(
            *LAYOUTS[name],
            recipe,
            *knobs,
            "--data.dir",
            tmp_path / "data",
            "--run-dir",
            tmp_path / name,
        )
        for name in ("one", "pp2")
    )
    assert column(several, "task/letters/acc") == column(one, "task/letters/acc")
    assert len(column(one, "task/letters/acc")) == 3


@pytest.mark.long
@pytest.mark.slow
def test_finetuning_in_stages_equals_one_process(tiny_base, text_file, launch_warm, tmp_path):
    def train(layout: str) -> RunFolder:
        machine, stages, processes, _ = LAYOUTS[layout]
        words = [
            "finetune",
            "--data",
            text_file,
            "--from",
            tiny_base,
            "--run-dir",
            tmp_path / layout,
        ]
        words += [
            "--data.dir",
            tmp_path / "data",
            "--train.max_steps=4",
            "--train.micro_batch_size=2",
        ]
        words += [
            "--train.tokens_per_step=256",
            "--data.block_size=32",
            "--model.dropout=0",
            "--tracking.every=1",
        ]
        options = (
            [] if machine == "cpu" else [f"--num_processes={processes}", "--mixed_precision=no"]
        )
        return launch_warm(
            machine, *words, machine_options=options, PARALLELISM_CONFIG_PP_SIZE=str(stages)
        )

    one, several = train("one"), train("pp2")
    assert column(several, "train/loss") == pytest.approx(column(one, "train/loss"), abs=1e-5)
    ours, theirs = weights(several), weights(one)
    assert max((ours[name] - theirs[name]).abs().max().item() for name in theirs) < 1e-5
