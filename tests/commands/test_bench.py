"""The `bench` command on a tiny recipe."""

import json
import sys

import pytest

from arguments import argv
from nanogpt_hf.commands import main


@pytest.mark.long
def test_bench_prints_and_writes_each_measurement(tmp_path, make_recipe, monkeypatch, capsys):
    # a tracker that is not installed: nothing is logged
    recipe = make_recipe(tmp_path / "tiny.yaml", tracking__trackers=["comet_ml"])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "nanogpt_hf.bench.trainer", raising=False)
    options = "--windows 3 --against bare --json figures.json --profile trace.json"
    assert main(argv(f"bench {{}} {options}", recipe)) == 0
    lines = capsys.readouterr().out.splitlines()
    while not lines[0].endswith("4 sequences × 16 × 1 processes × 2 accumulated"):
        # A library prints the first line.
        del lines[0]
    topics = "tokens machine step an throughput MFU memory against trace"
    assert [line.split()[0] for line in lines[1:]] == topics.split()
    figures = json.loads((tmp_path / "figures.json").read_text())
    per_hour = int(lines[4].split()[2].replace(",", ""))
    assert per_hour == pytest.approx(3600 / figures["step_seconds"]["median"], abs=1)
    assert figures["tokens_per_second"] == pytest.approx(128 / figures["step_seconds"]["median"])
    assert figures["mfu"] is None
    assert figures["against_bare"]["ratio"]["median"] > 0
    # Its import of the Trainer takes time.
    assert "nanogpt_hf.bench.trainer" not in sys.modules
    # of our step
    assert '"name": "aten::_fused_adamw_"' in (tmp_path / "trace.json").read_text()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"figures.json", "tiny.yaml", "trace.json"}


def test_bench_refuses_a_launch_that_a_run_would_refuse(write_recipe, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    assert main(["bench", str(write_recipe())]) == 2
    line = capsys.readouterr().err.splitlines()[0]
    assert "gradient_accumulation_steps 3" in line
    assert "train.tokens_per_step" in line
