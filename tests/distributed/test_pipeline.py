"""Pipeline parallelism: a run in stages equals one process and moves to it and back; what does
not fit is refused. Models, precisions and kinds of data: test_layout_table.py.
"""

import dataclasses
import functools
import json
from pathlib import Path

import pytest

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
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[] if name == "pp2_fsdp2" else pytest.mark.exhaustive)
        for name in LAYOUTS
        if name[:2] == "pp"
    ],
)
def test_pipeline_equals_one_process(trained, layout):
    assert_same_experiment(trained(layout), trained("one"))
    # and so are the figures of layers, of which each stage has its own
    for ours, theirs in zip(*map(read_metrics, (trained(layout), trained("one"))), strict=True):
        layers = {name: value for name, value in theirs.items() if name.startswith("layers/")}
        assert {name: ours[name] for name in layers} == pytest.approx(layers, rel=1e-3, abs=1e-5)
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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["pp2", pytest.param("pp2_fsdp2", marks=pytest.mark.exhaustive), "pp2_zero_bubble"]
)
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
    "unequal rounds of a zero bubble": (
        {"train.tokens_per_step": 144},
        ZERO_BUBBLE,
        {},
        (
            "cannot divide 9 micro-batches into 4 equal rounds; set train.micro_batch_size to 3 or "
            "set pp_schedule 1f1b"
        ),
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
