"""The `bench` command on a tiny recipe."""

import json

import pytest

from arguments import argv
from nanogpt_hf.commands import main


@pytest.fixture(scope="module")
def bench(tmp_path_factory, make_recipe, forget_accelerate):
    """Exit status, printed lines and folder (JSON, trace) of a bench of a recipe without
    prepared data.
    """
    folder = tmp_path_factory.mktemp("bench")
    recipe = make_recipe(folder / "tiny.yaml")
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.chdir(folder)
        patch.setattr("nanogpt_hf.commands.bench.show", lines.append)
        options = "--windows 3 --against bare --json figures.json --profile trace.json"
        status = main(argv(f"bench {{}} {options}", recipe))
    forget_accelerate()
    return status, lines, folder


@pytest.mark.long
def test_bench_prints_each_measurement(bench):
    status, lines, _ = bench
    assert status == 0
    assert lines[0].endswith("4 sequences × 16 × 1 processes × 2 accumulated")
    topics = "tokens machine step throughput MFU memory against trace"
    assert [line.split()[0] for line in lines[1:]] == topics.split()
    assert "MFU         n/a: the peak of this device is unknown" in lines[5]


@pytest.mark.long
def test_bench_json_has_the_measurements(bench):
    _, _, folder = bench
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["tokens_per_second"] == pytest.approx(128 / figures["step_seconds"]["median"])
    assert figures["mfu"] is None
    assert figures["against_bare"]["ratio"]["median"] > 0


@pytest.mark.long
def test_bench_trace_is_of_our_step_and_no_other_file_is_written(bench):
    _, _, folder = bench
    assert '"name": "aten::_fused_adamw_"' in (folder / "trace.json").read_text()
    names = {path.name for path in folder.iterdir()}
    assert names == {"figures.json", "tiny.yaml", "trace.json"}


@pytest.mark.long
@pytest.mark.slow
def test_bench_under_tensor_parallelism(launch_warm, make_recipe, tmp_path):
    recipe, figures = make_recipe(tmp_path / "tiny.yaml"), tmp_path / "figures.json"
    launch_warm("tp", "bench", recipe, "--windows", 1, "--json", figures)
    figures = json.loads(figures.read_text())
    assert figures["tokens_per_second"] == pytest.approx(128 / figures["step_seconds"]["median"])
    assert figures["communicated_bytes"].keys() == {"all-reduce"}
