"""The `sweep` command: its grid, runs that it starts, skips and resumes, its table and plot,
interruption, several processes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arguments import argv
from assertions import column
from nanogpt_hf.commands import main
from nanogpt_hf.config.load import load_config
from nanogpt_hf.data.prepare import prepare
from nanogpt_hf.errors import ConfigError
from nanogpt_hf.runs.folder import RunFolder
from nanogpt_hf.training.sweep_grid import Sweep, build_grid
from nanogpt_hf.training.sweep_results import fit_scaling, planned, table, write_results

ROOT = Path(__file__).parents[2]
RATES = ["--optim.learning_rate", "1e-2,2e-2"]


@pytest.fixture
def run_sweep(tmp_path, write_recipe, in_process):
    """Sweep over two learning rates with these options, in `sweep`; return the exit status."""
    recipe = write_recipe(train__max_steps=2)
    command = "sweep {} --optim.learning_rate 1e-2,2e-2 --sweep-dir {}"
    return lambda options="": main(argv(f"{command} {options}", recipe, tmp_path / "sweep"))


def read_table(folder):
    return {row["run"]: row for row in json.loads((folder / "sweep.json").read_text())["runs"]}


@pytest.mark.long
def test_sweep_trains_runs_and_skips_finished_ones(
    run_sweep, tmp_path, in_process, capsys, monkeypatch
):
    folder = tmp_path / "sweep"
    monkeypatch.chdir(tmp_path)
    assert run_sweep() == 0
    assert in_process == ["learning_rate=0.01", "learning_rate=0.02"]
    assert "0.01" in capsys.readouterr().out
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "settings.png").read_bytes().startswith(b"\x89PNG")
    rows = read_table(folder).values()
    values = [(row["status"], row["steps"], row["optim.learning_rate"]) for row in rows]
    assert values == [("done", 2, 0.01), ("done", 2, 0.02)]
    assert len({row["val_loss"] for row in rows}) == 2
    # each run equals that of pretrain
    assert main(argv("pretrain tiny.yaml --optim.learning_rate 2e-2 --run-dir single")) == 0
    first, second = (
        (run / "final" / "model.safetensors").read_bytes()
        for run in (Path("single"), folder / "learning_rate=0.02")
    )
    assert first == second
    # again: nothing to do; with another value: only its run; of another recipe: an error
    assert run_sweep() == 0
    assert run_sweep("--optim.learning_rate 1e-2,2e-2,3e-2") == 0
    assert in_process[2:] == ["learning_rate=0.03"]
    assert run_sweep("--train.seed 3") == 2
    assert "train.seed: 1337 -> 3" in capsys.readouterr().err
    assert run_sweep("--overwrite") == 0
    assert in_process[3:] == ["learning_rate=0.01", "learning_rate=0.02"]


@pytest.mark.long
def test_sweep_shows_means_over_seeds(run_sweep, in_process, capsys):
    assert run_sweep("--train.seed 1,2") == 0
    out = capsys.readouterr().out
    _, _, table = out.partition("means over the seeds, best first:\n")
    header, first, second, *_ = table.splitlines()
    assert header.split()[0] == "optim.learning_rate"
    assert first.split()[1] == second.split()[1] == "2"


@pytest.mark.long
def test_failed_run_does_not_stop_the_sweep(run_sweep, tmp_path, in_process, capsys):
    folder = tmp_path / "sweep"
    blocked = folder / "learning_rate=0.01"
    blocked.mkdir(parents=True)
    (blocked / "notes.txt").write_text("not a run")
    assert run_sweep() == 1
    assert "is not empty and holds no run" in capsys.readouterr().err
    assert [row["status"] for row in read_table(folder).values()] == ["failed (2)", "done"]
    (blocked / "notes.txt").unlink()  # the failed run is started again
    assert run_sweep() == 0
    assert in_process == ["learning_rate=0.01", "learning_rate=0.02", "learning_rate=0.01"]


@pytest.mark.long
def test_diverged_run_has_failed_each_time(run_sweep, tmp_path, in_process, capsys):
    options = "--optim.learning_rate 1e-2,1e15 --optim.max_grad_norm 0 --optim.warmup_steps 0"
    for _ in range(2):
        assert run_sweep(options) == 1
        assert "the run has diverged" in capsys.readouterr().err
        rows = read_table(tmp_path / "sweep").values()
        assert [row["status"] for row in rows] == ["done", "failed (2)"]
        assert [row["val_loss"] is None for row in rows] == [False, True]
    assert in_process == ["learning_rate=0.01", *[f"learning_rate={1e15}"] * 2]


def test_folder_in_which_another_process_trains_is_refused(run_sweep, tmp_path, in_process, capsys):
    folder = RunFolder(tmp_path / "sweep" / "learning_rate=0.02")
    folder.lock()
    for options in ("", "--overwrite"):
        assert run_sweep(options) == 2
        assert f"{folder.path}: another process is training in it" in capsys.readouterr().err
    assert in_process == []


def test_dry_run_lists_runs_with_sizes(write_recipe, tmp_path, monkeypatch, in_process, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = argv("sweep {} --depth 1,2 --model.aspect_ratio 8 --dry-run", write_recipe())
    assert main([*arguments, "--json", "x.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"2 runs below {Path('runs') / 'tiny-depth'}"
    first, second = json.loads(Path("x.json").read_text())["runs"]
    assert first["parameters"] < second["parameters"]
    assert f"{second['tokens']:,}" in next(line for line in lines if line.startswith("depth=2"))
    assert in_process == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ("--optim.name adamw,nosuch,muon", ["--optim.name", "'nosuch'", "muon"]),
        ("--train.tokens_per_step 128,192 --config_file {machine}", ["=192", "2 processes"]),
        ("--model.n_head 1,2 --config_file {tp}", ["n_head=1", "model.n_head is 1"]),
        ("--train.seed 1,2 --tracking.trackers nosuch", ["seed=1", "nosuch"]),
        ("--optim.balance_loss 0,0.1", ["balance_loss=0.1", "no experts"]),
        ("--data.dir data,sweep", ["data.dir", "one is inside the other"]),
        ("--data.source {text},no.txt --data.dir data", ["no.txt"]),
        ("--model.architecture llama,nosuch", ["architecture=nosuch", "is no model type"]),
    ],
)
@pytest.mark.parametrize("dry_run", ["", " --dry-run"])
def test_all_runs_are_checked_before_the_first(
    refused, write_recipe, in_process, tmp_path, text_file, options, parts, dry_run
):
    two = "distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n"
    size = "parallelism_config: {parallelism_config_tp_size: 2}\n"
    (tmp_path / "two.yaml").write_text(two)
    (tmp_path / "tp.yaml").write_text(two + size)
    files = {"machine": tmp_path / "two.yaml", "tp": tmp_path / "tp.yaml", "text": text_file}
    words = argv(f"sweep {{}} --sweep-dir sweep {options.format(**files)}{dry_run}", write_recipe())
    line = refused(*words)
    assert [part for part in parts if part not in line] == [], line
    assert in_process == []


@pytest.mark.parametrize("name", ["recipe.yaml", "checkpoints/step_00000001/state.json"])
def test_folder_of_a_run_is_no_folder_of_a_sweep(refused, write_recipe, tmp_path, in_process, name):
    (tmp_path / "run" / name).parent.mkdir(parents=True)
    (tmp_path / "run" / name).touch()
    for options in ("", "--overwrite", "--dry-run"):
        words = f"sweep {{}} --sweep-dir run --train.seed 1,2 {options}"
        assert "run: holds a run itself; give another" in refused(*argv(words, write_recipe()))
    assert in_process == []


@pytest.mark.parametrize("options", ["", "--overwrite", "--dry-run"])
def test_file_is_no_folder_of_a_sweep(refused, write_recipe, tmp_path, in_process, options):
    (tmp_path / "file").touch()
    words = f"sweep {{}} --sweep-dir file --train.seed 1,2 {options}"
    assert "file: is a file; give another --sweep-dir" in refused(*argv(words, write_recipe()))
    if options != "--dry-run":
        line = refused(*argv(words.replace("file", "file/below"), write_recipe()))
        assert "file/below: " in line
        assert "another --sweep-dir" in line
        assert "--run-dir" not in line
    assert in_process == []


def test_settings_that_are_not_estimated_keep_no_sweep_from_running(write_recipe, tmp_path):
    file = tmp_path / "fp8.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp8\n")
    assert (
        main(argv("sweep {} --train.seed 1,2 --dry-run --config_file {}", write_recipe(), file))
        == 0
    )


# --- the grid


@pytest.fixture
def grid(write_recipe):
    recipe = str(write_recipe())
    return lambda *overrides: build_grid(recipe, overrides)


def test_grid_has_every_combination_in_order(grid):
    rates = ("optim.learning_rate", "1e-2,2e-2,0.03")
    runs = grid(("train.seed", "1, 2"), ("optim.beta1", "0.5"), rates)
    values = [(run.config.train.seed, run.config.optim.learning_rate) for run in runs]
    assert values == [(seed, rate) for seed in (1, 2) for rate in (0.01, 0.02, 0.03)]
    assert {run.config.optim.beta1 for run in runs} == {0.5}
    assert runs[0].values == {"train.seed": 1, "optim.learning_rate": 0.01}
    assert runs[0].name == "seed=1_learning_rate=0.01"


def test_overrides_of_a_run_are_its_arguments(grid, write_recipe):
    samples = ("eval.samples", "[Once upon, The]")  # a list is one value
    for run in grid(("eval.sample_tokens", "4, 5"), samples, ("lora.rank", "null")):
        assert load_config(str(write_recipe()), run.overrides) == run.config
        assert run.config.eval.samples == ["Once upon", "The"]
    source = ("data.source", "user/name")
    runs = grid(("data.text_column", '"a,b", c'), ("data.split", "x: y #1"), source)
    assert [run.config.data.text_column for run in runs] == ["a,b", "c"]
    assert (runs[0].config.data.split, runs[0].name) == ("x: y #1", "text_column=a-b")


def test_runs_share_prepared_data_of_equal_tokens(grid):
    same = grid(("train.seed", "1,2"), ("data.block_size", "8,16"))
    (shared,) = {run.config.data.dir for run in same}
    differ = grid(("train.seed", "1,2"), ("data.validation_fraction", "0.1,0.2"))
    folders = {f"{shared}-validation_fraction={fraction}" for fraction in (0.1, 0.2)}
    assert {run.config.data.dir for run in differ} == folders
    stated = grid(("data.validation_seed", "1,2"), ("data.dir", "d,e"))
    assert {run.config.data.dir for run in stated} == {"d", "e"}


def test_knob_that_some_runs_do_not_read_is_left_out_of_them(grid):
    runs = grid(
        ("optim.name", "adamw,muon"),
        ("optim.muon_momentum", "0.9,0.95"),
        ("optim.muon_scale", "match_rms_adamw"),
        ("train.seed", "1,2"),
    )
    assert [run.name for run in runs] == [
        "name=adamw_seed=1",
        "name=adamw_seed=2",
        "name=muon_muon_momentum=0.9_seed=1",
        "name=muon_muon_momentum=0.9_seed=2",
        "name=muon_muon_momentum=0.95_seed=1",
        "name=muon_muon_momentum=0.95_seed=2",
    ]
    assert dict(runs[0].overrides) == {"optim.name": "adamw", "train.seed": "1"}
    assert [run.config.optim.muon_scale for run in runs[1:3]] == ["original", "match_rms_adamw"]
    with pytest.raises(ConfigError, match=r"--rl\.kl: 0\.5 is read only with rl\.task"):
        grid(("optim.name", "adamw,muon"), ("rl.kl", "0.5"))
    with pytest.raises(ConfigError, match=r"--optim\.muon_momentum: 0\.9 is read only with"):
        grid(("train.seed", "1,2"), ("optim.muon_momentum", "0.9,0.95"))


# --- the table and the plot


def test_table_json_and_law_have_the_results(tmp_path, grid):
    runs = grid(("model.depth", "1,2,4"), ("model.aspect_ratio", "8"), ("train.seed", "1"))
    sizes = Sweep("tiny", runs, tmp_path / "si$zes")
    for row in planned(sizes):
        folder = sizes.folder / row["run"]
        folder.mkdir(parents=True)
        loss = 9 * row["flops"] ** -0.1
        end = {"step": row["steps"], "tokens": row["tokens"], "seconds": 1.5, "val/loss": loss}
        (folder / "metrics.jsonl").write_text(json.dumps(end))
    done = {run.name: "done" for run in runs}
    tree = write_results(sizes, done)
    assert (sizes.folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((sizes.folder / "sweep.json").read_text()) == tree
    assert all(f"{row['val_loss']:.4f}" in table(tree["runs"], sizes.score) for row in tree["runs"])
    law = tree["fit"]
    assert (law["coefficient"], law["exponent"]) == (pytest.approx(9), pytest.approx(-0.1))
    worse = tree["runs"][1] | {"val_loss": 99.0}
    assert fit_scaling([worse, *tree["runs"]]) == pytest.approx(law)
    assert write_results(sizes, done | {runs[2].name: "interrupted"})["fit"] is None


# --- processes


def start(arguments, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "cli.py"), *arguments], env=environment, **pipes, **options
    )


@pytest.mark.slow
def test_interrupted_sweep_saves_and_continues(write_recipe, tmp_path):
    recipe = str(write_recipe(train__max_steps=60, checkpoint__every=1000))
    folder = tmp_path / "sweep"
    arguments = ["sweep", recipe, *RATES, "--sweep-dir", str(folder)]
    first, second = (RunFolder(folder / f"learning_rate={rate}") for rate in (0.01, 0.02))
    process = start([*arguments, "--train.max_steps", "100000"], start_new_session=True)
    deadline = time.monotonic() + 200
    while not (first.metrics.is_file() and '"step": 20,' in first.metrics.read_text()):
        assert time.monotonic() < deadline, process.kill()
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    # Ctrl-C on a terminal sends the signal to the whole group.
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 75, output
    assert "saved" in output
    assert "interrupted" in output
    assert first.newest_checkpoint() is not None
    assert not second.path.exists()
    steps = int(first.newest_checkpoint().name.removeprefix("step_"))
    # both runs to their ends: the first from its checkpoint
    recipe_text = first.recipe.read_text()
    first.recipe.write_text(recipe_text.replace("max_steps: 100000", f"max_steps: {steps + 4}"))
    process = start([*arguments, "--train.max_steps", str(steps + 4)])
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    rows = json.loads((folder / "sweep.json").read_text())["runs"]
    assert [(row["status"], row["steps"]) for row in rows] == [("done", steps + 4)] * 2
    assert list(column(first, "train/loss")) == list(range(1, steps + 5))  # not started again


@pytest.mark.parametrize("steps", ["", "--train.epochs 1"])
def test_sweep_is_refused_if_its_data_was_prepared_with_other_knobs(write_recipe, refused, steps):
    recipe = write_recipe()
    prepare(load_config(recipe))
    words = argv(f"sweep {{}} --train.seed 1,2 --data.validation_fraction 0.3 {steps}", recipe)
    line = refused(*words)
    assert line.startswith("seed=1: ")
    assert "prepared with data.validation_fraction 0.1, the recipe says 0.3" in line
    assert line.endswith("no run was started")
