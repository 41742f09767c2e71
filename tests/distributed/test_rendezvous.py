"""The same experiment on any number of processes, sharded or not, and moved between them in the middle."""

import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.tracking import read_metrics

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
HARNESSES = ROOT / "tests" / "training"
ENTRY = HARNESSES / "launched.py"
# some rows at a time, so that the loss takes its gradients from a head that was gathered
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "LOGITS_PER_CHUNK": "200"}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or shutil.which("g++") is None,
    reason="DeepSpeed is not installed, or no g++ is there to build its operation for CPUs",
)
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None or shutil.which("g++") is None,
    reason="torchao is not installed, or no g++ is there to compile its step for a CPU",
)
ZERO_2, ZERO_3 = (pytest.param(f"deepspeed_zero{stage}", marks=needs_deepspeed) for stage in (2, 3))
OPTIONS = {
    "model__dropout": 0.1,
    "train__max_steps": 10,
    "train__micro_batch_size": 2,  # 128 tokens = 2 × 16 × processes × accumulation: 4 alone, 2 in a pair
    "eval__every": 5,
    "eval__tokens": "all",
    "eval__samples": ["A cat "],
    "eval__sample_tokens": 20,  # past the 16 positions of the model
    "checkpoint__every": 5,
    "checkpoint__keep": 5,
    "tracking__layers": True,
}


def command(machine: str, *arguments: object, machine_options: Sequence[str] = ()) -> list[str]:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_cpu_threads_per_process=1"]
    config = ["--config_file", str(ROOT / "accelerate_configs" / f"{machine}.yaml")]
    if machine == "hsdp":  # two times two instead of two machines of eight
        config += ["--num_processes=4", "--num_machines=1", "--main_process_ip=127.0.0.1", "--main_process_port=0"]
        config += ["--parallelism_config_dp_replicate_size=2", "--parallelism_config_dp_shard_size=2"]
    elif machine != "cpu":
        config += ["--num_processes=2", "--main_process_port=0"]
    if machine.startswith(("fsdp", "hsdp", "deepspeed")):
        config += ["--mixed_precision=no", "--dynamo_backend=no"]
    knobs = ["--tracking.layers=false"] if machine.startswith("deepspeed") else []  # which keeps its gradients
    return [*launch, *config, *machine_options, str(ENTRY), "pretrain", *map(str, arguments), *knobs]


def launch(machine: str, recipe: Path, folder: Path, *arguments: str, machine_options: Sequence[str] = ()) -> RunFolder:
    """Train with an accelerate config that ships: one process, four under `hsdp`, two under the others."""
    done = subprocess.run(
        command(machine, recipe, "--run-dir", folder, *arguments, machine_options=machine_options),
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return RunFolder(folder)


@pytest.fixture(scope="module")
def launch_warm():
    """`launch`, by a process that has torch imported already: see warm.py."""
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, HARNESSES / "warm.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as warm:

        def launch(machine, recipe, folder, *arguments, machine_options=()) -> RunFolder:
            words = command(machine, recipe, "--run-dir", folder, *arguments, machine_options=machine_options)
            warm.stdin.write(json.dumps(words[3:]) + "\n")  # without python -m accelerate.commands.launch
            warm.stdin.flush()
            answer = json.loads(warm.stdout.readline())
            assert answer["status"] == 0, answer["said"][-5000:]
            return RunFolder(folder)

        yield launch
        warm.stdin.close()


def column(run: RunFolder, name: str) -> dict[int, float]:
    rows = [(event["step"], event[name]) for event in read_metrics(run) if name in event]
    assert rows
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def assert_same_experiment(run: RunFolder, reference: RunFolder) -> None:
    for name, tolerance in (("train/loss", 1e-5), ("train/grad_norm", 1e-4), ("val/loss", 1e-5)):
        assert column(run, name) == pytest.approx(column(reference, name), abs=tolerance), name
    assert column(run, "samples") == column(reference, "samples")
    ours, theirs = (load_file(r.final / "model.safetensors") for r in (run, reference))
    assert ours.keys() == theirs.keys()
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) < 1e-5


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, make_recipe) -> Path:
    return make_recipe(tmp_path_factory.mktemp("runs") / "recipe_for_all.yaml", **OPTIONS)


@pytest.fixture(scope="module")
def trained_on(recipe):
    """The run of the one experiment on a kind of machine; each is trained once."""

    @functools.cache
    def train(machine: str) -> RunFolder:
        return launch(machine, recipe, recipe.parent / machine)

    return train


@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2", "fsdp2_checkpointing", "hsdp", ZERO_2, ZERO_3])
def test_several_processes_are_the_same_experiment_as_one(trained_on, machine):
    # with dropout: activations that are computed again must meet the same masks
    assert_same_experiment(trained_on(machine), trained_on("cpu"))


@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2", "fsdp2_checkpointing", "hsdp"])
def test_the_layers_of_a_shared_network_are_those_of_a_whole_one(trained_on, machine):
    shared, whole = read_metrics(trained_on(machine)), read_metrics(trained_on("cpu"))
    assert sum("layers/0/grad_norm" in event for event in whole) == 10
    assert sum("layers/1/attention_logit_max" in event for event in whole) == 3
    for ours, theirs in zip(shared, whole, strict=True):
        assert ours.keys() == theirs.keys()
        layers = {name: value for name, value in theirs.items() if name.startswith("layers/")}
        assert {name: ours[name] for name in layers} == pytest.approx(layers, rel=1e-3, abs=1e-5)


def held(run: RunFolder, rank: int) -> dict:
    """What a process held at its last checkpoint: see launched.py."""
    return json.loads(Path(f"{run.path}.held.{rank}.json").read_text())


@pytest.mark.parametrize(
    ("machine", "kind"), [("fsdp2", "DTensor"), pytest.param("deepspeed_zero3", "Parameter", marks=needs_deepspeed)]
)
def test_weights_really_were_sharded(trained_on, machine, kind):
    for rank in (0, 1):
        sharded, whole = held(trained_on(machine), rank)["weights"], held(trained_on("cpu_ddp"), rank)["weights"]
        assert len(sharded) == len(whole) > 10
        assert {name for name, _, _ in sharded.values()} == {kind}
        assert sum(local for _, local, _ in sharded.values()) <= 0.52 * sum(n for _, _, n in sharded.values())
        assert all(local == n for _, local, n in whole.values())


@pytest.mark.parametrize("machine", ["fsdp2", ZERO_2, ZERO_3])
def test_moments_really_were_sharded(trained_on, machine):
    for rank in (0, 1):
        sharded, whole = held(trained_on(machine), rank)["moments"], held(trained_on("cpu_ddp"), rank)["moments"]
        assert whole == 2 * sum(n for _, _, n in held(trained_on("cpu_ddp"), rank)["weights"].values())
        assert 0.48 * whole <= sharded <= 0.52 * whole


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("cpu_ddp", "cpu"),
        ("cpu", "cpu_ddp"),
        ("cpu_ddp", "fsdp2"),
        ("fsdp2", "cpu"),
        pytest.param("fsdp2", "deepspeed_zero2", marks=needs_deepspeed),
        pytest.param("deepspeed_zero2", "deepspeed_zero3", marks=needs_deepspeed),
        pytest.param("deepspeed_zero3", "cpu", marks=needs_deepspeed),
    ],
)
def test_a_run_moves_between_machines_in_the_middle(recipe, trained_on, launch_warm, tmp_path, before, after):
    shutil.copytree(trained_on(before).path, tmp_path / "moved")
    moved = RunFolder(tmp_path / "moved")
    shutil.rmtree(moved.checkpoint(10))
    shutil.rmtree(moved.final)
    launch_warm(after, recipe, moved.path, "--resume")
    assert_same_experiment(moved, trained_on("cpu"))


@pytest.mark.parametrize("machine", ["cpu_ddp", ZERO_3])
def test_three_processes_resume_bit_for_bit(recipe, launch_warm, tmp_path, machine):
    # From three on the order of a sum matters. And no size here is a multiple of three, so shards are padded.
    options = ["--num_processes=3"], ["--train.tokens_per_step", "192", "--model.n_embd", "20"]
    whole = launch_warm(machine, recipe, tmp_path / "whole", *options[1], machine_options=options[0])
    shutil.copytree(whole.path, tmp_path / "again")
    again = RunFolder(tmp_path / "again")
    shutil.rmtree(again.checkpoint(10))
    shutil.rmtree(again.final)
    launch_warm(machine, recipe, again.path, "--resume", *options[1], machine_options=options[0])
    assert (again.final / "model.safetensors").read_bytes() == (whole.final / "model.safetensors").read_bytes()
    assert column(again, "train/grad_norm") == column(whole, "train/grad_norm")


@pytest.mark.slow
@needs_torchao
def test_moments_in_8_bits_resume_bit_for_bit_and_move(recipe, launch_warm, tmp_path):
    options = ["--optim.state=8bit", "--optim.learning_rate=1e-3", "--train.max_steps=4", "--model.n_embd=128"]
    options += [
        "--model.n_positions=128",
        "--model.pad_vocab_to_multiple_of=128",
        "--eval.every=2",
        "--eval.samples=[]",
    ]
    options += ["--checkpoint.every=2"]

    def train(machine: str, name: str, *words: str) -> RunFolder:
        return launch_warm(machine, recipe, tmp_path / name, *options, *words)

    whole = train("fsdp2", "whole")
    for name in ("again", "moved"):
        shutil.copytree(whole.path, tmp_path / name)
        shutil.rmtree(RunFolder(tmp_path / name).checkpoint(4))
        shutil.rmtree(RunFolder(tmp_path / name).final)
    again, moved = train("fsdp2", "again", "--resume"), train("cpu_ddp", "moved", "--resume")
    for name in ("final/model.safetensors", "checkpoints/step_00000004/optimizer.safetensors"):
        assert (again.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert column(again, "train/grad_norm") == column(whole, "train/grad_norm")
    assert column(moved, "val/loss") == pytest.approx(column(whole, "val/loss"), abs=1e-3)
    for rank in (0, 1):
        sharded, copied = held(whole, rank), held(moved, rank)
        assert 0.48 * copied["moments"] <= sharded["moments"] <= 0.52 * copied["moments"]
        for run in (sharded, copied):  # a byte each and the blocks' scales; LayerNorms stay float32
            assert run["moments"] < run["moment_bytes"] < 1.03 * run["moments"]


# 20 is no multiple of 3 processes, and a stack of two matrices has fewer than they are
MUON = ("--optim.name=muon", "--model.init=zero_residual", "--model.n_embd=20", "--train.tokens_per_step=384")
MUON_PROCESSES = {"cpu": 1, "cpu_ddp": 2, "fsdp2": 3, "hsdp": 4}


@pytest.fixture(scope="module")
def train_muon(recipe, launch_warm):
    """Train or resume a run with Muon: (machine, folder, arguments) -> the run."""

    def train(machine: str, folder: Path, *arguments: str) -> RunFolder:
        count = [] if machine == "cpu" else [f"--num_processes={MUON_PROCESSES[machine]}"]
        return launch_warm(machine, recipe, folder, *MUON, *arguments, machine_options=count)

    return train


@pytest.fixture(scope="module")
def muon_on(train_muon, recipe):
    return functools.cache(lambda machine: train_muon(machine, recipe.parent / f"muon_{machine}"))


def second_half(train_muon, source: RunFolder, machine: str, folder: Path) -> RunFolder:
    shutil.copytree(source.path, folder)
    shutil.rmtree(RunFolder(folder).checkpoint(10))
    shutil.rmtree(RunFolder(folder).final)
    return train_muon(machine, folder, "--resume")


@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2", "hsdp"])
def test_muon_on_several_processes_equals_muon_on_one(muon_on, machine):
    assert_same_experiment(muon_on(machine), muon_on("cpu"))


@pytest.mark.parametrize("machine", ["cpu_ddp", "fsdp2"])
def test_muon_keeps_one_buffer_for_a_matrix_and_fsdp2_shards_it(muon_on, machine):
    ranks = [held(muon_on(machine), rank) for rank in range(MUON_PROCESSES[machine])]
    sizes = {name: size for name, (_, _, size) in ranks[0]["weights"].items()}
    matrices = sum(size for name, size in sizes.items() if ".h." in name and "ln_" not in name)
    whole = 2 * sum(sizes.values()) - matrices
    held_by_rank = [rank["moments"] for rank in ranks]
    assert held_by_rank == [whole] * 2 if machine == "cpu_ddp" else sum(held_by_rank) == whole


@pytest.mark.parametrize("machine", ["cpu", "fsdp2"])
def test_muon_resumes_bit_for_bit(muon_on, train_muon, tmp_path, machine):
    whole = muon_on(machine)
    again = second_half(train_muon, whole, machine, tmp_path / "again")
    for name in ("final/model.safetensors", "checkpoints/step_00000010/optimizer.safetensors"):
        assert (again.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert column(again, "train/grad_norm") == column(whole, "train/grad_norm")


@pytest.mark.parametrize(("before", "after"), [("cpu_ddp", "fsdp2"), ("fsdp2", "cpu"), ("cpu", "cpu_ddp")])
def test_a_run_with_muon_moves_between_machines(muon_on, train_muon, tmp_path, before, after):
    assert_same_experiment(second_half(train_muon, muon_on(before), after, tmp_path / "moved"), muon_on("cpu"))


def test_sigterm_to_the_launcher_saves_on_all_processes_and_the_run_goes_on(recipe, tmp_path):
    folder = tmp_path / "stopped"
    arguments = [recipe, "--run-dir", folder, "--train.max_steps", "100000"]
    process = subprocess.Popen(
        command("cpu_ddp", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | ENVIRONMENT,
    )
    run = RunFolder(folder)
    deadline = time.monotonic() + 120
    while not (run.metrics.exists() and '"step": 7' in run.metrics.read_text()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert "saved (received SIGTERM); continue with --resume" in out
    saved = run.newest_checkpoint()
    state = json.loads((saved / "state.json").read_text())
    assert state["step"] >= 7
    launch("cpu_ddp", recipe, folder, "--resume", "--train.max_steps", str(state["step"] + 3))
    assert list(column(run, "train/loss")) == list(range(1, state["step"] + 4))


def refused(tmp_path: Path, machine: str, recipe: Path, *machine_options: str) -> str:
    """What a launch says that ends before a run folder is made, without the shim."""
    words = command(machine, recipe, "--run-dir", tmp_path / "never", machine_options=machine_options)
    done = subprocess.run(
        [str(ROOT / "cli.py") if word == str(ENTRY) else word for word in words],
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
    )
    assert done.returncode != 0
    assert not (tmp_path / "never").exists()
    return done.stderr


@pytest.mark.parametrize("machine", ["fsdp2", ZERO_2])
def test_what_the_config_asks_for_and_the_machine_cannot_give_is_one_clear_line(recipe, tmp_path, machine):
    asked = "FSDP" if machine == "fsdp2" else "DEEPSPEED"
    assert f"the accelerate config sets {asked}, but this machine provides" in refused(tmp_path, machine, recipe)


@needs_deepspeed
def test_an_accelerate_config_that_states_another_accumulation_is_refused(recipe, tmp_path):
    said = refused(tmp_path, "deepspeed_zero2", recipe, "--gradient_accumulation_steps=3")
    assert "sets gradient_accumulation_steps 3, but train.tokens_per_step of the recipe needs 2" in said
