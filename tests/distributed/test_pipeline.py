"""Pipeline parallelism: a run over several stages equals one process, and moves to it and back."""

import functools
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics

pytestmark = pytest.mark.long
# several chunks of rows, so that the loss computes gradients with a gathered head
CHUNKS = {"LOGITS_PER_CHUNK": "200"}
OPTIONS = {
    "model__n_layer": 3,  # split unevenly
    "train__max_steps": 10,
    "train__micro_batch_size": 1,  # 128 tokens = 1 × 16 × 8 of accumulation
    "eval__every": 5,
    "eval__tokens": "all",
    "eval__samples": ["A cat "],
    "eval__sample_tokens": 20,  # more than the 16 positions of the model
    "checkpoint__every": 5,
    "checkpoint__keep": 5,
    "tracking__layers": True,
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, make_recipe) -> Path:
    return make_recipe(tmp_path_factory.mktemp("pipeline") / "recipe.yaml", **OPTIONS)


@pytest.fixture(scope="module")
def launch(launch_warm):
    """Train on `processes` in stages: (machine, stages, processes, *arguments) -> the run."""

    def train(machine: str, stages: int, processes: int, *arguments) -> RunFolder:
        options = [] if machine == "cpu" else [f"--num_processes={processes}"]
        variables = CHUNKS | {"PARALLELISM_CONFIG_PP_SIZE": str(stages)}
        return launch_warm(machine, "pretrain", *arguments, machine_options=options, **variables)

    return train


def column(run: RunFolder, name: str) -> dict[int, float]:
    return {event["step"]: event[name] for event in read_metrics(run) if name in event}


def assert_same_experiment(run: RunFolder, reference: RunFolder) -> None:
    for name, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-4), ("val/loss", 1e-5)):
        assert len(column(reference, name)) >= 3, name
        assert column(run, name) == pytest.approx(column(reference, name), abs=tolerance, rel=tolerance), name
    assert column(run, "samples") == column(reference, "samples")
    ours, theirs = (load_file(r.final / "model.safetensors") for r in (run, reference))
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < 1e-5


LAYOUTS = {
    "one": ("cpu", 1, 1),
    "pp2": ("cpu_ddp", 2, 2),
    "pp3": ("cpu_ddp", 3, 3),
    "pp2_dp2": ("cpu_ddp", 2, 4),
    "pp2_fsdp2": ("fsdp2", 2, 4),
}


@pytest.fixture(scope="module")
def trained(recipe, launch):
    @functools.cache
    def train(layout: str) -> RunFolder:
        return launch(*LAYOUTS[layout], recipe, "--run-dir", recipe.parent / layout)

    return train


@pytest.mark.parametrize("layout", ["pp2", "pp3", "pp2_dp2", "pp2_fsdp2"])
def test_pipeline_equals_one_process(trained, layout):
    assert_same_experiment(trained(layout), trained("one"))


@pytest.mark.parametrize(
    ("before", "after"), [("pp2", "one"), ("one", "pp2"), ("pp2_fsdp2", "pp2"), ("pp2_dp2", "pp2_fsdp2")]
)
def test_pipelined_run_moves(recipe, trained, launch, tmp_path, before, after):
    moved = RunFolder(tmp_path / "moved")
    shutil.copytree(trained(before).path, moved.path)
    shutil.rmtree(moved.checkpoint(10))
    shutil.rmtree(moved.final)
    launch(*LAYOUTS[after], recipe, "--run-dir", moved.path, "--resume")
    assert_same_experiment(moved, trained("one"))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "nanochat", "olmo2"])
@pytest.mark.parametrize("layout", ["pp2", "pp2_fsdp2"])
def test_pipelined_decoder_equals_one_process(recipe, launch, tmp_path, architecture, layout):
    knobs = [f"--model.architecture={architecture}", "--model.n_kv_head=1", "--optim.learning_rate=3e-3"]
    runs = [
        launch(*LAYOUTS[name], recipe, *knobs, "--run-dir", tmp_path / name, "--data.dir", recipe.parent / "data")
        for name in (layout, "one")
    ]
    assert_same_experiment(*runs)
