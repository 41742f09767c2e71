"""Scaling with replaced launches: arithmetic, table, plot and accelerate configs."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from nanogpt_hf.bench import scaling
from nanogpt_hf.bench.scaling import Point, draw, machine_of, measure, table
from nanogpt_hf.errors import UserError
from nanogpt_hf.planning.placement import config_text


@pytest.fixture
def launches(monkeypatch):
    """The recorded launches; one process reaches 100 tokens per second, two reach 150."""
    launches = []

    def launch(words, **options):
        machine = yaml.safe_load(Path(words[words.index("--config_file") + 1]).read_text())
        launches.append((machine, words, options["env"]["OMP_NUM_THREADS"]))
        rate = {1: 100.0, 2: 150.0}[machine["num_processes"]]
        figures = {"tokens_per_second": rate, "step_seconds": {"median": 10 / rate}}
        Path(words[words.index("--json") + 1]).write_text(json.dumps(figures))
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(scaling.subprocess, "run", launch)
    monkeypatch.setattr(scaling, "allowed_cores", lambda: 8)
    return launches


def test_measure_efficiency_and_threads(launches):
    points = measure([1, 2], lambda count: ["recipe.yaml", f"--n{count}"], lambda line: None)
    assert points == [Point(1, 100.0, 0.1, 1.0), Point(2, 150.0, 10 / 150, 0.75)]
    assert [machine["num_processes"] for machine, *_ in launches] == [1, 2]
    assert [threads for *_, threads in launches] == ["4", "4"]
    words = launches[1][1]
    assert words[words.index("bench") + 1 :][:2] == ["recipe.yaml", "--n2"]
    assert table(points) == [
        "processes  step (ms)      tokens/s  efficiency",
        "        1     100.00           100        100%",
        "        2      66.67           150         75%",
    ]


def test_measure_reports_a_failed_launch_in_one_line(monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="data.source: is not there\nmore")
    monkeypatch.setattr(scaling.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(UserError, match=r"^bench on 1 process failed: data\.source: is not there$"):
        measure([1], lambda count: [], lambda line: None)


@pytest.mark.parametrize(
    ("processes", "split", "kind", "stated"),
    [
        (1, "tp", "NO", {}),
        (3, "ddp", "MULTI_GPU", {}),  # MULTI_CPU would start one
        (2, "fsdp2", "FSDP", {"fsdp_version": 2}),
        (4, "tp", "MULTI_GPU", {"parallelism_config_tp_size": 4}),
        (2, "pp", "MULTI_GPU", {"parallelism_config_pp_size": 2}),
    ],
)
def test_machine_starts_processes_and_splits_the_work(processes, split, kind, stated):
    machine = yaml.safe_load(config_text(machine_of(processes, split)))
    gpu = torch.cuda.is_available()
    assert (machine["distributed_type"], machine["num_processes"]) == (kind, processes)
    assert (machine["mixed_precision"], machine["use_cpu"]) == ("bf16" if gpu else "no", not gpu)
    sizes = machine.get("fsdp_config", {}) | machine.get("parallelism_config", {})
    assert stated.items() <= sizes.items()


def test_draw_writes_a_png(tmp_path):
    draw(
        [Point(1, 100.0, 0.1, 1.0), Point(2, 150.0, 0.07, 0.75)],
        "a $recipe$",
        tmp_path / "scaling.png",
    )
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
